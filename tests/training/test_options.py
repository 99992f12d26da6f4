"""Options have the same values and limits on the command line and in Python."""

from __future__ import annotations

import argparse
import ast
import math
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import ANY, Mock, call

import numpy as np
import pytest

from tests.training.support import REPOSITORY
from training import PACKAGES
from training.commands.pretrain import PretrainConfig
from training.errors import TrainingError
from training.options import labelled
from training.options.flags import OptionError, Options, add_flags, flag, read_flags
from training.options.labelled import GLUE, LabelledTexts
from training.options.values import Count, Duration, Finite, Fraction, Positive, Seed, Share


@dataclass(frozen=True, kw_only=True)
class AllOptions(Options, title="all options"):
    """Options with one option of each kind."""

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


make_options: Any = partial(AllOptions, files=(Path("a"),))


def parse_options(*words: str) -> AllOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser, AllOptions)
    return read_flags(AllOptions, parser.parse_args(["--files", "a", *words]))


@pytest.mark.parametrize(
    ("name", "allowed", "rejected"),
    [
        ("count", [1, 10], [0, 1.0, "x", "+1"]),
        ("seed", [0], [-1, 0.5]),
        ("rate", [1e-9, 7], [0, math.inf, math.nan, "high"]),
        ("part", [0, 1, 0.5], [-0.01, 1.01, math.nan]),
        ("share", [0, 0.99], [-0.01, 1]),
        ("offset", [-1e9, 0, 7], [math.inf, math.nan, "x"]),
        ("time", [], ["5", "0s", "infh"]),
        ("kind", ["new"], ["other"]),
    ],
)
def test_values_have_the_same_limits_as_flags_and_in_python(
    name: str, allowed: list[Any], rejected: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in allowed:
        options = make_options(**{name: value})
        assert options == parse_options(f"--{name}={value}")
        assert getattr(options, name) == value
    for value in rejected:
        with pytest.raises(OptionError, match=re.escape(f"--{name}: {value!r} is not ")):
            make_options(**{name: value})
        with pytest.raises(SystemExit):
            parse_options(f"--{name}={value}")
        assert f"argument --{name}: " in capsys.readouterr().err


def test_the_help_states_each_default_once() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, AllOptions)
    words = " ".join(parser.format_help().split())
    for text in ("number of things (default: 3)", "sizes (default: 4 2)", "files (required)"):
        assert text in words
    assert words.count("(default: ") == 5
    assert "seed (default: 7) --" in words


def test_python_values_are_converted_to_the_types_of_the_options() -> None:
    """A single value becomes a tuple, and numbers of NumPy are allowed."""
    config = make_options(sizes=2, count=np.int64(5), rate=1, time="1.5h")
    assert (config.files, config.sizes) == ((Path("a"),), (2,))
    assert (config.count, type(config.count), type(config.rate)) == (5, int, float)
    assert config.time == parse_options("--time", "90m").time == 5400
    assert make_options(time="90s").time == 90
    assert make_options(files=["a", "b"], sizes=(n for n in (1, 2))).sizes == (1, 2)
    assert parse_options("--sizes", "1", "2", "--is-on") == make_options(sizes=[1, 2], is_on=True)
    for changes in ({"sizes": (1, 0)}, {"is_on": "yes"}, {"count": None}):
        with pytest.raises(OptionError, match=f"^--{next(iter(changes)).replace('_', '-')}: "):
            make_options(**changes)


PRETRAIN = partial(PretrainConfig, output=Path("runs"), corpus=(Path("a.txt"),), steps=1)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (LabelledTexts, {"task": "NLI"}, "'NLI' is not a task"),
        (LabelledTexts, {"task": "Race"}, "--task RACE requires --data"),
        (LabelledTexts, {"task": "cola", "text_column": "b", "delimiter": ";"}, "--text-column, "),
        (LabelledTexts, {"data": "x"}, "--data x is the folder of a task. Add --task"),
        (LabelledTexts, {"delimiter": "ab"}, "--delimiter 'ab'"),
        (LabelledTexts, {"delimiter": ""}, "--delimiter '' is not one character"),
        (LabelledTexts, {"label_column": ["a", "b"], "label_separator": ","}, "-separator divides"),
        (LabelledTexts, {"label_column": ["a", "a"]}, "--label-column a a repeats a column"),
        (LabelledTexts, {"head": "x"}, "--head x is a text classifier without data"),
        (PRETRAIN, {"corpus": ()}, "Set either --corpus or --shards"),
        (PRETRAIN, {"order_share": 0.2, "sentence_task": "sop"}, "train the same head"),
        (PRETRAIN, {"order_share": 1}, "--order-share 1 leaves no step for masked tokens"),
        (PRETRAIN, {"device": "gpu"}, "--device: 'gpu' cannot be used: Expected one of "),
        (PRETRAIN, {"steps": None}, "The run has no end. Set --steps, --budget or --recipe"),
    ],
)
def test_options_that_do_not_fit_together_are_rejected(
    config: Callable[..., object], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        config(**values)


def test_a_task_is_downloaded_once_from_the_default_or_a_named_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cola").mkdir()
    find, load = Mock(return_value=None), Mock(return_value=tmp_path)
    monkeypatch.setattr(labelled, "find_cached", find)
    monkeypatch.setattr(labelled, "download", load)
    monkeypatch.setattr(labelled, "check_reachable", Mock())
    monkeypatch.chdir(tmp_path)

    def folder_of(data: Any) -> Path | None:
        return LabelledTexts(task="cola", data=data).task_folder

    for data in (None, "nyu-mll/glue", "nyu-mll/glue@main"):
        assert folder_of(data) == tmp_path / "cola"
    main = replace(GLUE, revision="main")
    assert load.call_args_list == [call(GLUE, ANY), call(GLUE, ANY), call(main, ANY)]
    assert load.call_args.args[1][0] == "cola/train-*.parquet"
    find.return_value = tmp_path
    assert folder_of(None) == tmp_path / "cola"
    assert folder_of("cola") == Path("cola")
    assert find.call_args_list == [call(GLUE, ANY)] * 3
    assert load.call_count == 3
    with pytest.raises(TrainingError, match=r"has no files of rte\. Use --data"):
        assert LabelledTexts(task="rte").task_folder


@pytest.mark.process
def test_missing_packages_are_an_error_of_one_line(tmp_path: Path) -> None:
    venv.create(tmp_path)
    for program in ("training.commands.finetune", "export"):
        command = [str(tmp_path / "bin/python"), "-m", program]
        process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert process.returncode == 1
        (line,) = process.stderr.splitlines()
        assert line.startswith("error: filelock, ")
        assert ". For training and export, run pip install 'albert-serve[train]', or in a" in line


def test_all_packages_that_training_imports_are_checked() -> None:
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
