"""Options: flags and values, on a command line and from Python; and what commands need."""

from __future__ import annotations

import argparse
import ast
import math
import re
import subprocess
import sys
import venv
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from albert_serve.hub import HubModel
from tests.training.support import REPOSITORY
from training import PACKAGES
from training.commands.pretrain import PretrainConfig
from training.errors import RunError, TrainingError
from training.options import labelled
from training.options.flags import OptionError, Options, add_flags, flag, read_flags
from training.options.labelled import GLUE, LabelledTexts
from training.options.values import Count, Duration, Finite, Fraction, Positive, Seed, Share


@dataclass(frozen=True, kw_only=True)
class Many(Options, title="many"):
    """An option of each kind."""

    files: tuple[Path, ...] = flag("files", MISSING)
    count: Count = flag("number of things", 3)
    seed: Seed | None = flag("seed (default: 7)")
    rate: Positive | None = flag("rate")
    part: Fraction | None = flag("part")
    share: Share = flag("share", 0.5)
    offset: Finite | None = flag("offset")
    time: Duration | None = flag("time")
    kind: Literal["old", "new"] = flag("kind", "old", metavar="KIND")
    sizes: tuple[Count, ...] = flag("sizes", (4, 2))
    is_on: bool = flag("switch", default=False)


def many(**values: Any) -> Many:
    return Many(**{"files": "a", **values})


def texts(**values: Any) -> LabelledTexts:
    return LabelledTexts(**values)


def parsed(*words: str) -> Many:
    parser = argparse.ArgumentParser()
    add_flags(parser, Many)
    return read_flags(Many, parser.parse_args(["--files", "a", *words]))


@pytest.mark.parametrize(
    ("name", "allowed", "rejected"),
    [
        ("count", [1, 10], [0, 1.0, "x", "+1"]),
        ("seed", [0], [-1, 0.5]),
        ("rate", [1e-9, 7], [0, math.inf, math.nan, "high"]),
        ("part", [0, 1, 0.5], [-0.01, 1.01, math.nan]),
        ("share", [0, 0.99], [-0.01, 1]),
        ("offset", [-1e9, 0, 7], [math.inf, math.nan, "x"]),
        ("kind", ["new"], ["other"]),
    ],
)
def test_values_have_limits_on_both_ways(
    name: str, allowed: list[Any], rejected: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in allowed:
        given, read = many(**{name: value}), parsed(f"--{name}={value}")
        assert given == read
        assert getattr(given, name) == value
    for value in rejected:
        with pytest.raises(OptionError, match=re.escape(f"--{name}: {value!r} is not ")):
            many(**{name: value})
        with pytest.raises(SystemExit):
            parsed(f"--{name}={value}")
        assert f"argument --{name}: " in capsys.readouterr().err


def test_one_value_is_a_list_of_one_and_numbers_may_be_numpys() -> None:
    config = many(sizes=2, count=np.int64(5), rate=1, time="1.5h")
    assert (config.files, config.sizes) == ((Path("a"),), (2,))
    assert (config.count, type(config.count), type(config.rate)) == (5, int, float)
    assert config.time == parsed("--time", "5400s").time == 5400
    assert many(files=["a", "b"], sizes=(n for n in (1, 2))).sizes == (1, 2)
    assert parsed("--sizes", "1", "2", "--is-on") == many(sizes=[1, 2], is_on=True)
    for changes in ({"sizes": (1, 0)}, {"is_on": "yes"}, {"count": None}):
        with pytest.raises(OptionError, match=f"^--{next(iter(changes)).replace('_', '-')}: "):
            many(**changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "NLI"}, "'NLI' is not a task"),
        ({"task": "Race"}, "--task RACE requires --data"),
        ({"task": "cola", "text_column": "b", "delimiter": ";"}, "--text-column, --delimiter\\.$"),
        ({"delimiter": "ab"}, "--delimiter 'ab'"),
        ({"label_column": ["a", "b"], "label_separator": ","}, "--label-separator divides one"),
        ({"head": "x"}, "--head x is a text classifier without data"),
    ],
)
def test_options_of_texts_go_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        texts(**values)


def test_a_task_is_downloaded_once_of_one_commit_or_another_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cola").mkdir()
    calls: list[tuple[str, HubModel]] = []
    cached: list[Path | None] = [None]

    def find(source: HubModel, patterns: list[str]) -> Path | None:
        assert patterns[0] == "cola/train-*.parquet"
        calls.append(("find", source))
        return cached[0]

    def load(source: HubModel, patterns: list[str]) -> Path:
        calls.append(("load", source))
        return tmp_path

    monkeypatch.setattr(labelled, "find_cached", find)
    monkeypatch.setattr(labelled, "download", load)
    monkeypatch.setattr(labelled, "check_reachable", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    main = replace(GLUE, revision="main")
    for data in (None, "nyu-mll/glue"):
        assert texts(task="cola", data=data).task_folder == tmp_path / "cola"
    assert texts(task="cola", data="nyu-mll/glue@main").task_folder == tmp_path / "cola"
    assert calls == [("find", GLUE), ("load", GLUE)] * 2 + [("load", main)]
    cached[0] = tmp_path
    assert texts(task="cola").task_folder == tmp_path / "cola"
    assert calls[-1] == ("find", GLUE)
    assert texts(task="cola", data="cola").task_folder == Path("cola")  # a folder
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"corpus": ()}, "Set either --corpus or --shards"),
        ({"order_share": 0.2, "sentence_task": "sop"}, "train the same head"),
        ({"device": "gpu"}, "--device: 'gpu' cannot be used: "),
        ({"steps": None}, "The run has no end. Set --steps, --budget or --recipe"),
    ],
)
def test_a_configuration_is_checked_however_it_is_made(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        PretrainConfig(**{"output": "runs", "corpus": ["a.txt"], "steps": 1, **values})


@pytest.mark.process
def test_a_command_without_its_packages_is_one_line(tmp_path: Path) -> None:
    """In a Python that has none of the packages of training."""
    venv.create(tmp_path)
    for program in ("training.commands.finetune", "export"):
        command = [str(tmp_path / "bin/python"), "-m", program]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: filelock, ")
        assert ". For training and export, run pip install 'albert-serve[train]', or in a" in line


def test_every_package_that_training_imports_is_checked() -> None:
    modules = [ast.parse(file.read_text()) for file in (REPOSITORY / "training").rglob("*.py")]
    names = {
        alias.name if isinstance(statement, ast.Import) else statement.module or ""
        for module in modules
        for statement in module.body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names
    }
    packages = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert packages - {"training", "albert_serve"} <= set(PACKAGES)
    assert set(PACKAGES) - packages == {"scipy", "sklearn", "transformers"}
