"""A day of mixed traffic on a service in a fraction of the time: memory stays flat, or does not.

The rate of requests rises and falls as over a day. Requests are the API document's examples of
every task of the model, and lists of 1 to 64 real texts. Memory is the sum over the service's
processes of their proportional set size, in which shared pages count once. Writes `soak.csv` and
`soak.png` into the output folder.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from tokenizers import Tokenizer
from tqdm import tqdm

from albert_serve.api.examples import EXAMPLES
from albert_serve.bundle.manifest import TOKENIZER_FILE, Bundle
from albert_serve.default_bundle import shipped_bundle
from albert_serve.tasks.load import task_names
from benchmarks.harness.load import LoadPlan, OpenLoop, load, post_request
from benchmarks.harness.page import bullets, describe_machine
from benchmarks.harness.texts import WIKI, draw_texts
from benchmarks.serve.services import our_service
from training.errors import report_errors
from training.options.values import parse_duration
from training.system.command_line import make_parser

_DAY_HOURS: Final = 24
_NUM_PIECES: Final = 96  # of a day: quarters of an hour
_MOST_TEXTS: Final = 64
_NUM_TEXTS: Final = 512
_SEED: Final = 0
_EXAMPLES: Final = """examples:
  python -m benchmarks.soak --output runs/soak
  python -m benchmarks.soak --bundle bundles/mine --duration 2h --peak 50
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The memory of the service after a piece of the day."""

    hour: float
    num_requests: int
    num_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("python -m benchmarks.soak", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--bundle", type=Path, default=shipped_bundle(), help="(the default model)")
    add("--duration", type=parse_duration, default=1440.0, help="of the day (24m)")
    add("--peak", type=float, default=20.0, help="requests a second at noon (%(default)s)")
    add("--threads", type=int, default=1, help="of the service (%(default)s)")
    add("--output", type=Path, default=Path("runs/soak"), help="folder (%(default)s)")
    options = parser.parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    requests = _requests(Bundle.open(options.bundle))
    service = our_service("ours", options.bundle.resolve(), options.threads)
    statuses: Counter[int] = Counter()
    samples = []
    table = (options.output / "soak.csv").open("w", newline="", buffering=1)
    with table, service.running(options.output) as port:
        rows = csv.writer(table)
        rows.writerow(["hour", "requests", "bytes"])
        for sample in _day(port, requests, statuses, options):
            rows.writerow([sample.hour, sample.num_requests, sample.num_bytes])
            samples.append(sample)
    _draw(samples, options.output / "soak.png")
    print(bullets([*describe_machine(options.threads), *_summary(samples, statuses)]))
    return 0


def _requests(bundle: Bundle) -> list[bytes]:
    """Return the requests of a day in random order: half examples, half lists of texts."""
    draw = random.Random(_SEED)
    tasks = task_names(bundle.manifest)
    examples = [post_request(f"/{task}", each.body) for task in tasks for each in EXAMPLES[task]]
    tokenizer = Tokenizer.from_file(str(bundle.folder / TOKENIZER_FILE))
    most = bundle.config.max_positions
    texts = [text for text, _ in draw_texts([WIKI], tokenizer, _NUM_TEXTS, most)]
    lists = []
    for _ in examples * 4:
        # Short lists are frequent, long ones rare.
        num_texts = min(_MOST_TEXTS, int(draw.paretovariate(1)))
        body = {"inputs": draw.choices(texts, k=num_texts), "parameters": {"truncation": True}}
        task = draw.choice([task for task in tasks if task.startswith(("text-", "feature-"))])
        lists.append(post_request(f"/{task}", body))
    requests = [*examples * 4, *lists]
    draw.shuffle(requests)
    return requests


def _day(
    port: int, requests: list[bytes], statuses: Counter[int], options: argparse.Namespace
) -> Iterator[Sample]:
    processes = psutil.Process().children(recursive=True)
    piece_s, num_sent = options.duration / _NUM_PIECES, 0
    yield Sample(hour=0, num_requests=0, num_bytes=_memory(processes))
    for number in tqdm(range(_NUM_PIECES), disable=None, unit="quarter of an hour"):
        ends_s = time.monotonic() + piece_s
        rate_per_s = options.peak * (1 - 0.9 * math.cos(math.tau * number / _NUM_PIECES)) / 1.9
        count = max(1, round(rate_per_s * piece_s))
        piece = [requests[(num_sent + index) % len(requests)] for index in range(count)]
        sent = load(LoadPlan(port=port, requests=piece, pattern=OpenLoop(rate_per_s=rate_per_s)))
        statuses.update(reply.status for reply in sent.replies)
        num_sent += count
        time.sleep(max(0.0, ends_s - time.monotonic()))
        hour = _DAY_HOURS * (number + 1) / _NUM_PIECES
        yield Sample(hour=hour, num_requests=num_sent, num_bytes=_memory(processes))


def _memory(processes: Sequence[psutil.Process]) -> int:
    return sum(process.memory_full_info().pss for process in processes)


def _summary(samples: Sequence[Sample], statuses: Counter[int]) -> list[str]:
    def megabytes(hour: float) -> str:
        sample = min(samples, key=lambda sample: abs(sample.hour - hour))
        return f"{sample.num_bytes / 1e6:.0f} MB after {hour:g} h"

    replies = ", ".join(f"{count:,} of status {status}" for status, count in statuses.most_common())
    highest = max(sample.num_bytes for sample in samples)
    hours = (0, 1, 6, 12, 18, 24)
    return [
        f"replies: {replies}",
        f"memory: {', '.join(map(megabytes, hours))}; at most {highest / 1e6:.0f} MB",
    ]


def _draw(samples: Sequence[Sample], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.0), layout="constrained")
    ax = figure.add_subplot()
    hours = [sample.hour for sample in samples]
    ax.plot(hours, [sample.num_bytes / 1e6 for sample in samples])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("hour of the day")
    ax.set_ylabel("memory of the service, MB")
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
