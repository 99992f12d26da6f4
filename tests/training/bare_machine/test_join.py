"""What came back is joined whole or not at all, and nothing that is there is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from scripts.bare_machine.__main__ import main
from scripts.bare_machine.pieces import find_pieces
from scripts.bare_machine.stage import Stage
from tests.training.bare_machine.support import content, damage, write_run

Capture = pytest.CaptureFixture[str]
PIECE_BYTES = 1000
EVERY = range(1000)


def send(folder: Path, step: int, *, seed: int = 0, numbers: range = EVERY) -> Path:
    """Pieces of a run that a machine trained so far."""
    stage = Stage(folder=folder / f"stage-{seed}")
    checkpoint = stage.run / "checkpoints" / f"step-{step:08}"
    if not checkpoint.is_dir():
        write_run(stage.run, step, seed=seed)
        stage.freeze({"is_done": False}, piece_bytes=PIECE_BYTES)
    back = folder / "back"
    stage.send(back, numbers)
    return back


def join(back: Path | list[Path], output: Path, *more: str) -> int:
    paths = back if isinstance(back, list) else [back]
    return main(["join", *map(str, paths), "--output", str(output), *more])


def pieces(back: Path) -> list[Path]:
    return sorted(back.glob("*.piece"))


def test_a_run_comes_back_as_it_was(tmp_path: Path, capsys: Capture) -> None:
    back = send(tmp_path, 10)
    assert len(pieces(back)) > 8
    assert all(file.stat().st_size <= PIECE_BYTES for file in pieces(back))
    assert join(back, tmp_path / "run") == 0
    expected = f"{tmp_path}/run/checkpoints/step-00000010: the run goes on from there\n"
    assert capsys.readouterr().out == expected
    ours, theirs = tmp_path / "run", tmp_path / "stage-0" / "run"
    assert (ours / "checkpoint").readlink() == Path("checkpoints/step-00000010")
    (ours / "checkpoint").unlink()
    assert content(ours) == content(theirs)


def test_pieces_of_several_calls_are_joined(tmp_path: Path) -> None:
    calls = []
    for begin in range(0, 20, 3):
        back = send(tmp_path, 10, numbers=range(begin, begin + 3))
        calls.append(back.rename(tmp_path / f"call-{begin}"))
    assert max(len(pieces(call)) for call in calls) == 3
    assert join(calls, tmp_path / "run") == 0
    assert join(calls, tmp_path / "run") == 0
    assert content(tmp_path / "run" / "checkpoints") == content(
        tmp_path / "stage-0" / "run" / "checkpoints"
    )


def test_each_missing_piece_is_named(tmp_path: Path, capsys: Capture) -> None:
    back = send(tmp_path, 10)
    for gone in pieces(back):
        kept = gone.rename(tmp_path / "kept")
        assert join(back, tmp_path / "run") == 1
        number = int(gone.name[:3])
        error = capsys.readouterr().err
        assert f"{gone.name} (missing). On the machine: " in error
        assert f"python3 run.py send {number}:{number + 1} --step 10\n" in error
        assert not (tmp_path / "run").exists()
        kept.rename(gone)
    assert join(back, tmp_path / "run") == 0


def test_damaged_pieces_are_named_and_can_come_again(tmp_path: Path, capsys: Capture) -> None:
    back = send(tmp_path, 10)
    spoilt = [pieces(back)[number] for number in (2, 3, 6)]
    damage(spoilt[0])
    os.truncate(spoilt[1], 10)
    spoilt[2].write_bytes(b"")
    before = content(back)
    assert join(back, tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert all(f"{file.name} (damaged)" in error for file in spoilt)
    assert "python3 run.py send 2:4 and 6:7 --step 10\n" in error
    assert content(back) == before
    again = tmp_path / "again"
    for numbers in (range(2, 4), range(6, 7)):
        Stage(folder=tmp_path / "stage-0").send(again, numbers)
    assert join([back, again], tmp_path / "run") == 0


def test_a_piece_that_came_whole_once_is_enough(tmp_path: Path) -> None:
    back = send(tmp_path, 10)
    shutil.copytree(back, tmp_path / "twice")
    for file in pieces(back)[::2]:
        damage(file)
    for file in pieces(tmp_path / "twice")[1::2]:
        damage(file)
    assert join([back, tmp_path / "twice"], tmp_path / "run") == 0


def test_pieces_of_another_run_are_told_apart(tmp_path: Path, capsys: Capture) -> None:
    mine = send(tmp_path, 10).rename(tmp_path / "mine")
    other = send(tmp_path, 10, seed=1)
    foreign = sorted(other.glob("00[0-3]*.piece"))
    assert join([mine, *foreign], tmp_path / "run") == 0
    assert all(file.name in capsys.readouterr().out for file in foreign[:1])
    for file in mine.glob("000*.piece"):
        file.unlink()
    assert join([mine, *foreign], tmp_path / "run-2") == 1
    assert "(missing)" in capsys.readouterr().err
    assert join([mine, other], tmp_path / "run-2") == 1
    assert "there are two different manifests of step 10" in capsys.readouterr().err


def test_the_newest_of_several_checkpoints_is_joined(tmp_path: Path, capsys: Capture) -> None:
    send(tmp_path, 10)
    back = send(tmp_path, 20)
    assert join(back, tmp_path / "new") == 0
    assert (tmp_path / "new" / "checkpoint").readlink().name == "step-00000020"
    assert join(back, tmp_path / "old", "--step", "10") == 0
    assert (tmp_path / "old" / "checkpoint").readlink().name == "step-00000010"
    assert (tmp_path / "old" / "metrics.jsonl").read_text() == '{"step": 10}\n'
    capsys.readouterr()
    assert join(back, tmp_path / "none", "--step", "15") == 1
    assert "there is step-00000010.json, step-00000020.json" in capsys.readouterr().err


def test_a_run_is_brought_up_to_date(tmp_path: Path, capsys: Capture) -> None:
    assert join(send(tmp_path, 10), tmp_path / "run") == 0
    assert join(send(tmp_path, 20), tmp_path / "run") == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == ["step-00000010", "step-00000020"]
    assert (tmp_path / "run" / "checkpoint").readlink().name == "step-00000020"
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
    before = content(tmp_path / "run")
    capsys.readouterr()
    assert join(send(tmp_path, 20), tmp_path / "run", "--step", "10") == 1
    assert "is at step 20 already, which is after 10" in capsys.readouterr().err
    assert content(tmp_path / "run") == before


def test_another_run_is_not_written_over(tmp_path: Path, capsys: Capture) -> None:
    assert join(send(tmp_path, 10), tmp_path / "run") == 0
    before = content(tmp_path / "run")
    shutil.rmtree(tmp_path / "back")
    assert join(send(tmp_path, 20, seed=1), tmp_path / "run") == 1
    assert "holds another run; give another --output" in capsys.readouterr().err
    assert content(tmp_path / "run") == before


def test_a_checkpoint_that_was_damaged_at_home_is_mended(tmp_path: Path) -> None:
    back = send(tmp_path, 10)
    assert join(back, tmp_path / "run") == 0
    before = content(tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step-00000010" / "state.pt")
    (tmp_path / "run.partial").mkdir()
    (tmp_path / "run.partial" / "left").write_text("by a killed process")
    assert join(back, tmp_path / "run") == 0
    assert content(tmp_path / "run") == before
    assert not (tmp_path / "run.partial").exists()


def test_the_model_alone(tmp_path: Path, capsys: Capture) -> None:
    back = send(tmp_path, 10)
    manifest = json.loads((back / "step-00000010.json").read_bytes())
    model, state = ([p["number"] for p in group["pieces"]] for group in manifest["groups"])
    for number in state:
        next(back.glob(f"{number:03}-*")).unlink()
    assert join(back, tmp_path / "run") == 1
    assert join(back, tmp_path / "model", "--only-model") == 0
    assert capsys.readouterr().out == f"{tmp_path}/model: the model of step 10\n"
    theirs = tmp_path / "stage-0" / "run" / "checkpoints" / "step-00000010"
    names = ["config.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "model")) == names
    assert all((tmp_path / "model" / n).read_bytes() == (theirs / n).read_bytes() for n in names)
    assert join(back, tmp_path / "model", "--only-model") == 1
    assert "is there already" in capsys.readouterr().err
    next(back.glob(f"{model[-1]:03}-*")).unlink()
    assert join(back, tmp_path / "other", "--only-model") == 1
    assert f"of {len(model)} pieces 1 are not here" in capsys.readouterr().err


def test_without_a_manifest(tmp_path: Path, capsys: Capture) -> None:
    back = send(tmp_path, 10)
    (back / "step-00000010.json").unlink()
    assert join(back, tmp_path / "run") == 1
    assert "the manifest is missing: there is no step-*.json; fetch it" in capsys.readouterr().err
    assert join(tmp_path / "nowhere", tmp_path / "run") == 1
    assert f"error: {tmp_path}/nowhere is not there\n" in capsys.readouterr().err


def test_a_damaged_manifest(tmp_path: Path, capsys: Capture) -> None:
    back = send(tmp_path, 10)
    damage(back / "step-00000010.json")
    assert join(back, tmp_path / "run") == 1
    assert "is damaged" in capsys.readouterr().err


def test_pieces_stay_as_they_are_when_training_goes_on(tmp_path: Path) -> None:
    """Those that are still to be sent belong to those that were."""
    first = send(tmp_path, 10, numbers=range(4)).rename(tmp_path / "first")
    stage = Stage(folder=tmp_path / "stage-0")
    write_run(stage.run, 20)
    shutil.rmtree(stage.run / "checkpoints" / "step-00000010")
    stage.freeze({"is_done": True}, piece_bytes=PIECE_BYTES)
    stage.send(tmp_path / "rest", range(4, 1000), step=10)
    assert join([first, tmp_path / "rest"], tmp_path / "run") == 0
    found = find_pieces([*first.iterdir(), *(tmp_path / "rest").iterdir()])
    assert not found.damaged
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 10}\n'
