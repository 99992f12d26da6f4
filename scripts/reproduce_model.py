"""Train the default model as it was trained (`make reproduce-model`).

Runs the stages of scripts/default_model.toml in turn. A stage that is complete is skipped, and one
that was stopped goes on where it was, so that the same command ends what was begun. Variables of
that file are given as NAME=VALUE; of files, VALUE may be several, and have wildcards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Final

from albert_serve.files import write_atomically
from training.errors import TrainingError, report_errors

ROAD: Final = Path(__file__).with_name("default_model.toml")
_REPOSITORY: Final = Path(__file__).parents[1]


class RoadError(TrainingError):
    """A road that cannot be gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of the road.

    Attributes:
        words: the module to run, and its arguments.
        key: hash of the commands of this stage and all before it.
    """

    name: str
    words: tuple[str, ...]
    key: str


def read_road(file: Path, values: Mapping[str, str], runs: Path) -> list[Stage]:
    """Return the stages of a road, with their variables filled in.

    Raises:
        RoadError: a variable is unknown, has no value, or names a file that does not exist.
    """
    road = tomllib.loads(file.read_text(encoding="utf-8"))
    variables = road["variables"]
    unknown = sorted(values.keys() - variables.keys())
    if unknown:
        raise RoadError(f"{', '.join(unknown)} is no variable; there are {', '.join(variables)}")
    filled = {"runs": [str(runs)], **dict(_fill(variables, values, runs))}
    stages: list[Stage] = []
    key = ""
    for stage in road["stages"]:
        try:
            words = tuple(_expand(stage["command"], filled))
        except KeyError as error:
            raise RoadError(
                f"{file}: {stage['name']} names {error}, which is no variable"
            ) from error
        key = hashlib.sha256(json.dumps([key, words]).encode()).hexdigest()
        stages.append(Stage(name=stage["name"], words=words, key=key))
    return stages


def _fill(
    variables: Mapping[str, str | Mapping[str, str]], values: Mapping[str, str], runs: Path
) -> Iterator[tuple[str, list[str]]]:
    missing: list[str] = []
    for name, variable in variables.items():
        if isinstance(variable, str):
            default = variable.format(runs=shlex.quote(str(runs)))
            yield name, shlex.split(values.get(name) or default)
            continue
        files = [file for pattern in shlex.split(values.get(name, "")) for file in _files(pattern)]
        if not files:
            missing.append(f"  {name}: {variable['where']}")
        yield name, files
    if missing:
        raise RoadError("these files have to be named as NAME=FILES:\n" + "\n".join(missing))


def _files(pattern: str) -> list[str]:
    files = sorted(glob(pattern))
    if not files:
        raise RoadError(f"there is no file {pattern}")
    return files


def _expand(command: str, filled: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the words of a command; a word that is a variable of several files becomes several."""
    for word in command.split():
        if word.startswith("{") and word.endswith("}"):
            yield from filled[word[1:-1]]
        else:
            yield word.format_map({name: " ".join(parts) for name, parts in filled.items()})


def run_road(stages: Sequence[Stage], runs: Path) -> int:
    """Run the stages that are not complete; return the exit status of the first that fails, or 0.

    Raises:
        RoadError: a stage was begun with other commands.
    """
    for number, stage in enumerate(stages, start=1):
        record = runs / f"{stage.name}.stage.json"
        if _is_complete(record, stage):
            print(f"[{number}/{len(stages)}] {stage.name}: complete", flush=True)
            continue
        print(f"[{number}/{len(stages)}] {stage.name}: python -m {shlex.join(stage.words)}")
        sys.stdout.flush()
        _write(record, stage, is_complete=False)
        status = subprocess.run(  # noqa: S603
            [sys.executable, "-m", *stage.words], cwd=_REPOSITORY, check=False
        ).returncode
        if status:
            return status if status > 0 else 128 - status
        _write(record, stage, is_complete=True)
    return 0


def _is_complete(record: Path, stage: Stage) -> bool:
    if not record.is_file():
        return False
    known = json.loads(record.read_text(encoding="utf-8"))
    if known["key"] != stage.key:
        raise RoadError(
            f"{stage.name} was begun with other commands, its own or those before it ({record}); "
            "give the same variables, or another --runs"
        )
    return bool(known["is_complete"])


def _write(record: Path, stage: Stage, *, is_complete: bool) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": list(stage.words), "key": stage.key, "is_complete": is_complete}
    write_atomically(record, (json.dumps(content, indent=2) + "\n").encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    values = dict(word.split("=", 1) for word in options.values)
    runs = options.runs.absolute()
    stages = read_road(options.road, values, runs)
    if options.dry_run:
        for stage in stages:
            print(f"python -m {shlex.join(stage.words)}")
        return 0
    return run_road(stages, runs)


def _value(word: str) -> str:
    if "=" not in word:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no variable with its value; write NAME=VALUE"
        )
    return word


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.reproduce_model", description=__doc__)
    add = parser.add_argument
    add("values", nargs="*", type=_value, metavar="NAME=VALUE", help="variables of the road")
    add("--runs", type=Path, default=Path("runs/default-model"), help="folder of all runs")
    add("--road", type=Path, default=ROAD, help="the file of stages (%(default)s)")
    add("--dry-run", action="store_true", help="print the commands and run none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
