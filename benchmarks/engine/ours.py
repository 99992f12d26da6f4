"""A process that runs this package: its task and its engine over a bundle.

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
from albert_serve.tasks import EncoderInput, Task
from albert_serve.tasks.grouping import group_by_length
from albert_serve.tasks.load import load_tasks
from benchmarks.engine.contestants import ModelJob
from benchmarks.engine.player import Batch, Floats, Player, Tokens, count_tokens, play
from benchmarks.harness.process import Channel


@dataclass(frozen=True, kw_only=True, slots=True)
class OurClassifier:
    """Classifies texts as the service does; the engine forms the batches.

    Attributes:
        labels: names, in the order of the head's outputs.
    """

    engine: Engine
    task: Task
    labels: Sequence[str]

    def logits(self, batch: Batch) -> Floats:
        """Logits (B, K) of a batch without padding."""
        inputs = [
            EncoderInput(ids=ids, types=[0] * len(ids), task="text-classification", rows=[0])
            for ids in batch["input_ids"].tolist()
        ]
        return np.concatenate(self.engine.run(inputs))

    def process(self, texts: Sequence[str], batch_size: int) -> list[list[float]]:
        """Return the probabilities of each text."""
        del batch_size
        prepared = self._prepare(texts)
        logits = iter(self.engine.run([one for item in prepared for one in item.inputs]))
        answers: list[Any] = [item.finish([next(logits) for _ in item.inputs]) for item in prepared]
        places = {label: index for index, label in enumerate(self.labels)}
        return [
            [each.score for each in sorted(answer, key=lambda one: places[one.label])]
            for answer in answers
        ]

    def tokens(self, texts: Sequence[str], batch_size: int) -> Tokens:
        """Count the tokens of a pass."""
        del batch_size
        lengths = [len(one.ids) for item in self._prepare(texts) for one in item.inputs]
        groups = group_by_length(
            lengths,
            self.engine.max_batch_tokens,
            max_padding_tokens=self.engine.call_cost_tokens,
        )
        return count_tokens(lengths, groups)

    def _prepare(self, texts: Sequence[str]) -> list[Any]:
        function = "softmax" if len(self.labels) > 1 else "sigmoid"
        parameters = TextClassificationParameters.model_validate(
            {"truncation": "truncate", "function_to_apply": function}
        )
        return [self.task.prepare(text, parameters) for text in texts]


def open_player(job: ModelJob) -> Player:
    """The bundle's task over its engine, as `albert-serve score` runs it."""
    bundle = Bundle.open(job.model)
    options = RuntimeOptions(
        num_threads=job.num_threads,
        device="cpu",
        prepack="cache",
        cache_folder=job.model.absolute().parent / "packed",
    )
    return OurClassifier(
        engine=Engine.open(bundle, options),
        task=load_tasks(bundle)["text-classification"],
        labels=bundle.manifest.tasks["text-classification"].labels or [],
    )


def serve(channel: Channel, job: ModelJob) -> None:
    """Be the process of a job."""
    play(channel, job, open_player)
