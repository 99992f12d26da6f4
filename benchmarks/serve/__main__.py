"""Throughput and latency of the service, and the overhead of HTTP over the engine.

Serves one ALBERT with this package and with a BentoML service over pipelines of `transformers`
that is written as BentoML's documentation does it, batching on; in turns, each with all threads,
asked the same requests by a process of its own. Prints throughput and latency by number of
connections, throughput at the peer's p99, latency when requests come at random times, and what
HTTP costs: throughput against the engine's own, and p50 of one request at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from albert_serve.bundle.manifest import TOKENIZER_FILE
from albert_serve.config import PRESETS
from albert_serve.default_bundle import shipped_bundle
from albert_serve.settings import num_usable_cpus
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.checkpoint import make_checkpoint
from benchmarks.harness.page import describe_machine, write_between
from benchmarks.harness.process import REPOSITORY
from benchmarks.harness.texts import WIKI
from benchmarks.serve.contest import ServeContest
from benchmarks.serve.stream import (
    TASKS,
    ServedModel,
    make_stream,
    our_service,
    peer_service,
)
from benchmarks.serve.tables import ServeReport, markdown, to_dict
from export.bundle import export_bundle
from training.errors import report_errors
from training.system.command_line import make_parser

_DOCS: Final = REPOSITORY / "docs" / "serving.md"
_BEGIN: Final = "<!-- written by make bench-serve: begin -->"
_END: Final = "<!-- written by make bench-serve: end -->"
_PRECISIONS: Final = ("fp32", "int8")
# The defaults, and those of --quick.
_AMOUNTS: Final[dict[str, tuple[Any, Any]]] = {
    "num_requests": (80, 24),
    "num_idle": (20, 5),
    "levels": ([1, 2, 4, 8, 16, 32, 64], [1, 8]),
    "rounds": (2, 1),
    "level_time": (3.0, 0.5),
}
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.serve
  python -m benchmarks.serve --texts imdb/test.jsonl.xz --write
  python -m benchmarks.serve --preset small
  python -m benchmarks.serve --quick

Nothing else should run on the machine meanwhile.
"""


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    report = _measure(options)
    tables = markdown(report)
    print(tables)
    content = json.dumps(to_dict(report), indent=1)
    (options.output / "results.json").write_text(content, encoding="utf-8")
    if options.write:
        write_between(_DOCS, _BEGIN, _END, tables)
    print(f"this took {(time.monotonic() - began) / 60:.1f} minutes")
    return 0


def _measure(options: argparse.Namespace) -> ServeReport:
    amounts = {
        name: values[options.quick] if getattr(options, name) is None else getattr(options, name)
        for name, values in _AMOUNTS.items()
    }
    folder: Path = options.output
    today = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    machine = [*describe_machine(options.threads), today]
    num_pieces = AlbertTokenizer.from_file(shipped_bundle() / TOKENIZER_FILE).vocab_size
    checkpoint = make_checkpoint(
        options.preset, folder / "checkpoint", *TASKS, vocab_size=num_pieces
    )
    stream = make_stream(checkpoint, options.texts, amounts["num_requests"], amounts["num_idle"])
    peer = peer_service(checkpoint, options.threads)
    bar: tqdm[Any]
    with tqdm(disable=None, unit="load") as bar:
        contest = ServeContest(
            stream=stream,
            levels=amounts["levels"],
            rounds=amounts["rounds"],
            least_s=amounts["level_time"],
            num_threads=options.threads,
            folder=folder,
            bar=bar,
        )
        results = contest.run([peer, *_our_services(checkpoint, options)])
    return ServeReport(
        machine=machine,
        model=f"{options.preset}, random weights, the vocabulary of the shipped model",
        stream=stream,
        results=results,
    )


def _our_services(checkpoint: Path, options: argparse.Namespace) -> Iterator[ServedModel]:
    for precision in options.precisions:
        target = options.output / f"bundle-{precision}"
        # What int8 costs is measured elsewhere; that of random weights says nothing.
        exported = export_bundle(checkpoint, target, precision=precision, overwrite=True)
        yield our_service(f"ours {precision}", exported.bundle.folder, options.threads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.serve", __doc__, _EXAMPLES)
    add = parser.add_argument_group("what is served, and asked").add_argument
    add("--preset", choices=list(PRESETS), default="base", help="sizes (%(default)s)")
    add("--precisions", nargs="+", choices=_PRECISIONS, default=_PRECISIONS, help="of ours (all)")
    texts_help = "text, or JSONL with a field `text`, perhaps compressed (a few articles)"
    add("--texts", nargs="+", type=Path, metavar="FILE", default=[WIKI], help=texts_help)
    add = parser.add_argument_group("how much is measured").add_argument
    add("--num-requests", type=int, help="of a pass (80)")
    add("--num-idle", type=int, help="of each length, one at a time (20)")
    add("--levels", nargs="+", type=int, metavar="N", help="connections (1 2 4 ... 64)")
    add("--level-time", type=float, help="seconds in which passes at a level begin (3)")
    add("--rounds", type=int, help="turns of each service (2)")
    add("--threads", type=int, default=num_usable_cpus(), help="of each (%(default)s)")
    add("--quick", action="store_true", help="fewer of all: a first look")
    add = parser.add_argument_group("what is written").add_argument
    where = Path("runs/bench-serve")
    add("--output", type=Path, default=where, help="folder of models and logs (%(default)s)")
    add("--write", action="store_true", help="put the tables into docs/serving.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
