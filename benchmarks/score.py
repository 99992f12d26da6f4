"""Batch scoring against the engine alone, and against pipelines of `transformers`.

Classifies texts with the job of `albert-serve score`, in fp32 and int8, and measures the same texts
with nothing but the engine, and a sample of them with `transformers`: its pipeline in fp32, and the
model in bf16 (autocast), each at its best batch size. Every measurement is in a process of its own,
one after another. Speeds are tokens a second, without padding, tokenisation included (but of the
engine alone). Prints the table and writes `results.json` into the output folder.
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
from benchmarks.harness.tables import bullets, table
from benchmarks.scoring.speeds import (
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
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.score --texts imdb/test.jsonl.xz
  python -m benchmarks.score --texts imdb/test.jsonl.xz --num-texts 500 --num-peer-texts 64

Nothing else should run on the machine meanwhile.
"""


def _make_models(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Make a checkpoint at random, and its bundles."""
    made: dict[str, Path] = {}
    for form in ("checkpoint", *(f"bundle-{precision}" for precision in _PRECISIONS)):
        plan = models.Plan(
            form=form,
            task=TASK,
            source=made.get("checkpoint"),
            preset=options.preset,
            tokenizer=options.tokenizer,
            inputs=folder / "inputs",
            target=folder / form,
            max_tokens=MAX_TOKENS,
            num_threads=options.threads,
        )
        models.make(plan, folder / f"{form}.log")
        made[form] = plan.target
    return made


def _write(texts: Sequence[str], file: Path) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    texts = read_texts(options.texts)[: options.num_texts]
    step = max(1, len(texts) // options.num_peer_texts)
    every = _write(texts, folder / "texts.jsonl")
    sample = _write(texts[::step][: options.num_peer_texts], folder / "sample.jsonl")
    made = _make_models(options, folder)

    def measure(name: str, form: str, file: Path) -> Speed:
        function = {"job": measure_job, "engine": measure_engine}.get(
            name.partition(" ")[0], measure_peer
        )
        subject = Subject(name=name, model=made[form], texts=file, num_threads=options.threads)
        speed = run_in_process(function, subject)
        print(f"{name}: {speed.tokens_per_s:.0f} tokens/s", flush=True)
        return speed

    speeds = [
        measure("pipeline fp32", "checkpoint", sample),
        measure("bf16 autocast", "checkpoint", sample),
    ]
    for precision in _PRECISIONS:
        speeds.append(measure(f"engine {precision}", f"bundle-{precision}", every))
        speeds.append(measure(f"job {precision}", f"bundle-{precision}", every))
    _report(speeds, options)
    return 0


def _report(speeds: Sequence[Speed], options: argparse.Namespace) -> None:
    by_name = {speed.name: speed.tokens_per_s for speed in speeds}
    rows = [
        [
            speed.name,
            str(speed.num_texts),
            f"{speed.num_texts / speed.duration_s:.1f}",
            f"{speed.tokens_per_s:.0f}",
            f"{speed.tokens_per_s / by_name['pipeline fp32']:.2f}",
            f"{speed.tokens_per_s / by_name['bf16 autocast']:.2f}",
            speed.note,
        ]
        for speed in speeds
    ]
    headings = ["", "texts", "texts/s", "tokens/s", "x pipeline", "x bf16", ""]
    shares = [
        f"{kind}: the job has {by_name[f'job {kind}'] / by_name[f'engine {kind}']:.1%} of the "
        "engine's throughput"
        for kind in _PRECISIONS
    ]
    machine = list(describe_machine(options.threads))
    print(f"\n{table(headings, rows)}\n\n{bullets([*shares, *machine])}")
    content = {"speeds": [asdict(speed) for speed in speeds], "machine": machine}
    (options.output / "results.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.score", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--texts", type=Path, required=True, help="JSONL with a `text`, or text; compressed or not")
    add("--num-texts", type=parse_count, help="the first so many (all)")
    add("--num-peer-texts", type=parse_count, default=96, help="of transformers (%(default)s)")
    add("--preset", choices=list(PRESETS), default="base", help="sizes (%(default)s)")
    add(
        "--tokenizer",
        type=Path,
        default=_REPOSITORY / "models" / "albert-small-en" / "tokenizer.json",
        help="(the shipped model's)",
    )
    add("--threads", type=int, default=num_usable_cpus(), help="(%(default)s)")
    add("--output", type=Path, default=Path("runs/bench-score"), help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
