"""Train the default model as it was trained (`make reproduce-model`).

Runs the stages of scripts/default_model.toml in turn. A stage that is complete is skipped, and one
that was stopped goes on where it was, so that the same command ends what was begun. Variables of
that file are given as NAME=VALUE; of files, VALUE may be several, and have wildcards. Files are
found from the folder of the call. Ctrl-C and SIGTERM let the stage save what it has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from albert_serve.files import write_atomically
from training.errors import TrainingError, report_errors

ROAD: Final = Path(__file__).with_name("default_model.toml")
_REPOSITORY: Final = Path(__file__).parents[1]
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ECHO_S: Final = 1.0


class RoadError(TrainingError):
    """A road that cannot be gone."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_Form = TypeVar("_Form", bound=_Entry)


class _Files(_Entry):
    where: str


class _Path(_Entry):
    path: str


class _Model(_Entry):
    model: str


class _Stage(_Entry):
    name: str
    command: str
    new_folder: str | None = None


class _Road(_Entry):
    variables: dict[str, str | _Files | _Path | _Model]
    stages: list[_Stage]


class _Record(_Entry):
    command: list[str]
    before: str
    key: str
    is_complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of the road.

    Attributes:
        words: the module to run, and its arguments.
        before: hash of the commands of all stages before this one.
        key: hash of the commands of this stage and all before it.
        new_folder: what it writes whole or not at all, and never replaces.
    """

    name: str
    words: tuple[str, ...]
    before: str
    key: str
    new_folder: Path | None


def read_road(file: Path, values: Mapping[str, str], runs: Path) -> list[Stage]:
    """Return the stages of a road, with their variables filled in.

    Raises:
        RoadError: the file is no road, or a variable is unknown, has no value or a wrong one, or
            names a file that does not exist.
        OSError: the file cannot be read.
    """
    road = _parse(_Road, file, tomllib.loads)
    unknown = sorted(values.keys() - road.variables.keys())
    if unknown:
        listed = ", ".join(road.variables)
        raise RoadError(f"{', '.join(unknown)} is no variable; there are {listed}")
    filled = {"runs": [str(runs)], **dict(_fill(road, values, runs))}
    stages: list[Stage] = []
    key = ""
    for stage in road.stages:
        try:
            words = tuple(_expand(stage.command, filled))
            folders = tuple(_expand(stage.new_folder or "", filled))
        except KeyError as error:
            raise RoadError(f"{file}: {stage.name} names {error}, which is no variable") from error
        except (ValueError, IndexError) as error:
            raise RoadError(f"{file}: {stage.name} has a wrong brace: {error}") from error
        before, key = key, hashlib.sha256(json.dumps([key, words]).encode()).hexdigest()
        new_folder = Path(*folders) if folders else None
        stages.append(
            Stage(name=stage.name, words=words, before=before, key=key, new_folder=new_folder)
        )
    return stages


def _parse(form: type[_Form], file: Path, loads: Callable[[str], Any]) -> _Form:
    try:
        return form.model_validate(loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RoadError(f"{file}: {place}: {first['msg']}") from error
    except ValueError as error:
        raise RoadError(f"{file} cannot be read: {error}") from error


def _fill(road: _Road, values: Mapping[str, str], runs: Path) -> Iterator[tuple[str, list[str]]]:
    missing: list[str] = []
    for name, variable in road.variables.items():
        value = values.get(name, "")
        if isinstance(variable, _Files):
            files = list(_files(name, value))
            if not files:
                missing.append(f"  {name}: {variable.where}")
            yield name, files
        elif isinstance(variable, _Path):
            yield name, [_absolute(value) if value else variable.path.format(runs=runs)]
        elif isinstance(variable, _Model):
            is_folder = bool(value) and Path(value).is_dir()
            yield name, [_absolute(value) if is_folder else value or variable.model]
        else:
            yield name, _split(name, value or variable)
    if missing:
        raise RoadError("these files have to be named as NAME=FILES:\n" + "\n".join(missing))


def _files(name: str, value: str) -> Iterator[str]:
    """Yield the files of a value: the one of that name, or those of its patterns."""
    patterns = [escape(value)] if glob(escape(value)) else _split(name, value)
    for pattern in patterns:
        files = sorted(glob(pattern))
        if not files:
            raise RoadError(f"there is no file {pattern}")
        yield from map(_absolute, files)


def _split(name: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise RoadError(f"{name}={value}: {error}; write it as in a shell") from error


def _absolute(path: str) -> str:
    """Return a path from the folder of the call, which is not that of the stages."""
    return str(Path(path).absolute())


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
        RoadError: a stage was begun with other commands, its record is damaged, or what it would
            write is there already. No stage is run then.
    """
    _check_folders(stages)
    complete = [_is_complete(stage, _record(stage, runs)) for stage in stages]
    with _Process() as process:
        for number, stage in enumerate(stages, start=1):
            place = f"[{number}/{len(stages)}] {stage.name}"
            if complete[number - 1]:
                print(f"{place}: complete", flush=True)
                continue
            print(f"{place}: python -m {shlex.join(stage.words)}", flush=True)
            status = _run_stage(stage, _record(stage, runs), process)
            if status:
                return status
    return 0


def _check_folders(stages: Sequence[Stage]) -> None:
    writers: dict[Path, str] = {}
    for stage in stages:
        if stage.new_folder is not None:
            other = writers.setdefault(stage.new_folder.resolve(), stage.name)
            if other != stage.name:
                raise RoadError(f"{other} and {stage.name} would write the same folder")


def _run_stage(stage: Stage, record: Path, process: _Process) -> int:
    _write(record, stage, is_complete=False)
    status = process.run([sys.executable, "-m", *stage.words])
    if status == 0:
        _write(record, stage, is_complete=True)
    elif stage.new_folder and not stage.new_folder.exists():
        record.unlink()  # a folder that comes there is not its
    if status == 0 and process.stopped_by is not None:
        return 128 + process.stopped_by
    return status if status >= 0 else 128 - status


class _Process:
    """The process of a stage, to which the signals that stop this one are passed on; for `with`.

    It has a process group of its own: what a terminal, `timeout` or make sends to the group of
    this process would reach it twice otherwise, and a second signal ends training without saving.
    For the same reason, signals within a second of the first are taken for its echo.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._came_at = 0.0
        self._pending: int | None = None
        self._running: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Process:
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Run a command to its end, however long that takes, and return its status."""
        self._running = subprocess.Popen(  # noqa: S603
            command, cwd=_REPOSITORY, stdin=subprocess.DEVNULL, process_group=0
        )
        try:
            self._pass_on()
            return self._running.wait()
        finally:
            self._running = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by, self._came_at = number, now
        elif now - self._came_at < _ECHO_S:
            return
        self._pending = number
        self._pass_on()

    def _pass_on(self) -> None:
        if self._running is not None and self._pending is not None:
            self._running.send_signal(self._pending)
            self._pending = None


def _record(stage: Stage, runs: Path) -> Path:
    return runs / f"{stage.name}.stage.json"


def _is_complete(stage: Stage, record: Path) -> bool:
    """Whether a stage has ended; one that has not may be corrected: it knows what it can resume."""
    known = _parse(_Record, record, json.loads) if record.is_file() else None
    is_complete = known is not None and known.is_complete
    if known and (known.key != stage.key if is_complete else known.before != stage.before):
        raise RoadError(
            f"{stage.name} was begun with other commands, its own or those before it ({record}); "
            "give the same variables, or another --runs"
        )
    if is_complete:
        return True
    if stage.new_folder is None or not stage.new_folder.exists():
        return False
    if known and known.key == stage.key:  # this process was killed before it could record that
        return True
    raise RoadError(
        f"{stage.name} would write {stage.new_folder}, which is there already; name another folder"
    )


def _write(record: Path, stage: Stage, *, is_complete: bool) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    known = _Record(
        command=list(stage.words), before=stage.before, key=stage.key, is_complete=is_complete
    )
    write_atomically(record, (known.model_dump_json(indent=2) + "\n").encode())


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
