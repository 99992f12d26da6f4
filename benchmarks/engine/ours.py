"""The contestants of this package: a task and an engine over a bundle, and a scoring job.

Shape legend: B sequences, K labels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime.engine import Engine
from albert_serve.scoring.job import score_files
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions
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
        return [
            _in_order({score.label: score.score for score in answer}, self.labels)
            for answer in answers
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileScorer:
    """A classifier that scores a JSONL file, whose time includes reading and writing."""

    scorer: LocalScorer
    labels: Sequence[str]
    folder: Path

    def logits(self, batch: Batch) -> Floats:
        """Raise NotImplementedError, because a job reads only texts."""
        raise NotImplementedError

    def process(self, texts: Sequence[str], batch_size: int) -> list[list[float]]:
        """Return the probabilities of each text."""
        del batch_size
        inputs, output = self.folder / "texts.jsonl", self.folder / "scored.jsonl"
        lines = [json.dumps({"text": text}) for text in texts]
        inputs.write_text("\n".join(lines), encoding="utf-8")
        options = ScoreOptions(parameters={"top_k": None}, restart=True)
        score_files(self.scorer, [inputs], output, options)
        answers = map(json.loads, output.read_text(encoding="utf-8").splitlines())
        return [
            _in_order({score["label"]: score["score"] for score in answer["output"]}, self.labels)
            for answer in answers
        ]


def _in_order(scores: dict[str, float], labels: Sequence[str]) -> list[float]:
    return [scores[label] for label in labels]


def open_player(job: ModelJob) -> Player:
    """Open the bundle's task over its engine, or a scoring job over both."""
    bundle = Bundle.open(job.model)
    options = RuntimeOptions(
        num_threads=job.num_threads,
        device=job.device,
        cache_folder=job.model.absolute().parent / "packed",
    )
    labels = bundle.manifest.heads["text-classification"].labels or []
    if job.contestant.settings:
        scorer = LocalScorer.open(bundle, "text-classification", options)
        return _FileScorer(scorer=scorer, labels=labels, folder=job.model.parent)
    return _OurClassifier(
        engine=Engine.open(bundle, options),
        task=load_tasks(bundle)["text-classification"],
        labels=labels,
    )
