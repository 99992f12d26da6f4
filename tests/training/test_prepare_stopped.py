"""A corpus that was stopped on its way, however it was, ends as one that was not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.training.support import REPOSITORY, SMALL_PART, WIKI, file_contents, limited_file_size
from training.data.corpus import CorpusPosition, Document
from training.data.preparation import prepare
from training.data.shards import ShardError, Shards
from training.data.tokenization import tokenise

pytestmark = pytest.mark.process

# Dies before each of its changes to files in turn. All in one process that forks, because
# Python takes longer to start than the corpus to tokenise.
KILL_EVERYWHERE = r"""
import os, shutil, signal, sys
from itertools import count
from pathlib import Path
from training.data.preparation import prepare
from training.data.shards import ShardError, Shards

OPERATIONS = {"open", "os.mkdir", "os.rename"}
tokenizer_file, corpus, expected = map(Path, sys.argv[1:])
folder = expected.with_name("killed")
# The system outlives the process; waiting for the disk would only take time.
os.fsync = lambda descriptor: None

def die_before(number):
    numbers = count()
    def hook(event, arguments):
        if event not in OPERATIONS or not str(arguments[0]).startswith(str(folder)):
            return
        is_read = event == "open" and arguments[1] != "w"
        if not is_read and next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def run():
    return prepare([corpus], tokenizer_file, folder, part_bytes=600)

def content(root):
    files = [file for file in root.rglob("*") if file.is_file()]
    return {str(file.relative_to(root)): file.read_bytes() for file in files}

for number in count():
    shutil.rmtree(folder, ignore_errors=True)
    child = os.fork()
    if not child:
        die_before(number)
        run()
        os._exit(0)
    was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    try:
        Shards.open(folder)
        assert content(folder) == content(expected), number
    except ShardError as error:
        assert "is not whole" in str(error) or "holds no shards.json" in str(error), error
    run()
    assert content(folder) == content(expected), number
    if not was_killed:
        break
print(number)
"""


def test_killed_before_any_operation_it_goes_on_to_the_same_bytes(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    corpus, expected = tmp_path / "a.txt", tmp_path / "expected"
    corpus.write_text("\n\n".join(["It rained. " * 20, "It snowed. " * 25]))
    assert len(prepare([corpus], tokenizer_file, expected, part_bytes=600).parts) == 2
    arguments = map(str, (tokenizer_file, corpus, expected))
    done = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2 * 6


# The command with small parts.
IN_SMALL_PARTS = r"""
import signal, sys
from pathlib import Path
from training.commands.prepare import main
from training.data.preparation import prepare

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests may ignore it
    prepare.__kwdefaults__["part_bytes"] = int(sys.argv.pop(1))
    sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def prepare_until(
    reached: Callable[[int], bool], options: list[str], folder: Path, script: Path
) -> Iterator[subprocess.Popen[str]]:
    """The command, in a process group of its own, once `reached` is true of its pid."""
    script.write_text(IN_SMALL_PARTS)
    with subprocess.Popen(
        [sys.executable, str(script), str(SMALL_PART), *options, "--output", str(folder)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            while not reached(process.pid):
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_with_its_workers_at_work_it_goes_on(
    tokenizer_file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder, corpus = tmp_path / "shards", tmp_path / "corpus.jsonl"
    corpus.write_text(WIKI.read_text() * 40)
    options = ["--corpus", str(corpus), "--tokenizer", str(tokenizer_file.parent), "--workers", "2"]
    with prepare_until(
        lambda pid: (folder / "partial.json").is_file(), options, folder, tmp_path / "script.py"
    ) as process:
        if number is signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)
        # The workers hold the same pipe, so that this waits for their end, too.
        _, errors = process.communicate(timeout=60)
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert errors == "\nstopped; repeat the command to resume it\n"
    with pytest.raises(ShardError, match=r"is not whole; give the command .* again"):
        Shards.open(folder)
    first = folder / "part-00000" / "tokens.npy"
    written = first.stat().st_mtime_ns
    prepare([corpus], tokenizer_file, folder, part_bytes=SMALL_PART)
    prepare([corpus], tokenizer_file, tmp_path / "whole", part_bytes=SMALL_PART)
    assert file_contents(folder) == file_contents(tmp_path / "whole")
    assert first.stat().st_mtime_ns == written


def has_a_worker(pid: int) -> bool:
    return len(psutil.Process(pid).children()) > 1  # the first is the resource tracker


def imports_in_a_worker(pid: int) -> bool:
    return any(
        "pyarrow" in library.path
        for child in psutil.Process(pid).children()
        for library in child.memory_maps()
    )


@pytest.mark.parametrize("reached", [has_a_worker, imports_in_a_worker])
def test_stopped_while_its_workers_start_it_says_one_line(
    reached: Callable[[int], bool], tokenizer_file: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(WIKI.read_text() * 40)
    options = ["--corpus", str(corpus), "--tokenizer", str(tokenizer_file.parent), "--workers", "6"]
    with prepare_until(reached, options, tmp_path / "shards", tmp_path / "script.py") as process:
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "\nstopped; repeat the command to resume it\n"


def test_a_full_disk_keeps_the_whole_parts(tmp_path: Path, tokenizer_file: Path) -> None:
    corpus, folder, expected = tmp_path / "a.txt", tmp_path / "shards", tmp_path / "expected"
    corpus.write_text("It rained. " * 20 + "\n\n" + "It snowed. " * 5000)
    args = [corpus], tokenizer_file
    message = rf"{folder} cannot be written: .*\. 1 complete parts are saved\. Fix the problem"
    with limited_file_size(10_000), pytest.raises(ShardError, match=message):
        prepare(*args, folder, part_bytes=600)
    with pytest.raises(ShardError, match="is not whole"):
        Shards.open(folder)
    prepare(*args, folder, part_bytes=600)
    prepare(*args, expected, part_bytes=600)
    assert file_contents(folder) == file_contents(expected)


def test_a_dead_worker_is_reported(tokenizer_file: Path) -> None:
    def documents() -> Iterator[Document]:
        """Ends a worker once there is one."""
        while True:
            for worker in multiprocessing.active_children():
                worker.kill()
            yield Document(text="It rained. " * 100_000, end=CorpusPosition())

    with pytest.raises(ShardError, match="a worker was killed, most likely for want of memory"):
        list(tokenise(documents(), tokenizer_file, num_workers=2))
