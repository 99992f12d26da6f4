"""The installed package tells type checkers its types (PEP 561)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.albert_serve.support import ROOT

PROGRAM = """
from collections.abc import AsyncIterator, Iterator

from albert_serve.api.schemas import Coherence, InfoReply, LabelScore, Order
from albert_serve.client import AlbertClient, AsyncAlbertClient
from albert_serve.errors import RequestError


def read() -> Iterator[str]:
    yield "a film"


def sync(albert: AlbertClient) -> None:
    one: list[LabelScore] = albert.text_classification("a film", top_k=1)
    several: list[list[LabelScore]] = albert.text_classification(["a film", "another"])
    with albert.text_classification_stream(read(), truncation=True) as answers:
        best: list[str] = [answer[0].label for answer in answers]
    for answer in albert.sentence_order_stream([{"text": "a", "text_pair": "b"}]).with_errors():
        share: float = 0.0 if isinstance(answer, RequestError) else answer.in_order
    info: InfoReply = albert.info()
    ready: bool = albert.health()
    albert.wait_until_ready(timeout_s=5)
    print(one, several, best, share, info, ready)


async def texts() -> AsyncIterator[list[str]]:
    yield ["It rained.", "We stayed in."]


async def asynchronous(albert: AsyncAlbertClient) -> None:
    order: Order = await albert.sentence_order({"text": "a", "text_pair": "b"})
    async with albert.coherence_stream(texts()) as answers:
        found: list[Coherence] = [answer async for answer in answers]
    async for answer in albert.coherence_stream([["a", "b"]]).with_errors():
        if not isinstance(answer, RequestError):
            print(answer.coherence)
    await albert.wait_until_ready()
    print(order, found, await albert.info(), await albert.health())
"""
WRONG = """
from albert_serve.client import AlbertClient

client = AlbertClient()
client.text_classification_stream(["a"], topk=1)
client.sentence_order_stream(["a"])
label: int = client.text_classification("a")[0].label
for answer in client.text_classification_stream(["a"]).with_errors():
    answer[0]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment into which the package is copied, as a wheel has it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    shutil.copytree(
        ROOT / "albert_serve", packages / "albert_serve", ignore=shutil.ignore_patterns("*.pyc")
    )
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Path(sysconfig.get_path("scripts", vars={"base": str(folder)})) / "python"


def mypy(program: str, installed: Path, folder: Path) -> list[str]:
    (folder / "program.py").write_text(program)
    checker = ["-m", "mypy", "--strict", "--no-error-summary", "--config-file", ""]
    done = subprocess.run(
        [sys.executable, *checker, "--python-executable", str(installed), "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_program_with_both_clients_is_checked(installed: Path, tmp_path: Path) -> None:
    assert mypy(PROGRAM, installed, tmp_path) == []


@pytest.mark.slow
def test_wrong_uses_are_found(installed: Path, tmp_path: Path) -> None:
    lines = {line.split(":")[1] for line in mypy(WRONG, installed, tmp_path) if "error:" in line}
    assert lines == {"5", "6", "7", "9"}
