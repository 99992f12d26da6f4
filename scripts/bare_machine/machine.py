"""Trains a packed job on this machine, and sends its newest checkpoint back in pieces.

A stage is a folder where several loads gather, and where the run goes on from call to call; a load
that is whole is its own. It keeps this program, so that later calls need send nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from scripts.bare_machine.child import Deadline, run_until
from scripts.bare_machine.environment import Machine, examine, training_environment
from scripts.bare_machine.manifest import BareMachineError, Manifest
from scripts.bare_machine.options import (
    describe_bytes,
    describe_range,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_range,
)
from scripts.bare_machine.pieces import PIECE_BYTES
from scripts.bare_machine.run_folder import OPTIONS_FILE
from scripts.bare_machine.stage import Stage, describe_missing, write_whole

_DONE: Final = 0
# On SIGTERM training saves and ends with 128 and its number, but for its first and last moments.
_STOPPED: Final = (128 + signal.SIGTERM, -signal.SIGTERM)
_EXAMPLES: Final = """examples:
  python3 run.py stage --stage /var/tmp/stage
  python3 run.py train --stage /var/tmp/stage --time-limit 9m --out out
  python3 /var/tmp/stage/run.py send 4:8 --out out
  python3 /var/tmp/stage/run.py train --time-limit 9m --out out
"""


def main(here: Path, arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status.

    Args:
        here: the folder of `run.py`, a load or a stage.
    """
    started = time.monotonic()
    options = _parser(here).parse_args(arguments)
    try:
        stage = Stage(folder=options.stage.resolve())
        if options.command == "send":
            if options.step is None:
                stage.catch_up()
            return _send(stage, options.out, options.pieces, options.step)
        stage.take_in(here)
        return _stage(stage) if options.command == "stage" else _train(stage, options, started)
    except (BareMachineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _stage(stage: Stage) -> int:
    """Say what the machine lacks, and what is still to come."""
    missing = stage.unpack()
    if (stage.job / "code").is_dir():
        _check_machine(stage)
    if missing:
        print(describe_missing(stage.manifest(), missing))
        return 0
    print(f"all is here: python3 {stage.folder / 'run.py'} train --time-limit 9m --out OUT")
    return 0


def _train(stage: Stage, options: argparse.Namespace, started: float) -> int:
    missing = stage.unpack()
    if missing:
        raise BareMachineError(describe_missing(stage.manifest(), missing))
    machine = _check_machine(stage)
    deadline = Deadline(
        stop_at=started + options.time_limit - options.reserve,
        kill_at=started + options.time_limit - options.reserve / 3,
    )
    if time.monotonic() >= deadline.stop_at:
        raise BareMachineError(
            f"a limit of {options.time_limit:g} s leaves no time to train: "
            f"{time.monotonic() - started:.0f} s are gone, and {options.reserve:g} s are for "
            "sending the checkpoint (--reserve)"
        )
    with stage.lock() as lock:
        status = _train_until(stage, deadline, lock)
        facts = {"is_done": status == _DONE, "machine": machine.versions, "device": machine.device}
        kept = stage.freeze(facts, piece_bytes=options.piece_size)
    print(_describe_end(status))
    if kept is None:
        raise BareMachineError("there is no checkpoint: training ended before it wrote its first")
    _send(stage, options.out, range(options.max_pieces))
    return 0 if status in (_DONE, *_STOPPED) else 1


def _train_until(stage: Stage, deadline: Deadline, lock: IO[str]) -> int:
    """Begin the run or go on with it; returns the status of training."""
    job, options = stage.job, stage.manifest().about["options"]
    stage.begin_from(job / "run")
    stage.run.mkdir(exist_ok=True)
    write_whole(stage.run / OPTIONS_FILE, f"{json.dumps(options)}\n".encode())
    return run_until(
        _command(stage, options),
        deadline,
        folder=job / "code",
        environment=training_environment(job),
        lock=lock,
    )


def _check_machine(stage: Stage) -> Machine:
    about = stage.manifest().about
    machine = examine(about["modules"], training_environment(stage.job))
    machine.check()
    for note in machine.notes(about["versions"], about["options"]):
        print(note, flush=True)
    return machine


def _command(stage: Stage, options: Sequence[str]) -> list[str]:
    job = stage.job
    command = [sys.executable, "-m", "training.pretrain", "--shards", str(job / "shards")]
    command += ["--tokenizer", str(job / "tokenizer"), "--output", str(stage.run)]
    for name in ("validation", "initialize-from"):
        if (job / name).is_dir():
            command += [f"--{name}", str(job / name)]
    return [*command, *options]


def _describe_end(status: int) -> str:
    if status == _DONE:
        return "the run is done"
    if status in _STOPPED:
        return "stopped in time; the next call goes on"
    if status < 0:
        return f"training was ended by signal {-status}; its last checkpoint counts"
    return f"training failed with status {status}; its last checkpoint counts"


def _send(stage: Stage, out: Path, numbers: range, step: int | None = None) -> int:
    manifest = stage.send(out, numbers, step=step)
    total = len(manifest.pieces)
    if numbers.start >= total:
        raise BareMachineError(f"there are {total} pieces, {describe_range(range(total))}")
    sent = range(numbers.start, min(numbers.stop, total))
    print(_describe(manifest))
    print(f"{out} has {describe_range(sent)} of them")
    if sent.stop < total:
        rest = range(sent.stop, min(sent.stop + len(numbers), total))
        program = shlex.quote(str(stage.folder / "run.py"))
        which = f"{describe_range(rest)} --step {manifest.about['step']}"
        print(f"the next ones: python3 {program} send {which} --out OUT")
    return 0


def _describe(manifest: Manifest) -> str:
    parts = []
    for group in manifest.groups:
        numbers = range(group.pieces[0].number, group.pieces[-1].number + 1)
        size = describe_bytes(sum(piece.num_bytes for piece in group.pieces))
        parts.append(f"{describe_range(numbers)} {group.name} ({size})")
    return f"step {manifest.about['step']:,}: {len(manifest.pieces)} pieces, {', '.join(parts)}"


def _parser(here: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 run.py",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    stage = commands.add_parser("stage", help="keep what this load brings, and say what lacks")
    train = commands.add_parser("train", help="train within a limit of time, and send pieces")
    send = commands.add_parser("send", help="send other pieces of a checkpoint")
    for command in (stage, train, send):
        command.add_argument("--stage", type=Path, default=here, help="(this program's folder)")
    add = train.add_argument
    add("--time-limit", type=parse_duration, required=True, help="of the whole call, such as 9m")
    add("--reserve", type=parse_duration, default=45.0, help="of it, to save and send in (45s)")
    add("--max-pieces", type=parse_count, default=4, help="that may be sent in this call (4)")
    add("--piece-size", type=parse_bytes, default=PIECE_BYTES, help="the most of one (15MiB)")
    send.add_argument("pieces", type=parse_range, help="such as 4:8, which are 4 to 7")
    send.add_argument("--step", type=int, help="of the checkpoint (the newest)")
    for command in (train, send):
        command.add_argument("--out", type=Path, required=True, help="folder to write pieces in")
    return parser
