"""A corpus that was stopped on its way, however it was, ends as one that was not."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.training.support import REPOSITORY, SMALL_PART, WIKI, file_contents, limited_file_size
from training.data.corpus import Document, Place
from training.data.shards import ShardError, Shards
from training.data.tokenization import tokenise
from training.prepare import prepare

# Dies before each of its changes to files in turn. All in one process that forks, because
# Python takes longer to start than the corpus to tokenise.
KILL_EVERYWHERE = r"""
import os, shutil, signal, sys
from itertools import count
from pathlib import Path
from training.prepare import prepare
from training.data.shards import ShardError, Shards

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
tokenizer_file, corpus, before, expected = map(Path, sys.argv[1:])
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

def check_reader():
    try:
        found = Shards.open(folder)
    except ShardError as error:
        assert "is not whole" in str(error) or "holds no shards.json" in str(error), error
        return
    assert found.num_tokens in known, found.num_tokens

known = [Shards.open(each).num_tokens for each in (before, expected)]
for start in (None, before):
    for number in count():
        shutil.rmtree(folder, ignore_errors=True)
        if start:
            shutil.copytree(start, folder)
        child = os.fork()
        if not child:
            die_before(number)
            run()
            os._exit(0)
        was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        check_reader()
        run()
        assert content(folder) == content(expected), number
        if not was_killed:
            break
    print(number)
"""


def test_killed_before_any_operation_it_goes_on_to_the_same_bytes(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    corpus, before, expected = (tmp_path / name for name in ("a.txt", "before", "expected"))
    prepare([WIKI], tokenizer_file, before, part_bytes=50_000)
    corpus.write_text("\n\n".join(["It rained. " * 20, "It snowed. " * 25]))
    assert len(prepare([corpus], tokenizer_file, expected, part_bytes=600).parts) == 2
    arguments = map(str, (tokenizer_file, corpus, before, expected))
    done = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, replaced = map(int, done.stdout.split())
    assert first >= 2 * 7
    assert replaced > first


# Reads some documents, then none, so that a signal comes in the middle.
WAITING = r"""
import signal, sys
from pathlib import Path

from training import prepare
from training.data import tokenization

def read_from(files, start):
    for number, document in enumerate(original(files, start)):
        if number == 12:
            print("waiting", flush=True)
            signal.pause()
        yield document

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests may ignore it
    original, prepare.read_from = prepare.read_from, read_from
    prepare.PART_BYTES = int(sys.argv.pop(1))
    tokenization._CHARACTERS_A_CHUNK = 1
    sys.exit(prepare.main(sys.argv[1:]))
"""


@contextmanager
def waiting(arguments: list[str], scratch: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, in a process group of its own, when it has written a part and waits."""
    script = scratch / "waiting.py"
    script.write_text(WAITING)
    with subprocess.Popen(
        [sys.executable, str(script), str(SMALL_PART), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "waiting\n", process.communicate()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_with_its_workers_at_work_it_goes_on(
    in_parts: Path, vocab_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "shards"
    arguments = [
        *("--corpus", str(WIKI), "--tokenizer", str(vocab_dir)),
        *("--output", str(folder), "--workers", "2"),
    ]
    with waiting(arguments, tmp_path) as process:
        if number is signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)
        # The workers hold the same pipes, so that this waits for their end, too.
        _, errors = process.communicate(timeout=60)
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert errors == "\nstopped; the same command resumes it\n"
    kept = {name for name in file_contents(folder) if name.startswith("part-")}
    assert kept
    with pytest.raises(ShardError, match=r"is not whole; give the command .* again"):
        Shards.open(folder)
    inodes = {name: (folder / name).stat().st_ino for name in kept}
    prepare([WIKI], vocab_dir / "tokenizer.json", folder, part_bytes=SMALL_PART)
    assert file_contents(folder) == file_contents(in_parts)
    assert inodes == {name: (folder / name).stat().st_ino for name in kept}


@pytest.fixture
def half_done(in_parts: Path, tmp_path: Path) -> Path:
    """As a process leaves it that was killed after the second part."""
    folder = tmp_path / "half"
    shutil.copytree(in_parts, folder)
    for part in sorted(folder.glob("part-*"))[2:]:
        shutil.rmtree(part)
    note = json.loads((folder / "shards.json").read_text())
    (folder / "partial.json").write_text(json.dumps({**note, "parts": note["parts"][:2]}))
    (folder / "shards.json").unlink()
    return folder


@pytest.mark.parametrize("name", ["part-00000/tokens.npy", "part-00001/documents.npy"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 100)])
def test_a_part_that_is_not_whole_is_made_again(
    half_done: Path,
    in_parts: Path,
    tokenizer_file: Path,
    name: str,
    damage: Callable[[Path], Any],
) -> None:
    damage(half_done / name)
    first, link = half_done / "part-00000" / "sentences.npy", half_done.parent / "first"
    link.hardlink_to(first)  # so that no other file has its inode
    prepare([WIKI], tokenizer_file, half_done, part_bytes=SMALL_PART)
    assert file_contents(half_done) == file_contents(in_parts)
    assert first.samefile(link) == name.startswith("part-00001")


def test_a_full_disk_keeps_the_whole_parts(tmp_path: Path, tokenizer_file: Path) -> None:
    corpus, folder, expected = tmp_path / "a.txt", tmp_path / "shards", tmp_path / "expected"
    corpus.write_text("It rained. " * 20 + "\n\n" + "It snowed. " * 5000)
    args = [corpus], tokenizer_file
    message = rf"{folder} cannot be written: .*; whole parts are kept \(1\), with that mended"
    with limited_file_size(10_000), pytest.raises(ShardError, match=message):
        prepare(*args, folder, part_bytes=600)
    assert sorted(path.name for path in folder.iterdir()) == ["part-00000", "partial.json"]
    prepare(*args, folder, part_bytes=600)
    prepare(*args, expected, part_bytes=600)
    assert file_contents(folder) == file_contents(expected)


def test_a_dead_worker_is_reported(tokenizer_file: Path) -> None:
    def documents() -> Iterator[Document]:
        """Ends a worker once there is one."""
        while True:
            for worker in multiprocessing.active_children():
                worker.kill()
            yield Document(text="It rained. " * 100_000, end=Place())

    with pytest.raises(ShardError, match="a worker was killed, most likely for want of memory"):
        list(tokenise(documents(), tokenizer_file, num_workers=2))
