"""The road of the default model is gone stage by stage, and goes on where it was stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.reproduce_model import ROAD, main
from tests.training.distillation.teachers import make_bert
from tests.training.support import REPOSITORY, SQUAD, WIKI

Capture = pytest.CaptureFixture[str]
SMALL_ROAD = """
[variables.DATA]
where = "JSON, of anywhere"

[variables]
INDENT = "--indent 3"

[[stages]]
name = "first"
command = "json.tool {DATA} {runs}/first.json {INDENT}"

[[stages]]
name = "second"
command = "json.tool {runs}/first.json {runs}/second.json"
"""


@pytest.fixture
def road(tmp_path: Path) -> Path:
    file = tmp_path / "road.toml"
    file.write_text(SMALL_ROAD)
    return file


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.json"
    file.write_text('{"a": 1}')
    return file


def go(road: Path, runs: Path, *values: str) -> int:
    return main([*values, "--road", str(road), "--runs", str(runs)])


def test_stages_that_are_complete_are_skipped(
    road: Path, data: Path, tmp_path: Path, capfd: Capture
) -> None:
    runs = tmp_path / "runs"
    assert go(road, runs, f"DATA={data}") == 0
    assert (runs / "first.json").read_text() == '{\n   "a": 1\n}\n'
    assert "[2/2] second: python -m json.tool" in capfd.readouterr().out
    (runs / "second.stage.json").unlink()
    (runs / "first.json").write_text("[]")
    assert go(road, runs, f"DATA={data}") == 0
    assert "[1/2] first: complete\n[2/2] second: python" in capfd.readouterr().out
    assert (runs / "second.json").read_text() == "[]\n"


def test_a_stage_that_failed_is_begun_again(road: Path, data: Path, tmp_path: Path) -> None:
    data.write_text("{")
    assert go(road, tmp_path / "runs", f"DATA={data}") == 1
    assert not (tmp_path / "runs" / "second.stage.json").exists()
    data.write_text("{}")
    assert go(road, tmp_path / "runs", f"DATA={data}") == 0
    record = json.loads((tmp_path / "runs" / "second.stage.json").read_text())
    assert record["is_complete"] is True


def test_other_commands_on_the_same_runs_are_refused(
    road: Path, data: Path, tmp_path: Path, capfd: Capture
) -> None:
    assert go(road, tmp_path / "runs", f"DATA={data}") == 0
    assert go(road, tmp_path / "runs", f"DATA={data}", "INDENT=--indent 2") == 1
    assert "error: first was begun with other commands" in capfd.readouterr().err
    road.write_text(SMALL_ROAD.replace("second.json", "second.json --sort-keys"))
    assert go(road, tmp_path / "runs", f"DATA={data}") == 1
    assert "error: second was begun with other commands" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "DATA: JSON, of anywhere"),
        (["DATA="], "DATA: JSON, of anywhere"),
        (["DATA=/nowhere/*.json"], "there is no file /nowhere/*.json"),
        (["DATA=x", "DATEN=x"], "DATEN is no variable; there are DATA, INDENT"),
    ],
)
def test_what_is_missing_is_named(
    road: Path, values: list[str], message: str, tmp_path: Path, capfd: Capture
) -> None:
    assert go(road, tmp_path / "runs", *values) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "runs").exists()


def test_a_stage_with_a_wrong_variable_is_an_error(
    road: Path, data: Path, tmp_path: Path, capfd: Capture
) -> None:
    road.write_text(SMALL_ROAD.replace("{runs}/second", "{run}/second"))
    assert go(road, tmp_path / "runs", f"DATA={data}") == 1
    assert "second names 'run', which is no variable" in capfd.readouterr().err


def test_a_value_without_a_name_is_refused(road: Path, capfd: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["wiki.jsonl", "--road", str(road)])
    assert "write NAME=VALUE" in capfd.readouterr().err


def test_files_may_be_several(road: Path, tmp_path: Path, capfd: Capture) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    for name in ("1.json", "2.json"):
        (folder / name).write_text("{}")
    assert go(road, tmp_path, f"DATA='{folder}/*.json'", "--dry-run") == 0
    first, _ = capfd.readouterr().out.splitlines()
    assert first == (
        f"python -m json.tool '{folder}/1.json' '{folder}/2.json' {tmp_path}/first.json --indent 3"
    )


def small_values(folder: Path, labelled: Path, teacher: Path) -> dict[str, str]:
    """The real road's variables, for some seconds of training."""
    lengths = {f"{stage}_LENGTH": "64" for stage in ("DISTIL", "LONGER", "ORDER", "SPANS", "TASKS")}
    times = {f"{stage}_TIME": "1s" for stage in ("DISTIL", "LONGER", "ORDER", "SPANS", "TASKS")}
    return {
        **lengths,
        **times,
        **dict.fromkeys(("CORPUS", "VALIDATION"), str(WIKI)),
        **dict.fromkeys(("SST2_TRAIN", "SST2_DEV"), str(labelled)),
        **dict.fromkeys(("SQUAD_TRAIN", "SQUAD_DEV"), str(SQUAD)),
        "TEACHER": str(teacher),
        "VOCAB_SIZE": "800",
        "EMBEDDING_SIZE": "32",
        "SPANS_QUESTIONS": "30",
        "EVALUATION_LENGTH": "64",
        "OPTIONS": "--no-compile --device cpu",
    }


@pytest.mark.slow
def test_the_real_road_leads_to_both_bundles(labelled: Path, tmp_path: Path) -> None:
    teacher = make_bert(tmp_path / "teacher")
    values = small_values(tmp_path, labelled, teacher)
    words = [f"{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "scripts.reproduce_model", *words]
    command += ["--road", str(ROAD), "--runs", str(tmp_path / "runs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        ended = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 12
    assert all(line.endswith(": complete") for line in lines)
    for name in ("bundle", "bundle-int8"):
        manifest = json.loads((tmp_path / "runs" / name / "manifest.json").read_text())
        assert set(manifest["tasks"]) >= {"fill-mask", "sentence-order", "question-answering"}
    stages = manifest["provenance"]["stages"]
    assert [stage["program"] for stage in stages][:3] == ["training.distil"] * 3
    assert (tmp_path / "runs" / "bundle" / "README.md").is_file()
