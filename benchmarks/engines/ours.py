"""A process that runs this package: its tasks and its engine over a bundle.

Shape legend: B sequences, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from albert_serve.api.schemas import (
    QuestionAnsweringParameters,
    QuestionContext,
    TextClassificationParameters,
)
from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import AnyTask, EncoderInput, Prepared
from albert_serve.tasks.grouping import group_by_length
from albert_serve.tasks.load import load_tasks
from benchmarks.engines.hf_questions import MAX_ANSWER_TOKENS, Lengths
from benchmarks.engines.inputs import Batch, Floats, LoadResult, Tokens
from benchmarks.engines.jobs import Job
from benchmarks.engines.turns import Player, serve


def _run(engine: Engine, items: Sequence[Prepared[Any]]) -> tuple[list[Any], list[int]]:
    """The answer to each item, and the lengths of all inputs."""
    inputs = [encoder_input for item in items for encoder_input in item.inputs]
    logits = iter(engine.run(inputs))
    answers = [item.finish([next(logits) for _ in item.inputs]) for item in items]
    return answers, [len(encoder_input.ids) for encoder_input in inputs]


def _count(engine: Engine, lengths: Sequence[int]) -> Tokens:
    groups = group_by_length(
        lengths, engine.max_batch_tokens, max_padding_tokens=engine.call_cost_tokens
    )
    return Tokens.of(lengths, groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class OurClassifier:
    """Classifies texts as the service does; the engine forms the batches.

    Attributes:
        labels: names, in the order of the head's outputs.
    """

    engine: Engine
    task: AnyTask
    labels: Sequence[str]

    def logits(self, batch: Batch) -> Floats:
        """Logits (B, K) of a batch without padding."""
        inputs = [
            EncoderInput(ids=ids, types=types, task="text-classification", rows=[0])
            for ids, types in zip(batch.ids.tolist(), batch.types.tolist(), strict=True)
        ]
        return np.concatenate(self.engine.run(inputs))

    def process(self, items: Sequence[str], batch_size: int) -> LoadResult:
        """Probabilities of each text."""
        parameters = TextClassificationParameters(
            truncation="truncate",
            function_to_apply="softmax" if len(self.labels) > 1 else "sigmoid",
        )
        prepared = [self.task.prepare(text, parameters) for text in items]
        answers, lengths = _run(self.engine, prepared)
        places = {label: index for index, label in enumerate(self.labels)}
        outputs = [
            [each.score for each in sorted(answer, key=lambda one: places[one.label])]
            for answer in answers
        ]
        return LoadResult(outputs=outputs, count=lambda: _count(self.engine, lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class OurAnswerer:
    """Answers questions as the service does; the engine forms the batches of windows."""

    engine: Engine
    task: AnyTask
    max_tokens: int

    def process(self, items: Sequence[Mapping[str, str]], batch_size: int) -> LoadResult:
        """The text of the answer to each question."""
        lengths = Lengths.fitting(self.max_tokens)
        parameters = QuestionAnsweringParameters(
            max_seq_len=lengths.sequence,
            doc_stride=lengths.overlap,
            max_answer_len=MAX_ANSWER_TOKENS,
            align_to_words=False,
        )
        prepared = [self.task.prepare(QuestionContext(**item), parameters) for item in items]
        answers, sizes = _run(self.engine, prepared)
        outputs = [answer.answer for answer in answers]
        return LoadResult(outputs=outputs, count=lambda: _count(self.engine, sizes))


def open_player(job: Job) -> Player:
    """The bundle's task over its engine."""
    bundle = Bundle.open(job.model)
    # As `albert-serve score` runs it.
    options = RuntimeOptions(
        num_threads=job.num_threads,
        device="cpu",
        prepack="cache",
        cache_folder=job.model.absolute().parent / "packed",
    )
    engine = Engine.open(bundle, options)
    task = load_tasks(bundle)[job.task]
    if job.task == "question-answering":
        return OurAnswerer(engine=engine, task=task, max_tokens=job.max_tokens)
    labels = bundle.manifest.tasks["text-classification"].labels or []
    return OurClassifier(engine=engine, task=task, labels=labels)


if __name__ == "__main__":
    serve(open_player)
