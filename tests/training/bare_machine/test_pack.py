"""A job is packed whole, within the limits, and refused at home where it would fail there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from scripts.bare_machine.__main__ import main
from scripts.bare_machine.manifest import BareMachineError, Manifest
from scripts.bare_machine.pack import Job, Limits, loads, pack
from scripts.bare_machine.selection import Selection
from tests.training.bare_machine.support import (
    ONE_LOAD,
    SMALL,
    content,
    damage,
    pack_small,
    write_run,
)
from tests.training.support import REPOSITORY
from training.shards import Shards

Capture = pytest.CaptureFixture[str]


def arguments(shards: Path, vocab_dir: Path, output: Path, *more: str) -> list[str]:
    given = ["--shards", str(shards), "--tokenizer", str(vocab_dir), "--output", str(output)]
    return ["pack", *given, *(more or ("--", "--steps", "3"))]


def test_loads_are_within_their_limit_and_whole_together(
    parts: Path, vocab_dir: Path, tmp_path: Path
) -> None:
    folders = pack_small(parts, vocab_dir, tmp_path / "job")
    assert [folder.name for folder in folders] == [f"load-{n + 1}" for n in range(len(folders))]
    assert len(folders) > 1
    names: list[str] = []
    for folder in folders:
        files = content(folder)
        assert sum(map(len, files.values())) <= SMALL.load_bytes
        assert {"run.py", "manifest.json"} <= files.keys()
        names += sorted(file.name for file in (folder / "pieces").iterdir())
    manifest = Manifest.read(folders[0] / "manifest.json")
    assert names == [piece.name for piece in manifest.pieces]
    assert [len(load) for load in loads(manifest)] == [
        len(list((folder / "pieces").iterdir())) for folder in folders
    ]


def test_the_same_job_is_packed_the_same(parts: Path, vocab_dir: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        pack_small(parts, vocab_dir, tmp_path / name)
    assert content(tmp_path / "one") == content(tmp_path / "other")


def test_what_is_packed_is_what_training_needs(
    parts: Path, vocab_dir: Path, tmp_path: Path
) -> None:
    (load,) = pack_small(parts, vocab_dir, tmp_path / "job", ONE_LOAD)
    records = Manifest.read(load / "manifest.json").files
    places = {record.path.partition("/")[0] for record in records}
    assert places == {"code", "tokenizer", "shards"}
    assert "code/training/pretrain.py" in {record.path for record in records}


def test_the_command_says_what_goes_and_what_stays(
    parts: Path, vocab_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    more = ("--max-data", "40KiB", "--", "--steps", "3")
    assert main(arguments(parts, vocab_dir, tmp_path / "job", *more)) == 0
    total = len(Shards.open(parts).parts)
    left = " ".join(map(str, range(1, total)))
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/job/load-1: 0.4 MiB: code, shards",
        f"of {parts}, parts 0; left out: {left} (--parts, --max-data)",
    ]


def test_the_program_runs_as_one(parts: Path, vocab_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bare_machine"]
    done = subprocess.run(
        [*command, *arguments(parts, vocab_dir, tmp_path / "job", "--", "--stepps", "3")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "python -m training.pretrain: error: unrecognized arguments: --stepps" in done.stderr
    assert not (tmp_path / "job").exists()


def test_parts_are_a_corpus_of_their_own(parts: Path, vocab_dir: Path, tmp_path: Path) -> None:
    selection = Selection.of(parts, [2, 0])
    selection.write(tmp_path / "chosen")
    chosen = Shards.open(tmp_path / "chosen", vocab_dir / "tokenizer.json")
    every = Shards.open(parts)
    for number, part in zip((0, 2), chosen.parts, strict=True):
        assert np.array_equal(part.tokens, every.parts[number].tokens)
        assert np.array_equal(part.documents, every.parts[number].documents)
    assert chosen.fingerprint == Selection.of(parts, [0, 2]).manifest.fingerprint
    others = [Selection.of(parts, which).manifest.fingerprint for which in ([0], [1], [0, 1])]
    assert len({chosen.fingerprint, every.fingerprint, *others}) == 5


def test_all_parts_are_the_corpus_itself(parts: Path, tmp_path: Path) -> None:
    every = Selection.of(parts)
    every.write(tmp_path / "copy")
    assert content(tmp_path / "copy") == content(parts)
    assert Selection.within(parts, 1 << 30) == every
    assert every.left_out == ()


def test_at_least_one_part_goes(parts: Path) -> None:
    assert Selection.within(parts, 1).parts == (0,)
    sizes = [part.num_bytes for part in Shards.open(parts).parts]
    assert Selection.within(parts, sum(sizes[:2])).parts == (0, 1)
    assert Selection.within(parts, sum(sizes[:2]) - 1).parts == (0,)


def test_a_selection_to_go_on_with_at_home(parts: Path, tmp_path: Path, capsys: Capture) -> None:
    given = ["select", "--shards", str(parts), "--parts", "1", "--output", str(tmp_path / "one")]
    assert main(given) == 0
    assert capsys.readouterr().out == f"{tmp_path}/one: {parts}, parts 1\n"
    assert (
        Shards.open(tmp_path / "one").fingerprint == Selection.of(parts, [1]).manifest.fingerprint
    )
    assert main(given) == 1
    assert "is there already; give another --output" in capsys.readouterr().err


@pytest.mark.parametrize(("chosen", "what"), [([-1], "-1"), ([0, 99], "99"), ([], "to choose")])
def test_parts_that_are_not_there(parts: Path, chosen: list[int], what: str) -> None:
    with pytest.raises(BareMachineError, match=rf"has no part {what}; its parts are 0 to \d"):
        Selection.of(parts, chosen)


def test_a_damaged_part_does_not_travel(
    parts: Path, vocab_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(parts, tmp_path / "shards")
    damage(tmp_path / "shards" / "part-00001" / "tokens.npy")
    assert main(arguments(tmp_path / "shards", vocab_dir, tmp_path / "job")) == 1
    assert "part-00001 is damaged; prepare the corpus again" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "give the options of training.pretrain, after --"),
        (("--", "--steps", "3", "--shards", "x"), "--shards, --tokenizer, --validation and"),
        (("--", "--steps", "3", "--output", "x"), "and --output is chosen on the machine"),
        (("--", "--validation", "x"), "go before --"),
        (("--", "--initialize-from", "x"), "go before --"),
        (("--resume", "nowhere", "--", "--steps", "3"), "holds no checkpoint that is whole"),
        (("--validation", "nowhere", "--", "--steps", "3"), "nowhere holds no shards.json"),
        (("--initialize-from", "nowhere", "--", "--steps", "3"), "nowhere holds no config.json"),
        (("--wheels", __file__, "--", "--steps", "3"), "is no wheel"),
        (("--max-load", "15MiB", "--", "--steps", "3"), "give --max-load of 15.1MiB or more"),
    ],
)
def test_what_would_fail_there_fails_here(
    parts: Path,
    vocab_dir: Path,
    tmp_path: Path,
    more: tuple[str, ...],
    message: str,
    capsys: Capture,
) -> None:
    given = arguments(parts, vocab_dir, tmp_path / "job", "x", *more)
    given.remove("x")
    assert main(given) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not list(tmp_path.iterdir())


def test_another_vocabulary_is_refused(
    parts: Path, vocab_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(vocab_dir, tmp_path / "vocab")
    damage(tmp_path / "vocab" / "tokenizer.json")
    assert main(arguments(parts, tmp_path / "vocab", tmp_path / "job")) == 1
    assert "was prepared with another tokenizer" in capsys.readouterr().err


def test_an_output_that_is_there_stays_as_it_is(
    parts: Path, vocab_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "mine").write_text("mine")
    assert main(arguments(parts, vocab_dir, tmp_path / "job")) == 1
    assert "is there already; give another --output, or delete it" in capsys.readouterr().err
    assert content(tmp_path) == {"job/mine": b"mine"}


def test_a_run_travels_with_its_newest_whole_checkpoint(
    parts: Path, vocab_dir: Path, tmp_path: Path
) -> None:
    for step in (5, 10, 15):
        write_run(tmp_path / "run", step)
    damage(tmp_path / "run" / "checkpoints" / "step-00000015" / "state.pt")
    known = Selection.of(parts)
    record = {"corpus": [[known.manifest.fingerprint, 0]]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    job = Job(selection=known, tokenizer=vocab_dir, options=[], resume=tmp_path / "run")
    manifest = pack(job, tmp_path / "job", ONE_LOAD)
    paths = [record.path for group in manifest.groups[-2:] for record in group.files]
    checkpoint = "run/checkpoints/step-00000010"
    assert [group.name for group in manifest.groups] == ["code", "shards", "model", "state"]
    assert paths == [
        *("run/run.json", "run/metrics.jsonl", f"{checkpoint}/config.json"),
        *(f"{checkpoint}/hashes.json", f"{checkpoint}/model.safetensors", f"{checkpoint}/state.pt"),
    ]


def test_a_run_on_another_corpus_is_refused(parts: Path, vocab_dir: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5)
    job = Job(
        selection=Selection.of(parts), tokenizer=vocab_dir, options=[], resume=tmp_path / "run"
    )
    with pytest.raises(BareMachineError, match=r"was begun on another corpus than .*, parts 0 1"):
        pack(job, tmp_path / "job", ONE_LOAD)
    (tmp_path / "run" / "run.json").write_text("[")
    with pytest.raises(BareMachineError, match=r"run\.json cannot be read"):
        pack(job, tmp_path / "job", ONE_LOAD)


def test_what_a_machine_lacks_can_travel(parts: Path, vocab_dir: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "lacking-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lacking/__init__.py", "__version__ = '1.0'\n")
    job = Job(selection=Selection.of(parts), tokenizer=vocab_dir, options=[], wheels=[wheel])
    manifest = pack(job, tmp_path / "job", ONE_LOAD)
    assert "modules/lacking/__init__.py" in {record.path for record in manifest.files}


def test_pieces_of_a_job_that_changed_little_are_the_same(
    parts: Path, vocab_dir: Path, tmp_path: Path
) -> None:
    """So that a stage that has the corpus need not be sent it again."""
    names = []
    for place, options in enumerate((["--steps", "3"], ["--steps", "4"])):
        job = Job(selection=Selection.of(parts), tokenizer=vocab_dir, options=options)
        manifest = pack(job, tmp_path / str(place), Limits(load_bytes=8 << 20, piece_bytes=20_000))
        names.append([piece.sha256 for piece in manifest.pieces])
    assert names[0] == names[1]


def test_help_shows_examples(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "examples:\n  python -m scripts.bare_machine pack " in capsys.readouterr().out


@pytest.mark.parametrize(
    "given", [["--max-data", "60"], ["--piece-size", "0MiB"], ["--max-load", "xMiB"]]
)
def test_sizes_are_written_with_their_unit(
    parts: Path, vocab_dir: Path, tmp_path: Path, given: list[str], capsys: Capture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments(parts, vocab_dir, tmp_path / "job", *given, "--", "--steps", "3"))
    assert "is no size; write 512KiB or 60MiB" in capsys.readouterr().err
