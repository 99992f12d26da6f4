"""Speeds of a batch job, of the engine alone, and of `transformers`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.manifest import Bundle
from albert_serve.errors import InvalidInputError
from albert_serve.runtime.engine import Engine
from albert_serve.scoring.job import score_files
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.load import load_tasks
from benchmarks.engines import models
from benchmarks.engines.jobs import CONTESTANTS, Job, TaskName
from training.data.corpus import read_documents

TASK: Final[TaskName] = "text-classification"
MAX_TOKENS: Final = 512
BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32)
_ENGINE_WINDOW: Final = 1024
_PARAMETERS: Final = {"truncation": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The measurement of one process.

    Attributes:
        model: the folder of a bundle, or of a checkpoint for `transformers`.
        texts: JSONL, one `{"text"}` a line.
        batch_sizes: those that `transformers` is measured with.
    """

    name: str
    model: Path
    texts: Path
    num_threads: int
    batch_sizes: Sequence[int] = BATCH_SIZES


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The speed of a process; `note` has what else there is to know."""

    name: str
    num_texts: int
    num_tokens: int
    duration_s: float
    cpu_s: float
    note: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.duration_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens by the processors' time, which other programs change little."""
        return self.num_tokens / self.cpu_s


@dataclass(kw_only=True, slots=True)
class _Clock:
    """The time of blocks, and the time of processors in them."""

    duration_s: float = 0.0
    cpu_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        yield
        self.duration_s += time.perf_counter() - began_s
        self.cpu_s += time.process_time() - cpu_began_s


def _options(subject: Subject) -> RuntimeOptions:
    return RuntimeOptions(device="cpu", num_threads=subject.num_threads)


def read_texts(file: Path) -> list[str]:
    """Return the texts of a file."""
    return list(read_documents([file]))


def measure_job(subject: Subject) -> Speed:
    """Measure a job, from its file to its file."""
    scorer = LocalScorer.open(subject.model, TASK, _options(subject))
    output = subject.texts.with_name(f"{subject.name}.jsonl")
    options = ScoreOptions(parameters=_PARAMETERS, keep=[], restart=True)
    clock = _Clock()
    with clock.running():
        summary = score_files(scorer, [subject.texts], output, options)
    if summary.num_errors:
        raise InvalidInputError(f"{summary.num_errors} errors; the first: {summary.first_error}")
    return Speed(
        name=subject.name,
        num_texts=summary.num_rows,
        num_tokens=summary.counts.num_tokens,
        duration_s=clock.duration_s,
        cpu_s=clock.cpu_s,
        note=f"{summary.counts.num_duplicates} like an earlier one",
    )


def measure_engine(subject: Subject) -> Speed:
    """Measure the engine on inputs that are tokenised before."""
    bundle = Bundle.open(subject.model)
    engine = Engine.open(bundle, _options(subject))
    task = load_tasks(bundle)[TASK]
    parameters = TextClassificationParameters(truncation="truncate")
    texts = read_texts(subject.texts)
    num_tokens, clock = 0, _Clock()
    for start in range(0, len(texts), _ENGINE_WINDOW):
        window = texts[start : start + _ENGINE_WINDOW]
        inputs = [one for text in window for one in task.prepare(text, parameters).inputs]
        with clock.running():
            engine.run(inputs)
        num_tokens += sum(len(one.ids) for one in inputs)
    return Speed(
        name=subject.name,
        num_texts=len(texts),
        num_tokens=num_tokens,
        duration_s=clock.duration_s,
        cpu_s=clock.cpu_s,
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
        task=TASK,
        model=subject.model,
        tokenizer=subject.model / models.TOKENIZER_FILE,
        inputs=subject.texts,
        num_threads=subject.num_threads,
        max_tokens=MAX_TOKENS,
    )
    player = open_player(job)
    texts = sorted(read_texts(subject.texts), key=len)
    player.process(texts[:4], 1)
    speeds = []
    for batch_size in subject.batch_sizes:
        clock = _Clock()
        with clock.running():
            result = player.process(texts, batch_size)
        speeds.append(
            Speed(
                name=subject.name,
                num_texts=len(texts),
                num_tokens=result.count().num_real,
                duration_s=clock.duration_s,
                cpu_s=clock.cpu_s,
                note=f"batch {batch_size}",
            )
        )
    return max(speeds, key=lambda speed: speed.tokens_per_s)
