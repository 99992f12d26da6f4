"""The road of the default model is gone stage by stage, and goes on where it was stopped."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipes.albert_small_en.reproduce import ROAD, main
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
# A module for a stage, which saves slowly when it is told to stop.
SAVER = """
import signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1])

def save(number, frame):
    signal.signal(number, lambda *_: sys.exit(77))  # a second one ends training
    time.sleep(2)
    (folder / "saved").write_text(signal.Signals(number).name)
    sys.exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
folder.mkdir(parents=True, exist_ok=True)
(folder / "began").touch()
time.sleep(60)
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
    complete = json.loads((runs / "complete.json").read_text())
    (runs / "complete.json").write_text(json.dumps(complete[:1]))
    (runs / "first.json").write_text("[]")
    assert go(road, runs, f"DATA={data}") == 0
    assert "[1/2] first: complete\n[2/2] second: python" in capfd.readouterr().out
    assert (runs / "second.json").read_text() == "[]\n"


def test_other_commands_on_the_same_runs_are_refused(
    road: Path, data: Path, tmp_path: Path, capfd: Capture
) -> None:
    """A stage that failed can be corrected."""
    assert go(road, tmp_path / "runs", f"DATA={data}", "INDENT=--indent x") == 2
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
        (["DATA=/nowhere/*.json"], "there is no file /nowhere/*.json"),
        (["DATA=x", "DATEN=x"], "DATEN is no variable; there are DATA, INDENT"),
        (["DATA={data}", 'INDENT="'], 'INDENT=": No closing quotation'),
    ],
)
def test_values_that_are_missing_or_wrong_are_named(
    road: Path, data: Path, values: list[str], message: str, tmp_path: Path, capfd: Capture
) -> None:
    values = [value.replace("{data}", str(data)) for value in values]
    assert go(road, tmp_path / "runs", *values) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "runs").exists()


@contextmanager
def started(road: Path, runs: Path, modules: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command as a shell does, as the leader of a process group."""
    command = [sys.executable, "-m", "recipes.albert_small_en.reproduce", "--road", str(road)]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{modules}"}
    with subprocess.Popen(
        [*command, "--runs", str(runs)],
        cwd=REPOSITORY,
        env=environment,
        process_group=0,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stage_that_is_stopped_saves(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "saver.py").write_text(SAVER)
    road = tmp_path / "road.toml"
    road.write_text(
        'variables = {}\nstages = [{name = "saver", command = "saver {runs}/saver"}, '
        '{name = "next", command = "json.tool"}]'
    )
    folder = tmp_path / "runs" / "saver"
    with started(road, tmp_path / "runs", tmp_path) as process:
        wait_for((folder / "began").exists)
        os.killpg(process.pid, number)
        time.sleep(0.1)
        process.send_signal(number)  # make and `timeout` pass on what reached all
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    assert (folder / "saved").read_text() == number.name
    assert error == ""
    assert not (tmp_path / "runs" / "complete.json").exists()


def test_a_folder_that_is_there_is_refused_before_all_stages(
    road: Path, data: Path, tmp_path: Path, capfd: Capture
) -> None:
    variable = '[variables.FOLDER]\npath = "{runs}/folder"\n\n[variables]\n'
    text = SMALL_ROAD.replace("[variables]\n", variable)
    road.write_text(f'{text}new_folder = "{{FOLDER}}"\n')
    runs, taken, free = (tmp_path / name for name in ("runs", "taken", "free"))
    taken.mkdir()
    assert go(road, runs, f"DATA={data}", f"FOLDER={taken}") == 1
    assert f"error: second would write {taken}, which is there already" in capfd.readouterr().err
    assert not runs.exists()
    assert go(road, runs, f"DATA={data}", f"FOLDER={free}") == 0
    free.mkdir()  # as the stage would
    assert go(road, runs, f"DATA={data}", f"FOLDER={free}") == 0


def test_relative_paths_are_of_the_callers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "teacher").mkdir()
    Path("data.json").write_text("{}")
    files = tomllib.loads(ROAD.read_text())["variables"]
    values = [f"{name}=data.json" for name, value in files.items() if "where" in value]
    values += ["TEACHER=teacher", "BUNDLE=my bundle", "BUNDLE_INT8=x/int8", "EXAMPLES=data.json"]
    assert main([*values, "--dry-run"]) == 0
    commands = [shlex.split(line) for line in capfd.readouterr().out.splitlines()]
    words = {word for command in commands for word in command}
    assert not words & {"data.json", "teacher", "my bundle", "x/int8"}
    names = ("data.json", "teacher", "my bundle", "x/int8")
    assert words >= {str(tmp_path / name) for name in names}


def small_values(folder: Path, labelled: Path, teacher: Path) -> dict[str, str]:
    """The real road's variables, for some seconds of training."""
    lengths = ("DISTIL", "PRETRAIN", "ORDER", "LONG", "EVALUATION")
    stages = ("DISTIL", "PRETRAIN", "ORDER", "QUESTIONS", "TASKS", "POSITIONS", "VECTORS")
    return {
        **{f"{name}_LENGTH": "64" for name in lengths},
        **{f"{stage}_TIME": "1s" for stage in stages},
        **dict.fromkeys(("CORPUS", "VALIDATION", "REVIEWS"), str(WIKI)),
        **dict.fromkeys(("SST2_TRAIN", "SST2_DEV"), str(labelled)),
        **dict.fromkeys(("SQUAD_TRAIN", "SQUAD_DEV"), str(SQUAD)),
        "TEACHER": str(teacher),
        "VOCAB_SIZE": "800",
        "EMBEDDING_SIZE": "32",
        **dict.fromkeys(("SPANS_QUESTIONS", "UNANSWERABLE_QUESTIONS", "VECTOR_TEXTS"), "30"),
        "OPTIONS": "--no-compile --device cpu",
    }


@pytest.mark.slow
def test_the_real_road_leads_to_both_bundles(labelled: Path, tmp_path: Path) -> None:
    teacher = make_bert(tmp_path / "teacher")
    values = small_values(tmp_path, labelled, teacher)
    words = [f"{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "recipes.albert_small_en.reproduce", *words]
    command += ["--road", str(ROAD), "--runs", str(tmp_path / "runs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        ended = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 17
    assert all(line.endswith(": complete") for line in lines)
    for name in ("bundle", "bundle-int8"):
        manifest = json.loads((tmp_path / "runs" / name / "manifest.json").read_text())
        assert set(manifest["tasks"]) >= {"fill-mask", "sentence-order", "question-answering"}
    stages = manifest["provenance"]["training"]["stages"]
    programs = [stage["program"].removeprefix("albert-serve ") for stage in stages][:4]
    assert programs == ["distil", "pretrain", "pretrain", "finetune"]
    assert (tmp_path / "runs" / "bundle" / "README.md").is_file()
