"""Packs a pretraining for a machine that has torch and no network, and joins what it sends back.

docs/bare-machine.md has the whole round. Options of `training.pretrain` follow after `--`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scripts.bare_machine.join import Return, join_model, join_run
from scripts.bare_machine.manifest import BareMachineError
from scripts.bare_machine.options import describe_bytes, parse_bytes
from scripts.bare_machine.pack import Job, Limits, loads, pack
from scripts.bare_machine.pieces import PIECE_BYTES
from scripts.bare_machine.run_folder import OPTIONS_FILE
from scripts.bare_machine.selection import Selection, describe
from training.errors import TrainingError
from training.shards import Shards

_EXAMPLES: Final = r"""examples:
  python -m scripts.bare_machine pack --shards runs/shards --tokenizer runs/vocab \
      --output runs/job -- --preset base --recipe small --budget 25m --device cuda
  python -m scripts.bare_machine join back/ --output runs/base
  python -m scripts.bare_machine pack --shards runs/shards --tokenizer runs/vocab \
      --resume runs/base --output runs/job-2
  python -m scripts.bare_machine join back/ --only-model --output runs/base-model
  python -m scripts.bare_machine select --shards runs/shards --parts 0 --output runs/shards-0
"""
_DATA_BYTES: Final = 60 << 20
_LOAD_BYTES: Final = 63 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:at])
    try:
        if options.command == "pack":
            return _pack(options, given[at + 1 :] if at < len(given) else None)
        return _join(options) if options.command == "join" else _select(options)
    except (BareMachineError, TrainingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _pack(options: argparse.Namespace, given: list[str] | None) -> int:
    tokenizer = options.tokenizer / "tokenizer.json"
    for folder in (options.shards, *([options.validation] if options.validation else [])):
        Shards.open(folder, tokenizer)
    selection = _selection(options)
    selection.check()
    job = Job(
        selection=selection,
        tokenizer=options.tokenizer,
        options=_training_options(options, given),
        validation=options.validation,
        initialize_from=options.initialize_from,
        resume=options.resume,
        wheels=options.wheels,
    )
    _check_options(job)
    limits = Limits(load_bytes=options.max_load, piece_bytes=options.piece_size)
    manifest = pack(job, options.output, limits)
    group_of = {piece: group.name for group in manifest.groups for piece in group.pieces}
    for place, pieces in enumerate(loads(manifest), start=1):
        names = ", ".join(dict.fromkeys(group_of[piece] for piece in pieces))
        size = describe_bytes(sum(piece.num_bytes for piece in pieces))
        print(f"{options.output / f'load-{place}'}: {size}: {names}")
    if selection.left_out:
        left = " ".join(map(str, selection.left_out))
        print(f"of {describe(selection)}; left out: {left} (--parts, --max-data)")
    return 0


def _selection(options: argparse.Namespace) -> Selection:
    if options.parts is not None:
        return Selection.of(options.shards, options.parts)
    return Selection.within(options.shards, options.max_data)


def _training_options(options: argparse.Namespace, given: list[str] | None) -> list[str]:
    """Those that are given, or else those that the run was begun with.

    Raises:
        BareMachineError: there are none.
    """
    if given is not None:
        return given
    file = None if options.resume is None else options.resume / OPTIONS_FILE
    if file is None or not file.is_file():
        raise BareMachineError("give the options of training.pretrain, after --")
    try:
        known: list[str] = json.loads(file.read_bytes())
    except ValueError as error:
        raise BareMachineError(f"{file} is damaged: {error}; give the options after --") from error
    return known


def _check_options(job: Job) -> None:
    """See that training will take the options.

    Raises:
        BareMachineError: one names a folder, which is for this program to do.
    """
    # Slow.
    from training.pretrain import build_parser as training_parser

    ours = ["--shards", "shards", "--tokenizer", "tokenizer", "--output", "output"]
    taken = training_parser().parse_args([*ours, *job.options])
    folders = (taken.shards, taken.tokenizer, taken.output)
    others = (taken.validation, taken.initialize_from)
    if folders != (Path("shards"), Path("tokenizer"), Path("output")) or others != (None, None):
        raise BareMachineError(
            "--shards, --tokenizer, --validation and --initialize-from go before --, and --output "
            "is chosen on the machine"
        )


def _join(options: argparse.Namespace) -> int:
    returned = Return.find(options.pieces, options.step)
    if returned.foreign:
        names = ", ".join(file.name for file in returned.foreign)
        print(f"not of step {returned.step:,}, and left alone: {names}")
    if options.only_model:
        join_model(returned, options.output)
        print(f"{options.output}: the model of step {returned.step:,}")
        return 0
    checkpoint = join_run(returned, options.output)
    end = "the run is done" if returned.manifest.about["is_done"] else "the run goes on from there"
    print(f"{checkpoint}: {end}")
    return 0


def _select(options: argparse.Namespace) -> int:
    selection = _selection(options)
    selection.check()
    selection.write(options.output)
    print(f"{options.output}: {describe(selection)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bare_machine",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_pack(commands.add_parser("pack", help="make the folders that are sent to the machine"))
    _add_join(commands.add_parser("join", help="make a run's folder of what came back"))
    select = commands.add_parser("select", help="make a corpus of some parts, to go on with here")
    _add_data(select)
    select.add_argument("--output", type=Path, required=True, help="folder to make")
    return parser


def _add_pack(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, help="folder that training.vocab wrote")
    add("--validation", type=Path, help="folder of held-out text that training.prepare wrote")
    add("--initialize-from", type=Path, help="a checkpoint; weights alone, a run of its own")
    add("--resume", type=Path, help="a run's folder, to go on with exactly")
    add("--wheels", nargs="+", type=Path, default=(), help="packages that the machine lacks")
    add("--output", type=Path, required=True, help="folder to make, with load-1/ and on in it")
    add("--max-load", type=parse_bytes, default=_LOAD_BYTES, help="the most of a load (63MiB)")
    add("--piece-size", type=parse_bytes, default=PIECE_BYTES, help="the most of a piece (15MiB)")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shards", type=Path, required=True, help="folder that training.prepare wrote")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--parts", nargs="+", type=int, help="of it, by number")
    which.add_argument(
        "--max-data",
        type=parse_bytes,
        default=_DATA_BYTES,
        help="as many of the first parts as have no more than that (60MiB)",
    )


def _add_join(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pieces", nargs="+", type=Path, help="files, or folders of them")
    add("--output", type=Path, required=True, help="the run's folder, new or to be updated")
    add("--step", type=int, help="of the checkpoint, where there are several (the newest)")
    add("--only-model", action="store_true", help="the weights alone, as a checkpoint's folder")


if __name__ == "__main__":
    sys.exit(main())
