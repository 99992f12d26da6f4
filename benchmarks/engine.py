"""Speed of inference with this package, against others and the hardware's peak.

Runs one ALBERT with `transformers`, ONNX Runtime, OpenVINO and this package's engine, each in a
process of its own with the same number of threads, in turns, on the same texts: calls of fixed
shapes, a stream of texts, and a stream of questions, tokenisation included. Prints medians over
rounds, ratios within rounds, memory, load times, and how far the answers are from those of
`transformers` in fp32. Writes `tables.md` and `results.json` into the output folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from albert_serve.config import PRESETS
from albert_serve.settings import num_usable_cpus
from benchmarks.engines.jobs import CONTESTANTS, KINDS, Shape
from benchmarks.engines.measurement import MeasurementOptions, measure
from benchmarks.engines.setting import Subject
from benchmarks.engines.tables import markdown, save
from training.errors import report_errors
from training.run.options import parse_count, parse_duration
from training.system.command_line import make_parser

_REPOSITORY: Final = Path(__file__).parents[1]
_DATA: Final = _REPOSITORY / "tests" / "data"
# The defaults, and those of --quick.
_AMOUNTS: Final[dict[str, tuple[Any, Any]]] = {
    "shapes": (["1x8", "1x32", "1x128", "4x128", "1x512"], ["1x32", "1x128"]),
    "num_texts": (64, 16),
    "num_questions": (24, 6),
    "rounds": (3, 1),
}

_EXAMPLES: Final = r"""examples:
  python -m benchmarks.engine
  python -m benchmarks.engine --texts imdb/test.jsonl.xz --questions dev-v1.1.json
  python -m benchmarks.engine --checkpoint runs/imdb/checkpoint --texts imdb/test.jsonl.xz
  python -m benchmarks.engine --preset large --cases shapes --contestants onnxruntime ours-fp32
  python -m benchmarks.engine --quick

Nothing else should run on the machine meanwhile. Contestants whose packages are missing are left
out; all take part after: pip install openvino nncf onnxscript
"""


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    measurement = _measurement_options(options)
    bar: tqdm[Any]
    with tqdm(disable=None, unit="turn") as bar:
        report = measure(measurement, bar)
    save(report, options.output)
    print(markdown(report))
    minutes = (time.monotonic() - began) / 60
    print(f"{options.output / 'results.json'} has every turn; this took {minutes:.1f} minutes")
    return 0


def _measurement_options(options: argparse.Namespace) -> MeasurementOptions:
    amounts = {
        name: values[options.quick] if getattr(options, name) is None else getattr(options, name)
        for name, values in _AMOUNTS.items()
    }
    return MeasurementOptions(
        subject=Subject(
            checkpoint=options.checkpoint, preset=options.preset, tokenizer=options.tokenizer
        ),
        output=options.output,
        contestants=[CONTESTANTS[key] for key in dict.fromkeys(options.contestants)],
        kinds=options.cases,
        shapes=[Shape.parse(text) for text in dict.fromkeys(amounts["shapes"])],
        texts=options.texts,
        questions=options.questions,
        num_texts=amounts["num_texts"],
        num_questions=amounts["num_questions"],
        rounds=amounts["rounds"],
        shape_s=options.turn,
        num_threads=options.threads,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.engine", __doc__, _EXAMPLES)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench-engine"), help="(%(default)s)"
    )
    _add_subject(parser.add_argument_group("what is run"))
    _add_cases(parser.add_argument_group("what it is measured at"))
    _add_amounts(parser.add_argument_group("how much is measured"))
    return parser


def _add_subject(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--checkpoint", type=Path, help="a Hugging Face directory; without it, random weights")
    add("--preset", choices=list(PRESETS), default="base", help="their sizes (%(default)s)")
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        default=_REPOSITORY / "models" / "albert-small-en" / "tokenizer.json",
        help="tokenizer.json or spiece.model for random weights (the shipped model's)",
    )
    add(
        "--contestants",
        nargs="+",
        choices=list(CONTESTANTS),
        metavar="NAME",
        default=list(CONTESTANTS),
        help=f"of {', '.join(CONTESTANTS)} (all)",
    )


def _add_cases(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--cases", nargs="+", choices=KINDS, default=list(KINDS), help="(all)")
    add("--shapes", nargs="+", metavar="ROWSxTOKENS", help="(1x8 1x32 1x128 4x128 1x512)")
    add(
        "--texts",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[_DATA / "wiki.jsonl"],
        help="text, or JSONL with a field `text`, perhaps compressed (a few articles)",
    )
    add(
        "--questions",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[_DATA / "squad.json"],
        help="in SQuAD's format, perhaps compressed (a few paragraphs)",
    )


def _add_amounts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-texts", type=parse_count, help="of the stream (64)")
    add("--num-questions", type=parse_count, help="of the stream (24)")
    add("--rounds", type=parse_count, help="turns of each contestant at each case (3)")
    add("--turn", type=parse_duration, default=0.3, help="shortest time of a shape's turn (0.3s)")
    add("--threads", type=parse_count, default=num_usable_cpus(), help="of each (%(default)s)")
    add("--quick", action="store_true", help="fewer shapes, texts and rounds: a first look")


if __name__ == "__main__":
    sys.exit(main())
