"""A local client gives the answers and errors of a service, and frees its model."""

from __future__ import annotations

import asyncio
import copy
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from albert_serve.client import AlbertClient, AsyncAlbertClient
from albert_serve.errors import (
    AlbertServeError,
    BundleMissingError,
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
)
from albert_serve.runtime.engine import Engine
from tests.albert_serve.client.support import CASES, MASKED, assert_same

LONG = "a long text " * 100

Call = Callable[[Any], Any]
CALLS: dict[str, Call] = {
    "truncated": lambda albert: albert.text_classification(LONG, truncation=True),
    "streamed": lambda albert: list(albert.stream("text-classification", ["a film"] * 50)),
    "health": lambda albert: [albert.health(), albert.wait_until_ready(5)],
    # A local model has other limits than the service.
    "info": lambda albert: albert.info().model_dump(exclude={"max_items", "max_body_bytes"}),
}
FAILING_CALLS: list[Call] = [
    lambda albert: albert.fill_mask([*MASKED, "no mask"]),
    lambda albert: albert.text_classification(LONG),
    lambda albert: albert.token_classification("a"),
]


@pytest.fixture(scope="module")
def local(bundle_dir: Path) -> Iterator[AlbertClient]:
    with AlbertClient.local(bundle_dir, num_threads=1) as client:
        yield client


@pytest.mark.parametrize("name", sorted({*CASES, *CALLS} - {"token_classification"}))
def test_a_local_client_gives_the_answers_of_the_service(
    name: str, local: AlbertClient, albert: AlbertClient
) -> None:
    case = CASES.get(name)

    def ask(client: AlbertClient) -> Any:
        return getattr(client, name)(case.rows, **case.options) if case else CALLS[name](client)

    assert_same(ask(local), ask(albert))


@pytest.mark.parametrize("column", [pandas.Series, np.array], ids=["pandas", "numpy"])
def test_a_column_gets_the_answers_of_a_list(column: Any, local: AlbertClient) -> None:
    texts = ["a film", "another film"]
    assert_same(local.text_classification(column(texts)), local.text_classification(texts))
    with pytest.raises(InvalidInputError, match=r"inputs\[1\]"):
        local.text_classification(column(["a film", None]))


def test_a_local_client_raises_the_errors_of_the_service(
    local: AlbertClient, albert: AlbertClient
) -> None:
    for call in FAILING_CALLS:
        with pytest.raises(AlbertServeError) as expected:
            call(albert)
        with pytest.raises(expected.type, match=f"^{re.escape(str(expected.value))}$") as caught:
            call(local)
        assert caught.type is expected.type


def test_concurrent_local_calls_are_never_rejected(bundle_dir: Path) -> None:
    """The calls exceed a service's limits of queued tokens and of concurrent callers."""
    texts = [LONG] * 10

    async def ask() -> list[Any]:
        async with AsyncAlbertClient.local(bundle_dir, num_threads=1) as albert:
            calls = [albert.text_classification(texts, truncation=True) for _ in range(150)]
            answers = await asyncio.gather(*calls)
        with pytest.raises(RuntimeError, match="closed"):
            await albert.info()
        return answers

    answers = asyncio.run(ask())
    assert {len(answer) for answer in answers} == {len(texts)}


def test_threads_can_share_a_client(local: AlbertClient) -> None:
    texts = [f"film {number}" for number in range(64)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(local.text_classification, texts))
    assert_same(answers, local.text_classification(texts))


def test_a_local_call_fails_after_its_timeout(bundle_dir: Path) -> None:
    with (
        AlbertClient.local(bundle_dir, num_threads=1, timeout_s=0.2) as albert,
        pytest.raises(DeadlineExceededError, match=r"0\.2"),
    ):
        albert.text_classification([LONG] * 1000, truncation=True)  # this takes seconds


def test_a_fork_gets_an_error_that_asks_for_its_own_model(bundle_dir: Path) -> None:
    program = (
        "import os, sys\nfrom albert_serve.client import AlbertClient\n"
        f"albert = AlbertClient.local({str(bundle_dir)!r}, num_threads=1)\n"
        "child = os.fork()\n"
        "try: answer = albert.text_classification('a film')[0].label\n"
        "except ValueError as error: answer = str(error)\n"
        "albert.close()\n"
        "print(answer, flush=True)\n"
        "child and os.waitpid(child, 0)\n"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)
    assert re.search(r"is a fork of process \d+, .*\. Open", output)
    assert re.search(r"^(negative|positive)$", output, re.MULTILINE)


def engine_ids() -> set[int]:
    """Return the addresses of the engines of this process."""
    gc.collect()
    return {id(item) for item in gc.get_objects() if type(item) is Engine}


def test_several_models_can_be_open_and_closing_a_client_frees_its_model(bundle_dir: Path) -> None:
    initial_engines = engine_ids()
    first = AlbertClient.local(bundle_dir, num_threads=1)
    [first_engine] = engine_ids() - initial_engines
    second = AlbertClient.local(bundle_dir, num_threads=1)
    assert_same(first.text_classification("a"), second.text_classification("a"))
    first.close()
    first.close()
    assert first_engine not in engine_ids()
    with pytest.raises(RuntimeError, match="closed"):
        first.info()
    assert second.info().model_id == "tiny"
    second.close()
    assert engine_ids() <= initial_engines


def test_opening_without_a_bundle_or_with_bad_options_is_an_error(
    bundle_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(BundleMissingError, match=r"nowhere does not exist"):
        AlbertClient.local(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="num_threads is 0"):
        AsyncAlbertClient.local(bundle_dir, num_threads=0)
    with pytest.raises(ConfigError, match="cannot be pickled or copied"):
        copy.copy(AlbertClient("http://a"))
