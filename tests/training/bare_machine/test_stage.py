"""What is sent gathers in any order, is checked, and is not trained on twice at a time."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from scripts.bare_machine.child import Deadline, run_until
from scripts.bare_machine.manifest import BareMachineError
from scripts.bare_machine.pack import Job, pack
from scripts.bare_machine.pieces import hash_file
from scripts.bare_machine.selection import Selection
from scripts.bare_machine.stage import Stage, describe_missing
from tests.training.bare_machine.support import (
    ONE_LOAD,
    content,
    damage,
    pack_small,
    run_there,
    write_run,
)
from tests.training.support import REPOSITORY


@pytest.fixture(scope="module")
def loads(parts: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A job in several loads."""
    found = pack_small(parts, vocab_dir, tmp_path_factory.mktemp("packed") / "job")
    assert len(found) >= 2
    return found


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(folder=tmp_path / "stage")


def test_loads_gather_in_any_order(loads: list[Path], tmp_path: Path) -> None:
    jobs = []
    for place, order in enumerate(itertools.islice(itertools.permutations(loads), 3)):
        stage = Stage(folder=tmp_path / str(place))
        for load in order[:-1]:
            stage.take_in(load)
            assert stage.unpack()
        stage.take_in(order[-1])
        assert stage.unpack() == []
        jobs.append(content(stage.job))
    assert all(job == jobs[0] for job in jobs)
    assert {record.path for record in stage.manifest().files} == jobs[0].keys()


def test_what_is_still_to_be_sent_is_told(loads: list[Path], stage: Stage) -> None:
    stage.take_in(loads[-1])
    missing = stage.unpack()
    numbers = {int(file.name[:3]) for load in loads[:-1] for file in (load / "pieces").iterdir()}
    assert {piece.number for piece in missing} == numbers
    names = ", ".join(load.name for load in loads[:-1])
    assert describe_missing(stage.manifest(), missing).endswith(f"; send {names}")


def test_a_stage_keeps_the_program(loads: list[Path], stage: Stage) -> None:
    for load in loads:
        stage.take_in(load)
    ours = {name for name in content(stage.folder) if not name.startswith("pieces")}
    assert ours == {name for name in content(loads[0]) if not name.startswith("pieces")}
    stage.take_in(stage.folder)


def test_a_load_that_is_whole_is_its_own_stage(
    loads: list[Path], stage: Stage, tmp_path: Path
) -> None:
    shutil.copytree(loads[0], tmp_path / "load")
    for load in loads[1:]:
        shutil.copytree(load / "pieces", tmp_path / "load" / "pieces", dirs_exist_ok=True)
    assert Stage(folder=tmp_path / "load").unpack() == []


def test_a_damaged_piece_is_told_and_can_be_sent_again(
    loads: list[Path], stage: Stage, tmp_path: Path
) -> None:
    load = tmp_path / "load-1"
    shutil.copytree(loads[0], load)
    spoilt = sorted((load / "pieces").iterdir())[1]
    damage(spoilt)
    with pytest.raises(BareMachineError, match=f"damaged on the way: {spoilt.name}; send load-1"):
        stage.take_in(load)
    for other in loads[1:]:
        stage.take_in(other)
    assert [piece.name for piece in stage.unpack()] == [spoilt.name]
    stage.take_in(loads[0])
    assert stage.unpack() == []


def test_a_piece_that_was_damaged_in_the_stage_is_taken_again(
    loads: list[Path], stage: Stage
) -> None:
    for load in loads:
        stage.take_in(load)
    for file in (stage.folder / "pieces").iterdir():
        damage(file)
    assert len(stage.unpack()) == len(stage.manifest().pieces)
    for load in loads:
        stage.take_in(load)
    assert stage.unpack() == []


def test_a_file_that_was_changed_is_put_right(loads: list[Path], stage: Stage) -> None:
    for load in loads:
        stage.take_in(load)
    stage.unpack()
    file = stage.job / "code" / "training" / "pretrain.py"
    before = hash_file(file)
    damage(file)
    stage.unpack()
    assert hash_file(file) == before


def test_a_wrong_hash_in_the_manifest(loads: list[Path], stage: Stage, tmp_path: Path) -> None:
    shutil.copytree(loads[0], tmp_path / "load")
    file = tmp_path / "load" / "manifest.json"
    manifest = json.loads(file.read_bytes())
    manifest["groups"][0]["files"][0]["sha256"] = "0" * 64
    file.write_text(json.dumps(manifest))
    with pytest.raises(BareMachineError, match="its content is not what its hash says"):
        stage.take_in(tmp_path / "load")
    assert not stage.folder.exists()


def test_a_stage_with_no_job(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(BareMachineError, match="holds no job; send its loads, with --stage"):
        stage.manifest()
    with pytest.raises(BareMachineError, match="cannot be read: No such file"):
        stage.take_in(tmp_path)
    with pytest.raises(BareMachineError, match="has no such checkpoint; there is none"):
        stage.send(tmp_path / "out", range(4))


def test_a_run_that_is_brought_is_gone_on_with(stage: Stage, tmp_path: Path) -> None:
    write_run(tmp_path / "brought", 10)
    stage.begin_from(tmp_path / "brought")
    assert content(stage.run) == content(tmp_path / "brought")
    write_run(stage.run, 20)
    before = content(stage.run)
    stage.begin_from(tmp_path / "brought")
    assert content(stage.run) == before
    damage(stage.run / "checkpoints" / "step-00000020" / "state.pt")
    damage(stage.run / "checkpoints" / "step-00000010" / "state.pt")
    stage.begin_from(tmp_path / "brought")
    file = "checkpoints/step-00000010/state.pt"
    assert content(stage.run)[file] == content(tmp_path / "brought")[file]


def test_a_run_is_not_written_over_by_another(stage: Stage, tmp_path: Path) -> None:
    write_run(tmp_path / "brought", 10)
    write_run(stage.run, 5, seed=1)
    with pytest.raises(BareMachineError, match="run holds another run; give another --stage"):
        stage.begin_from(tmp_path / "brought")
    stage.begin_from(tmp_path / "nothing")


def test_the_newest_checkpoint_that_is_whole_is_sent(stage: Stage, tmp_path: Path) -> None:
    assert stage.freeze({}, piece_bytes=1000) is None
    for step in (10, 20, 30):
        write_run(stage.run, step)
        stage.freeze({}, piece_bytes=1000)
    assert sorted(os.listdir(stage.folder / "returns")) == ["step-00000020", "step-00000030"]
    write_run(stage.run, 40)
    os.truncate(stage.run / "checkpoints" / "step-00000040" / "model.safetensors", 9)
    kept = stage.freeze({}, piece_bytes=1000)
    assert kept is not None
    assert kept.name == "step-00000030"
    assert stage.send(tmp_path / "out", range(2)).about["step"] == 30
    assert stage.send(tmp_path / "out", range(2), step=20).about["step"] == 20
    with pytest.raises(BareMachineError, match="there is step-00000030, step-00000020"):
        stage.send(tmp_path / "out", range(2), step=10)


def test_what_a_killed_call_left_is_sent(stage: Stage, tmp_path: Path) -> None:
    stage.catch_up()
    write_run(stage.run, 10)
    stage.catch_up()
    assert stage.send(tmp_path / "out", range(1)).about["is_done"] is False
    stage.freeze({"is_done": True}, piece_bytes=1000)
    stage.catch_up()
    assert stage.send(tmp_path / "out", range(1)).about["is_done"] is True
    write_run(stage.run, 20)
    with stage.lock(), pytest.raises(BareMachineError, match="still trains in"):
        stage.catch_up()
    stage.catch_up()
    about = stage.send(tmp_path / "out", range(1)).about
    assert about == {"is_done": False, "kind": "return", "piece_bytes": 1000, "step": 20}


def test_two_do_not_train_in_one_stage(stage: Stage) -> None:
    stage.folder.mkdir()
    with stage.lock() as lock:
        lock.write("123\n")
        lock.flush()
        with pytest.raises(BareMachineError, match="process 123 still trains in"), stage.lock():
            pass
    with stage.lock():
        pass


LOOP = "while :; do sleep 0.05; done"
SAVES = f'trap "echo saved >>saved; exit 143" TERM; touch ready; {LOOP}'


def wait_for(file: Path) -> None:
    for _ in range(2000):
        if file.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{file} did not come")


def run_shell(folder: Path, program: str, *, stop_s: float = 600, kill_s: float = 600) -> int:
    now = time.monotonic()
    deadline = Deadline(stop_at=now + stop_s, kill_at=now + kill_s)
    with (folder / "lock").open("w") as lock:
        return run_until(
            ["/bin/sh", "-c", program], deadline, folder=folder, environment=os.environ, lock=lock
        )


def test_a_program_is_told_to_stop(tmp_path: Path) -> None:
    """At once, here: it says itself that it hears the signal, or is ended by it."""
    assert run_shell(tmp_path, SAVES, stop_s=0) in (143, -signal.SIGTERM)


def test_a_program_is_told_to_stop_once(tmp_path: Path) -> None:
    """A second SIGTERM would end training before it has saved."""
    waits = "while [ ! -f told ]; do sleep 0.05; done; sleep 1"
    program = f'trap "echo told >>told" TERM; kill -TERM $PPID; {waits}; exit 5'
    assert run_shell(tmp_path, program) == 5
    assert (tmp_path / "told").read_text() == "told\n"


def test_a_program_that_does_not_stop_is_ended(tmp_path: Path) -> None:
    program = f'trap "" TERM; {LOOP}'
    assert run_shell(tmp_path, program, kill_s=2) == -signal.SIGKILL
    assert int((tmp_path / "lock").read_text()) > 0


def test_a_program_that_ends_before_is_not_waited_for(tmp_path: Path) -> None:
    assert run_shell(tmp_path, "exit 7") == 7


PARENT = """
import os, sys, time
from pathlib import Path
from scripts.bare_machine.child import Deadline, run_until
deadline = Deadline(stop_at=time.monotonic() + 600, kill_at=time.monotonic() + 600)
with open("lock", "w") as lock:
    status = run_until(["/bin/sh", "-c", sys.argv[1]], deadline, folder=Path.cwd(),
                       environment=os.environ, lock=lock)
print(status)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_stops_the_program_as_if_in_time(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PARENT, SAVES]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        wait_for(tmp_path / "ready")
        parent.send_signal(number)
        out, _ = parent.communicate(timeout=60)
    wait_for(tmp_path / "saved")
    if number != signal.SIGKILL:
        assert out == "143\n"


def test_a_machine_that_lacks_modules(
    parts: Path, vocab_dir: Path, empty_python: Path, tmp_path: Path
) -> None:
    pack_small(parts, vocab_dir, tmp_path / "job", ONE_LOAD)
    done = run_there(empty_python, "job/load-1/run.py", "stage", folder=tmp_path)
    assert done.returncode == 1
    for name in ("numpy", "safetensors", "tokenizers", "torch", "tqdm"):
        assert f"{name} (ModuleNotFoundError: No module named '{name}')" in done.stderr
    assert "pack the job with --wheels: pip download --no-deps numpy" in done.stderr
    assert done.stderr.count("\n") == 1


def test_modules_that_travel_are_found(
    parts: Path, vocab_dir: Path, empty_python: Path, tmp_path: Path
) -> None:
    wheel = tmp_path / "stand-ins-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("numpy", "safetensors", "tokenizers", "tqdm"):
            archive.writestr(f"{name}.py", "__version__ = '1.0'\n")
        archive.writestr("torch/__init__.py", "from torch import cuda\n__version__ = '1.0'\n")
        archive.writestr("torch/cuda.py", "def is_available():\n    return False\n")
    job = Job(selection=Selection.of(parts), tokenizer=vocab_dir, options=[], wheels=[wheel])
    pack(job, tmp_path / "job", ONE_LOAD)
    done = run_there(empty_python, "job/load-1/run.py", "stage", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch 1.0, tqdm 1.0; no GPU that torch can use: the CPU trains\n" in done.stdout
    assert "the last digits of sums may differ\n" in done.stdout
    assert "all is here: python3 " in done.stdout


def test_training_before_all_is_there(
    loads: list[Path], empty_python: Path, tmp_path: Path
) -> None:
    command = ("train", "--stage", "stage", "--time-limit", "9m", "--out", "out")
    done = run_there(empty_python, loads[0] / "run.py", *command, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.rstrip().endswith(f"; send {', '.join(load.name for load in loads[1:])}")


def test_sending_needs_nothing_but_python(
    loads: list[Path], empty_python: Path, stage: Stage, tmp_path: Path
) -> None:
    stage.take_in(loads[0])
    write_run(stage.run, 10)
    stage.freeze({"is_done": False}, piece_bytes=1000)
    program = stage.folder / "run.py"
    done = run_there(empty_python, program, "send", "4:7", "--out", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 10: " in done.stdout
    assert "out has 4:7 of them" in done.stdout
    assert sorted(file.name[:3] for file in (tmp_path / "out").glob("*.piece")) == [
        *("004", "005", "006")
    ]
    write_run(stage.run, 20)
    done = run_there(empty_python, program, "send", "0:2", "--out", "out", folder=tmp_path)
    assert "step 20: 9 pieces, " in done.stdout
    assert f"next ones: python3 {program} send 2:4 --step 20 --out OUT" in done.stdout
    done = run_there(empty_python, program, "send", "40:44", "--out", "out", folder=tmp_path)
    assert done.returncode == 1
    assert "error: there are 9 pieces, 0:9" in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("send", "4:4", "--out", "out"), "is no range of pieces; write 4:8 for 4 to 7"),
        (("train", "--time-limit", "9", "--out", "out"), "is no duration; write 90s, 9m or 1.5h"),
        (("train", "--time-limit", "9m"), "the following arguments are required: --out"),
    ],
)
def test_wrong_options(
    loads: list[Path], empty_python: Path, tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    done = run_there(empty_python, loads[0] / "run.py", *given, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
