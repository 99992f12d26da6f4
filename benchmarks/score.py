"""Batch scoring against the engine alone, and against pipelines of `transformers`.

Classifies texts with the job of `albert-serve score`, in fp32 and int8, and measures the same texts
with nothing but the engine, and a sample of them with `transformers`: its pipeline in fp32, and the
model in bf16 (autocast), each at its best batch size. Every measurement is in a process of its own,
one after another. Speeds are tokens a second, without padding, tokenisation included (but of the
engine alone). Prints the table and writes `results.json` into the output folder, and with `--write`
the table into docs/scoring.md. A sample is spread evenly over the texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from albert_serve.config import PRESETS
from albert_serve.settings import num_usable_cpus
from benchmarks.engines import models
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.subprocess_call import run_in_process
from benchmarks.harness.tables import bullets, table, write_between
from benchmarks.scoring.speeds import (
    BATCH_SIZES,
    MAX_TOKENS,
    TASK,
    Speed,
    Subject,
    measure_engine,
    measure_job,
    measure_peer,
    read_texts,
)
from training.errors import report_errors
from training.run.options import parse_count
from training.system.command_line import make_parser

_REPOSITORY: Final = Path(__file__).parents[1]
_PRECISIONS: Final = ("fp32", "int8")
_PEERS: Final = ("pipeline fp32", "bf16 autocast")
_HEADINGS: Final = (
    *("", "texts", "tokens/s", "x pipeline", "x bf16"),
    *("tokens/CPU s", "x pipeline", "x bf16"),
)
PAGE: Final = _REPOSITORY / "docs" / "scoring.md"
BEGIN: Final = "<!-- speed: python -m benchmarks.score --texts FILE --write -->"
END: Final = "<!-- end of speed -->"
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.score --texts imdb/test.jsonl.xz
  python -m benchmarks.score --texts imdb/test.jsonl.xz --num-texts 500 --num-peer-texts 64
  python -m benchmarks.score --texts imdb/test.jsonl.xz --write

Nothing else should run on the machine meanwhile.
"""


def _make_models(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Make a checkpoint at random, and its bundles; those of an earlier run are taken."""
    made: dict[str, Path] = {}
    for form in ("checkpoint", *(f"bundle-{precision}" for precision in _PRECISIONS)):
        plan = models.Plan(
            form=form,
            task=TASK,
            source=made.get("checkpoint"),
            preset=options.preset,
            tokenizer=options.tokenizer,
            inputs=folder / "inputs",
            target=folder / f"{options.preset}-{form}",
            max_tokens=MAX_TOKENS,
            num_threads=options.threads,
        )
        if not (plan.target / "model.safetensors").exists():
            models.make(plan, folder / f"{form}.log")
        made[form] = plan.target
    return made


def _write(texts: Sequence[str], file: Path) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    machine = list(describe_machine(options.threads))
    texts = read_texts(options.texts)
    num_all = len(texts)
    texts = spread(texts, options.num_texts or num_all)
    every = _write(texts, folder / "texts.jsonl")
    sample = _write(spread(texts, options.num_peer_texts), folder / "sample.jsonl")
    made = _make_models(options, folder)

    def measure(name: str, form: str, file: Path) -> Speed:
        function = {"job": measure_job, "engine": measure_engine}.get(
            name.partition(" ")[0], measure_peer
        )
        subject = Subject(
            name=name,
            model=made[form],
            texts=file,
            num_threads=options.threads,
            batch_sizes=options.batch_sizes,
        )
        speed = run_in_process(function, subject)
        print(f"{name}: {speed.tokens_per_s:.0f} tokens/s", flush=True)
        return speed

    speeds = [measure(peer, "checkpoint", sample) for peer in _PEERS]
    for precision in _PRECISIONS:
        speeds.append(measure(f"engine {precision}", f"bundle-{precision}", every))
        speeds.append(measure(f"job {precision}", f"bundle-{precision}", every))
    of_all = f"{len(texts)} of the {num_all} texts of {options.texts.name}"
    cut = f"{options.preset} with random weights, texts cut to {MAX_TOKENS} tokens"
    sizes = f"batch sizes of transformers: {', '.join(map(str, options.batch_sizes))}"
    text = report(speeds, [f"{of_all}; {cut}; {sizes}", *machine])
    print(f"\n{text}")
    content = {"speeds": [asdict(speed) for speed in speeds], "machine": machine}
    (folder / "results.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    if options.write:
        write_between(PAGE, BEGIN, END, text)
    return 0


def spread(texts: Sequence[str], count: int) -> list[str]:
    """Return so many of the texts, spread evenly over them; all if there are not more."""
    count = min(count, len(texts))
    return [texts[number * len(texts) // count] for number in range(count)]


def report(speeds: Sequence[Speed], notes: Sequence[str]) -> str:
    """Return the table of all speeds, and the notes, in Markdown."""
    named = {speed.name: speed for speed in speeds}
    peers = [named[name] for name in _PEERS]
    rows = [
        [
            f"{speed.name}, {speed.note}" if speed.note else speed.name,
            str(speed.num_texts),
            *_rates(speed.tokens_per_s, [peer.tokens_per_s for peer in peers]),
            *_rates(speed.tokens_per_cpu_s, [peer.tokens_per_cpu_s for peer in peers]),
        ]
        for speed in speeds
    ]
    shares = [
        f"{kind}: the job has {100 * job.tokens_per_s / engine.tokens_per_s:.1f}% of the engine's "
        f"throughput, {100 * job.tokens_per_cpu_s / engine.tokens_per_cpu_s:.1f}% by CPU time"
        for kind in _PRECISIONS
        for job, engine in [(named[f"job {kind}"], named[f"engine {kind}"])]
    ]
    return f"{table(_HEADINGS, rows)}\n\n{bullets([*shares, *notes])}\n"


def _rates(rate: float, of_peers: Sequence[float]) -> list[str]:
    return [f"{rate:.0f}", *(f"{rate / other:.2f}" for other in of_peers)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.score", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--texts", type=Path, required=True, help="JSONL with a `text`, or text; compressed or not")
    add("--num-texts", type=parse_count, help="a sample of so many (all)")
    add("--num-peer-texts", type=parse_count, default=96, help="of transformers (%(default)s)")
    add(
        "--batch-sizes",
        type=parse_count,
        nargs="+",
        default=list(BATCH_SIZES),
        help="of transformers, of which the best counts (%(default)s)",
    )
    add("--preset", choices=list(PRESETS), default="base", help="sizes (%(default)s)")
    add(
        "--tokenizer",
        type=Path,
        default=_REPOSITORY / "models" / "albert-small-en" / "tokenizer.json",
        help="(the shipped model's)",
    )
    add("--threads", type=int, default=num_usable_cpus(), help="(%(default)s)")
    add("--output", type=Path, default=Path("runs/bench-score"), help="(%(default)s)")
    add("--write", action="store_true", help=f"put the table into {PAGE.name}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
