"""Train the default model as it was trained (`make reproduce-model`).

Runs the stages of stages.toml in turn. A stage that is complete is skipped, and one that was
stopped goes on where it was, so that the same command ends what was begun. Variables of that file
are given as NAME=VALUE; of files, VALUE may be several, and have wildcards. Files are found from
the folder of the call. Ctrl-C and SIGTERM let the stage save what it has.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from types import FrameType
from typing import Final

from albert_serve.files import write_atomically
from training.errors import TrainingError, report_errors

ROAD: Final = Path(__file__).with_name("stages.toml")
_REPOSITORY: Final = Path(__file__).parents[2]
# Of the folder of all runs: the commands of the stages that are complete, in their order.
_COMPLETE: Final = "complete.json"
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _RoadError(TrainingError):
    """A road that cannot be gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """A stage of the road."""

    name: str
    words: list[str]
    new_folder: Path | None  # written whole or not at all, and never replaced


def _read_road(file: Path, values: Mapping[str, str], runs: Path) -> list[_Stage]:
    """Return the stages of a road, with their variables filled in."""
    road = tomllib.loads(file.read_text(encoding="utf-8"))
    if unknown := sorted(values.keys() - road["variables"].keys()):
        listed = ", ".join(road["variables"])
        raise _RoadError(f"{', '.join(unknown)} is no variable; there are {listed}")
    filled = {"runs": [str(runs)]}
    missing: list[str] = []
    for name, variable in road["variables"].items():
        filled[name] = _fill(name, variable, values.get(name, ""), runs)
        if "where" in variable and not filled[name]:
            missing.append(f"  {name}: {variable['where']}")
    if missing:
        raise _RoadError("these files have to be named as NAME=FILES:\n" + "\n".join(missing))
    stages: list[_Stage] = []
    for stage in road["stages"]:
        folder = list(_expand(stage.get("new_folder", ""), filled))
        stages.append(
            _Stage(
                name=stage["name"],
                words=list(_expand(stage["command"], filled)),
                new_folder=Path(*folder) if folder else None,
            )
        )
    return stages


def _fill(name: str, variable: str | Mapping[str, str], value: str, runs: Path) -> list[str]:
    """Return the words that stand for a variable."""
    match variable:
        case str():
            return _split(name, value or variable)
        case {"where": _}:
            return list(_files(name, value))
        case {"path": path}:
            return [_absolute(value) if value else path.format(runs=runs)]
        case {"model": model}:
            is_folder = bool(value) and Path(value).is_dir()
            return [_absolute(value) if is_folder else value or model]
    raise _RoadError(f"{name} has none of where, path and model")


def _files(name: str, value: str) -> Iterator[str]:
    """Yield the files of a value, which is a name or a list of patterns."""
    patterns = [escape(value)] if glob(escape(value)) else _split(name, value)
    for pattern in patterns:
        files = sorted(glob(pattern))
        if not files:
            raise _RoadError(f"there is no file {pattern}")
        yield from map(_absolute, files)


def _split(name: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise _RoadError(f"{name}={value}: {error}; write it as in a shell") from error


def _absolute(path: str) -> str:
    """Return the absolute path: stages run in another folder."""
    return str(Path(path).absolute())


def _expand(command: str, filled: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the words of a command; a word that is a variable of several files becomes several."""
    for word in command.split():
        if word.startswith("{") and word.endswith("}"):
            yield from filled[word[1:-1]]
        else:
            yield word.format_map({name: " ".join(parts) for name, parts in filled.items()})


def _run_road(stages: Sequence[_Stage], runs: Path) -> int:
    """Run the stages that are not complete; return the status of the first that fails, or 0."""
    complete = _read_complete(runs / _COMPLETE, stages)
    for stage in stages[len(complete) :]:
        if stage.new_folder is not None and stage.new_folder.exists():
            raise _RoadError(
                f"{stage.name} would write {stage.new_folder}, which is there already; name "
                "another folder"
            )
    runs.mkdir(parents=True, exist_ok=True)
    process = _Process()
    with process.taking_signals():
        for number, stage in enumerate(stages):
            place = f"[{number + 1}/{len(stages)}] {stage.name}"
            if number < len(complete):
                print(f"{place}: complete", flush=True)
                continue
            print(f"{place}: python -m {shlex.join(stage.words)}", flush=True)
            if status := process.run([sys.executable, "-m", *stage.words]):
                return status if status > 0 else 128 - status
            complete.append(stage.words)
            write_atomically(runs / _COMPLETE, json.dumps(complete, indent=2).encode())
            if process.stopped_by is not None:
                return 128 + process.stopped_by
    return 0


def _read_complete(file: Path, stages: Sequence[_Stage]) -> list[list[str]]:
    """Return the commands of the complete stages."""
    if not file.is_file():
        return []
    try:
        complete: list[list[str]] = list(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise _RoadError(f"{file} cannot be read: {error}; give another --runs") from error
    for stage, words in zip(stages, complete, strict=False):
        if stage.words != words:
            raise _RoadError(
                f"{stage.name} was begun with other commands ({file}); give the same variables, or "
                "another --runs"
            )
    return complete[: len(stages)]


class _Process:
    """The process of a stage, to which the first signal that stops this one is passed on.

    It has a process group of its own: what a terminal, `timeout` or make sends to the group of
    this process would reach it twice otherwise, and a second signal ends training without saving.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._running: subprocess.Popen[bytes] | None = None

    @contextmanager
    def taking_signals(self) -> Iterator[None]:
        """Take the signals that stop this process; for `with`."""
        before = {number: signal.getsignal(number) for number in _PASSED_ON}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as by nohup
                signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Run a command to its end, however long that takes, and return its status."""
        self._running = subprocess.Popen(  # noqa: S603
            command, cwd=_REPOSITORY, stdin=subprocess.DEVNULL, process_group=0
        )
        return self._running.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by is None:
            self.stopped_by = number
            if self._running is not None:
                self._running.send_signal(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.albert_small_en.reproduce", description=__doc__
    )
    add = parser.add_argument
    add("values", nargs="*", type=_value, metavar="NAME=VALUE", help="variables of the road")
    add("--runs", type=Path, default=Path("runs/default-model"), help="folder of all runs")
    add("--road", type=Path, default=ROAD, help="the file of stages (%(default)s)")
    add("--dry-run", action="store_true", help="print the commands and run none")
    options = parser.parse_args(arguments)
    runs = options.runs.absolute()

    def run() -> int:
        stages = _read_road(options.road, dict(options.values), runs)
        if not options.dry_run:
            return _run_road(stages, runs)
        for stage in stages:
            print(f"python -m {shlex.join(stage.words)}")
        return 0

    return report_errors(run)


def _value(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no variable with its value; write NAME=VALUE"
        )
    return name, value


if __name__ == "__main__":
    sys.exit(main())
