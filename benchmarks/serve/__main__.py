"""Throughput and latency of the service.

Serves one ALBERT with this package and with a BentoML service over pipelines of `transformers`
that is written as BentoML's documentation does it, batching on; in turns, each with all threads,
asked the same requests by a process of its own. Prints throughput and latency by number of
connections, throughput at the peer's p99, and latency when requests come at random times.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from albert_serve.bundle.manifest import TOKENIZER_FILE
from albert_serve.config import PRESETS, preset
from albert_serve.default_bundle import shipped_bundle
from albert_serve.settings import num_usable_cpus
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.checkpoint import make_checkpoint
from benchmarks.harness.load import ClosedLoop, LoadPattern, LoadPlan, LoadResult, OpenLoop, load
from benchmarks.harness.page import describe_machine, write_between, write_results
from benchmarks.harness.process import REPOSITORY
from benchmarks.harness.texts import WIKI
from benchmarks.serve.services import (
    TASKS,
    ServedModel,
    StreamItem,
    make_stream,
    our_service,
    peer_service,
)
from benchmarks.serve.tables import ARRIVAL_PART, ServedResult, ServeReport
from export.bundle import export_bundle
from training.errors import report_errors
from training.system.command_line import make_parser

_DOCS: Final = REPOSITORY / "docs" / "measurements.md"
_BEGIN: Final = "<!-- written by make bench-serve: begin -->"
_END: Final = "<!-- written by make bench-serve: end -->"
_PRECISIONS: Final = ("fp32", "int8")
# Untimed, when a service has started: BentoML's batching learns from the first 11 batches of each
# API, and makes them wait.
_WARM_UP: Final = ClosedLoop(num_connections=2)
_NUM_WARM_UP: Final = 32
_TIMEOUT_S: Final = 600.0
# Of each option: the default, and the value of --quick.
_AMOUNTS: Final[dict[str, tuple[Any, Any]]] = {
    "num_requests": (80, 24),
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


def _take_turns(
    results: Sequence[ServedResult],
    stream: Sequence[StreamItem],
    options: argparse.Namespace,
    bar: tqdm[Any],
) -> None:
    """Measure all services, the peer first; in each round in another order."""
    bar.reset(options.rounds * len(results) * (len(options.levels) + 1))
    rate_per_s = 0.0
    for number in range(options.rounds):
        first = number % len(results)
        for result in [*results[first:], *results[:first]]:
            service = result.service
            requests = [service.request(item) for item in stream]
            with service.running(options.output / service.name.replace(" ", "-")) as port:
                _send(port, [*islice(cycle(requests), _NUM_WARM_UP)], _WARM_UP)
                for level in options.levels:
                    bar.set_postfix_str(f"{service.name}: {level} connections")
                    pattern = ClosedLoop(num_connections=level, duration_s=options.level_time)
                    result.levels.setdefault(level, []).append(_send(port, requests, pattern))
                    bar.update()
                # All services get the first one's rate.
                rate_per_s = rate_per_s or ARRIVAL_PART * max(map(result.per_s, options.levels))
                bar.set_postfix_str(f"{service.name}: {rate_per_s:.1f} requests/s")
                arrivals = _send(port, requests, OpenLoop(rate_per_s=rate_per_s))
                result.arrivals.append(arrivals)
                bar.update()


def _send(port: int, requests: Sequence[bytes], pattern: LoadPattern) -> LoadResult:
    return load(LoadPlan(port=port, requests=requests, pattern=pattern, timeout_s=_TIMEOUT_S))


def _run(options: argparse.Namespace) -> int:
    report = _measure(options)
    tables = report.markdown()
    print(tables)
    write_results(options.output, report, tables)
    if options.write:
        write_between(_DOCS, _BEGIN, _END, tables)
    return 0


def _measure(options: argparse.Namespace) -> ServeReport:
    folder: Path = options.output
    today = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    machine = [*describe_machine(options.threads), today]
    num_pieces = AlbertTokenizer.from_file(shipped_bundle() / TOKENIZER_FILE).vocab_size
    config = preset(options.preset, vocab_size=num_pieces)
    checkpoint = make_checkpoint(config, folder / "checkpoint", *TASKS)
    stream = make_stream(checkpoint, options.texts, options.num_requests)
    services = [peer_service(checkpoint, options.threads), *_our_services(checkpoint, options)]
    results = [ServedResult(service=service) for service in services]
    bar: tqdm[Any]
    with tqdm(disable=None, unit="load") as bar:
        _take_turns(results, stream, options, bar)
    return ServeReport(
        machine=[
            *machine,
            f"{options.preset}, random weights, the vocabulary of the shipped model",
        ],
        stream=stream,
        results=results,
    )


def _our_services(checkpoint: Path, options: argparse.Namespace) -> Iterator[ServedModel]:
    for precision in options.precisions:
        target = options.output / f"bundle-{precision}"
        # The weights are random, so int8's cost in quality says nothing here.
        exported = export_bundle(checkpoint, target, precision=precision, overwrite=True)
        yield our_service(f"ours {precision}", exported.bundle.folder, options.threads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    for name, values in _AMOUNTS.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.serve", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="base", help="sizes (%(default)s)")
    add("--precisions", nargs="+", choices=_PRECISIONS, default=_PRECISIONS, help="of ours (all)")
    texts_help = "text, or JSONL with a field `text`, perhaps compressed (a few articles)"
    add("--texts", nargs="+", type=Path, metavar="FILE", default=[WIKI], help=texts_help)
    add("--num-requests", type=int, help="of a pass (80)")
    add("--levels", nargs="+", type=int, metavar="N", help="connections (1 2 4 ... 64)")
    add("--level-time", type=float, help="seconds in which passes at a level begin (3)")
    add("--rounds", type=int, help="turns of each service (2)")
    add("--threads", type=int, default=num_usable_cpus(), help="of each (%(default)s)")
    add("--quick", action="store_true", help="fewer of all: a first look")
    where = Path("runs/bench-serve")
    add("--output", type=Path, default=where, help="folder of models and logs (%(default)s)")
    add("--write", action="store_true", help="put the tables into docs/measurements.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
