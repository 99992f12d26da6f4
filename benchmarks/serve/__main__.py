"""Throughput and latency of the service.

Serves one ALBERT with this package and with a peer: `transformers` pipelines in a BentoML service
that follows BentoML's guide to adaptive batching. The services take turns, each with all threads.
Another process sends the same requests to each service. Prints throughput and latency by number of
connections, and each service's best throughput with a p99 latency of at most the peer's. The peer's
p99 is measured at the fewest connections that reach 95 % of its best throughput.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from tqdm.auto import tqdm

from albert_serve.bundle.manifest import TOKENIZER_FILE
from albert_serve.config import PRESETS, preset
from albert_serve.settings import num_usable_cpus, shipped_bundle
from albert_serve.terminal import make_parser
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.checkpoint import make_checkpoint
from benchmarks.harness.page import describe_machine, write_results
from benchmarks.harness.texts import WIKI
from benchmarks.serve.load import LoadPlan, load
from benchmarks.serve.services import (
    TASKS,
    ServedModel,
    StreamItem,
    make_stream,
    our_service,
    peer_service,
)
from benchmarks.serve.tables import ServedResult, ServeReport
from export.job import ExportConfig, export
from training.errors import report_errors

_PRECISIONS: Final = ("fp32", "int8")
# Number of untimed requests. BentoML delays the first 11 batches of each API, to learn from them.
_NUM_WARM_UP: Final = 32
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.serve
  python -m benchmarks.serve --texts imdb/test.jsonl.xz
  python -m benchmarks.serve --texts-per-request 16 --num-requests 10 --levels 1 2 4 8
  python -m benchmarks.serve --num-requests 24 --levels 1 8 --rounds 1 --level-time 0.5

Nothing else should run on the machine.
"""


def _run(options: argparse.Namespace) -> int:
    report = _measure(options)
    tables = report.markdown()
    print(tables)
    write_results(options.output, report, tables)
    return 0


def _measure(options: argparse.Namespace) -> ServeReport:
    folder: Path = options.output
    machine = [*describe_machine(options.threads)]
    num_pieces = AlbertTokenizer.from_file(shipped_bundle() / TOKENIZER_FILE).vocab_size
    config = preset(options.preset, vocab_size=num_pieces)
    checkpoint = make_checkpoint(config, folder / "checkpoint", *TASKS)
    stream = make_stream(checkpoint, options.texts, options.num_requests, options.texts_per_request)
    services = [peer_service(checkpoint, options.threads), *_our_services(checkpoint, options)]
    results = [ServedResult(service=service) for service in services]
    _take_turns(results, stream, options)
    today = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    model = f"{options.preset}, random weights, the vocabulary of the shipped model; {today}"
    return ServeReport(machine=[*machine, model], stream=stream, results=results)


def _our_services(checkpoint: Path, options: argparse.Namespace) -> Iterator[ServedModel]:
    for precision in options.precisions:
        target = options.output / f"bundle-{precision}"
        # The export measures no quality, because the weights are random.
        config = ExportConfig(
            checkpoint=checkpoint,
            bundle=target,
            precision=precision,
            quality=False,
            overwrite=True,
        )
        yield our_service(f"ours {precision}", export(config).bundle.folder, options.threads)


def _take_turns(
    results: Sequence[ServedResult], stream: Sequence[StreamItem], options: argparse.Namespace
) -> None:
    """Measure all services in turns, starting each round with a different service."""
    for number in range(options.rounds):
        first = number % len(results)
        for result in tqdm([*results[first:], *results[:first]], f"round {number}", disable=None):
            service = result.service
            requests = [service.request(item) for item in stream]
            with service.running(options.output / service.name.replace(" ", "-")) as port:
                warm_up = [*islice(cycle(requests), _NUM_WARM_UP)]
                load(LoadPlan(port=port, requests=warm_up, num_connections=2))
                for level in options.levels:
                    plan = LoadPlan(
                        port=port,
                        requests=requests,
                        num_connections=level,
                        duration_s=options.level_time,
                    )
                    result.levels.setdefault(level, []).append(load(plan))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.serve", __doc__, _EXAMPLES)
    add = parser.add_argument
    add(
        "--preset",
        choices=list(PRESETS),
        default="base",
        help="sizes of the model (default: %(default)s)",
    )
    add(
        "--precisions",
        nargs="+",
        choices=_PRECISIONS,
        default=_PRECISIONS,
        help="precisions (default: all)",
    )
    texts_help = "text, or JSONL with a field `text` (default: a few articles)"
    add("--texts", nargs="+", type=Path, metavar="FILE", default=[WIKI], help=texts_help)
    add("--num-requests", type=int, default=80, help="requests per pass (default: %(default)s)")
    add("--texts-per-request", type=int, default=1, help="texts per request (default: %(default)s)")
    levels = [1, 2, 4, 8, 16, 32, 64]
    add(
        "--levels",
        nargs="+",
        type=int,
        metavar="N",
        default=levels,
        help="numbers of connections (default: 1 to 64)",
    )
    add(
        "--level-time",
        type=float,
        default=3.0,
        help="seconds in which passes begin (default: %(default)s)",
    )
    add("--rounds", type=int, default=3, help="turns per service (default: %(default)s)")
    add(
        "--threads",
        type=int,
        default=num_usable_cpus(),
        help="threads of a service (default: %(default)s)",
    )
    where = Path("runs/bench-serve")
    add(
        "--output",
        type=Path,
        default=where,
        help="folder of models and logs (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
