"""Clients of a model in this process answer as those of a service, and leave nothing behind."""

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
from tests.albert_serve.client.twins import CASES, MASKED, assert_same

LONG = "a long text " * 100
WORK = [LONG] * 1000  # for seconds
LOCAL_LIMITS = {"max_items", "max_body_bytes"}  # the tests' service has others

Call = Callable[[Any], Any]
ANSWERED: dict[str, Call] = {
    "cut": lambda albert: albert.text_classification(LONG, truncation=True),
    "streamed": lambda albert: list(albert.stream("text-classification", ["a film"] * 50)),
    "health": lambda albert: [albert.health(), albert.wait_until_ready(5)],
    "info": lambda albert: albert.info().model_dump(exclude=LOCAL_LIMITS),
}
REFUSED: dict[str, Call] = {
    "no mask": lambda albert: albert.fill_mask([*MASKED, "no mask"]),
    "too long": lambda albert: albert.text_classification(LONG),
    "no such task": lambda albert: albert.token_classification("a"),
}


@pytest.fixture(scope="module")
def local(bundle_dir: Path) -> Iterator[AlbertClient]:
    with AlbertClient.local(bundle_dir, num_threads=1) as client:
        yield client


@pytest.mark.parametrize("name", sorted({*CASES, *ANSWERED} - {"token_classification"}))
def test_answers_are_those_of_the_service(
    name: str, local: AlbertClient, albert: AlbertClient
) -> None:
    case = CASES.get(name)

    def ask(client: AlbertClient) -> Any:
        return getattr(client, name)(case.rows, **case.options) if case else ANSWERED[name](client)

    assert_same(ask(local), ask(albert))


@pytest.mark.parametrize("column", [pandas.Series, np.array], ids=["pandas", "numpy"])
def test_a_column_is_answered_as_the_list(column: Any, local: AlbertClient) -> None:
    texts = ["a film", "another film"]
    assert_same(local.text_classification(column(texts)), local.text_classification(texts))
    with pytest.raises(InvalidInputError, match=r"inputs\[1\]"):
        local.text_classification(column(["a film", None]))


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_the_service(
    name: str, local: AlbertClient, albert: AlbertClient
) -> None:
    errors = []
    for client in (local, albert):
        with pytest.raises(AlbertServeError) as raised:
            REFUSED[name](client)
        errors.append(raised.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])


def test_no_call_is_refused_because_of_others(bundle_dir: Path) -> None:
    """More tokens than a service's queue holds, from more callers than it answers at once."""
    texts = [LONG] * 10

    async def ask() -> list[Any]:
        async with AsyncAlbertClient.local(bundle_dir, num_threads=1) as albert:
            calls = [albert.text_classification(texts, truncation=True) for _ in range(150)]
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert {len(answer) for answer in answers} == {len(texts)}


def test_many_threads_share_a_client(local: AlbertClient) -> None:
    texts = [f"film {number}" for number in range(64)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(local.text_classification, texts))
    assert_same(answers, local.text_classification(texts))


def test_a_call_ends_with_its_time(bundle_dir: Path) -> None:
    with (
        AlbertClient.local(bundle_dir, num_threads=1, timeout_s=0.2) as albert,
        pytest.raises(DeadlineExceededError, match=r"0\.2"),
    ):
        albert.text_classification(WORK, truncation=True)


def test_a_fork_is_told_to_open_its_own_model(bundle_dir: Path) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert re.search(r"is a fork of process \d+, .*\. Open", done.stdout)
    assert re.search(r"^(negative|positive)$", done.stdout, re.MULTILINE)


def engines() -> set[int]:
    """The engines of this process, by their addresses."""
    gc.collect()
    return {id(one) for one in gc.get_objects() if type(one) is Engine}


def test_several_are_open_at_once_and_each_is_freed(bundle_dir: Path) -> None:
    before = engines()
    first = AlbertClient.local(bundle_dir, num_threads=1)
    [first_engine] = engines() - before
    second = AlbertClient.local(bundle_dir, num_threads=1)
    assert_same(first.text_classification("a"), second.text_classification("a"))
    first.close()
    first.close()
    assert first_engine not in engines()
    with pytest.raises(RuntimeError, match="closed"):
        first.info()
    assert second.info().model_id == "tiny"
    second.close()
    assert engines() <= before


def test_what_cannot_be_opened_is_an_error(bundle_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleMissingError, match=r"nowhere does not exist"):
        AlbertClient.local(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="num_threads is 0"):
        AsyncAlbertClient.local(bundle_dir, num_threads=0)
    with pytest.raises(ConfigError, match="cannot be pickled or copied"):
        copy.copy(AlbertClient("http://a"))
