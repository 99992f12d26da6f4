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
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.manifest import Bundle
from albert_serve.config import PRESETS
from albert_serve.errors import InvalidInputError
from albert_serve.runtime.engine import Engine
from albert_serve.scoring.job import ScoreOptions, score_files
from albert_serve.scoring.local import LocalScorer
from albert_serve.settings import RuntimeOptions, num_usable_cpus
from albert_serve.tasks.load import load_tasks
from benchmarks.engines import models
from benchmarks.engines.jobs import CONTESTANTS, Job
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.subprocess_call import run_in_process
from benchmarks.harness.tables import bullets, table
from training.data.corpus import read_documents
from training.errors import report_errors
from training.run.options import parse_count
from training.system.command_line import make_parser

_REPOSITORY: Final = Path(__file__).parents[1]
_TASK: Final = "text-classification"
_MAX_TOKENS: Final = 512
_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32)
_ENGINE_WINDOW: Final = 1024
_PRECISIONS: Final = ("fp32", "int8")
_PARAMETERS: Final = {"truncation": True}
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.score --texts imdb/test.jsonl.xz
  python -m benchmarks.score --texts imdb/test.jsonl.xz --num-texts 500 --num-peer-texts 64

Nothing else should run on the machine meanwhile.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What one process measures.

    Attributes:
        model: the folder of a bundle, or of a checkpoint for `transformers`.
        texts: JSONL, one `{"text"}` a line.
    """

    name: str
    model: Path
    texts: Path
    num_threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The speed of a process; `note` has what else there is to know."""

    name: str
    num_texts: int
    num_tokens: int
    duration_s: float
    note: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.duration_s


def _options(subject: Subject) -> RuntimeOptions:
    return RuntimeOptions(device="cpu", num_threads=subject.num_threads)


def _read(file: Path) -> list[str]:
    return list(read_documents([file]))


def measure_job(subject: Subject) -> Speed:
    """Measure a job, from its file to its file."""
    scorer = LocalScorer.open(subject.model, _TASK, _options(subject))
    output = subject.texts.with_name(f"{subject.name}.jsonl")
    began_s = time.perf_counter()
    options = ScoreOptions(parameters=_PARAMETERS, keep=[], restart=True)
    summary = score_files(scorer, [subject.texts], output, options)
    duration_s = time.perf_counter() - began_s
    if summary.num_errors:
        raise InvalidInputError(f"{summary.num_errors} errors; the first: {summary.first_error}")
    return Speed(
        name=subject.name,
        num_texts=summary.num_rows,
        num_tokens=summary.counts.num_tokens,
        duration_s=duration_s,
        note=f"{summary.counts.num_duplicates} like an earlier one",
    )


def measure_engine(subject: Subject) -> Speed:
    """Measure the engine on inputs that are tokenised before."""
    bundle = Bundle.open(subject.model)
    engine = Engine.open(bundle, _options(subject))
    task = load_tasks(bundle)[_TASK]
    parameters = TextClassificationParameters(truncation="truncate")
    texts = _read(subject.texts)
    num_tokens, duration_s = 0, 0.0
    for start in range(0, len(texts), _ENGINE_WINDOW):
        window = texts[start : start + _ENGINE_WINDOW]
        inputs = [one for text in window for one in task.prepare(text, parameters).inputs]
        began_s = time.perf_counter()
        engine.run(inputs)
        duration_s += time.perf_counter() - began_s
        num_tokens += sum(len(one.ids) for one in inputs)
    return Speed(
        name=subject.name, num_texts=len(texts), num_tokens=num_tokens, duration_s=duration_s
    )


def measure_peer(subject: Subject) -> Speed:
    """Measure `transformers` on texts in the order of length; return its best batch size."""
    from benchmarks.engines.hf import open_player

    is_pipeline = subject.name.startswith("pipeline")
    key = "pipeline-1" if is_pipeline else "transformers-bf16"
    variants = {variant.name: variant for variant in CONTESTANTS[key].variants}
    job = Job(
        contestant=subject.name,
        variant=variants["" if is_pipeline else "autocast"],
        task=_TASK,
        model=subject.model,
        tokenizer=subject.model / models.TOKENIZER_FILE,
        inputs=subject.texts,
        num_threads=subject.num_threads,
        max_tokens=_MAX_TOKENS,
    )
    player = open_player(job)
    texts = sorted(_read(subject.texts), key=len)
    player.process(texts[:4], 1)
    speeds = []
    for batch_size in _BATCH_SIZES:
        began_s = time.perf_counter()
        result = player.process(texts, batch_size)
        duration_s = time.perf_counter() - began_s
        speeds.append(
            Speed(
                name=subject.name,
                num_texts=len(texts),
                num_tokens=result.count().num_real,
                duration_s=duration_s,
                note=f"batch {batch_size}",
            )
        )
    return max(speeds, key=lambda speed: speed.tokens_per_s)


def _make_models(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Make a checkpoint at random, and its bundles."""
    made: dict[str, Path] = {}
    for form in ("checkpoint", *(f"bundle-{precision}" for precision in _PRECISIONS)):
        plan = models.Plan(
            form=form,
            task=_TASK,
            source=made.get("checkpoint"),
            preset=options.preset,
            tokenizer=options.tokenizer,
            inputs=folder / "inputs",
            target=folder / form,
            max_tokens=_MAX_TOKENS,
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
    texts = _read(options.texts)[: options.num_texts]
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
