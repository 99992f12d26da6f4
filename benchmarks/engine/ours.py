"""The contestants of this package: a task and an engine over a bundle.

Shape legend: B sequences, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import EncoderInput, Task, load_tasks
from benchmarks.engine.contestants import ModelJob
from benchmarks.engine.player import Batch, Floats, Player


@dataclass(frozen=True, kw_only=True, slots=True)
class _OurClassifier:
    """A classifier that works like the service: the engine forms the batches."""

    engine: Engine
    task: Task
    labels: Sequence[str]  # in the order of the outputs

    def logits(self, batch: Batch) -> Floats:
        """Return the logits (B, K) of a batch without padding."""
        inputs = [
            EncoderInput(ids=ids, types=[0] * len(ids), task="text-classification", rows=[0])
            for ids in batch["input_ids"].tolist()
        ]
        return np.concatenate(self.engine.run(inputs))

    def process(self, texts: Sequence[str], batch_size: int) -> list[list[float]]:
        """Return the probabilities of each text."""
        del batch_size
        parameters = TextClassificationParameters(truncation="truncate")
        prepared: list[Any] = [self.task.prepare(text, parameters) for text in texts]
        logits = iter(
            self.engine.run([encoder_input for item in prepared for encoder_input in item.inputs])
        )
        answers = [item.finish([next(logits) for _ in item.inputs]) for item in prepared]
        indices = {label: index for index, label in enumerate(self.labels)}
        return [
            [score.score for score in sorted(answer, key=lambda score: indices[score.label])]
            for answer in answers
        ]


def open_player(job: ModelJob) -> Player:
    """Open the bundle's task over its engine, as `albert-serve score` runs it."""
    bundle = Bundle.open(job.model)
    options = RuntimeOptions(
        num_threads=job.num_threads,
        device=job.device,
        cache_folder=job.model.absolute().parent / "packed",
    )
    return _OurClassifier(
        engine=Engine.open(bundle, options),
        task=load_tasks(bundle)["text-classification"],
        labels=bundle.manifest.heads["text-classification"].labels or [],
    )
