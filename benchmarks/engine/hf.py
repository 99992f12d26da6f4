"""Contestants with `transformers` in fp32, bf16 or fp16: eager, compiled, or as a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers

from benchmarks.engine.contestants import ModelJob
from benchmarks.engine.player import Batch, Floats, PaddedClassifier, Player
from training.system.precision import DTYPES

# Options to compile once for all shapes, or once per shape (on a GPU as a CUDA graph).
_COMPILED: Final[dict[str, dict[str, Any]]] = {
    "dynamic": {"dynamic": True},
    "static": {"mode": "reduce-overhead", "dynamic": False},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _PipelineClassifier:
    """A classifier that passes texts to a pipeline in their original order."""

    pipeline: Any
    max_tokens: int

    def logits(self, batch: Batch) -> Floats:
        """Raise NotImplementedError, because pipelines accept only texts."""
        raise NotImplementedError

    def process(self, texts: Sequence[str], batch_size: int) -> list[list[float]]:
        """Return the probabilities of each text."""
        labels = self.pipeline.model.config.label2id
        answers = self.pipeline(
            list(texts),
            batch_size=batch_size,
            top_k=None,
            truncation=True,
            max_length=self.max_tokens,
        )
        in_order = [sorted(answer, key=lambda score: labels[score["label"]]) for answer in answers]
        return [[score["score"] for score in answer] for answer in in_order]


def open_player(job: ModelJob) -> Player:
    """Open the model with the contestant's settings."""
    settings = job.contestant.settings
    torch.set_num_threads(job.num_threads)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        job.model,
        dtype=DTYPES.get(settings.get("dtype", ""), torch.float32),
    )
    model = model.eval().to(job.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.tokenizer.parent)
    if settings.get("pipeline") == "yes":
        make: Any = transformers.pipeline
        pipeline = make("text-classification", model=model, tokenizer=tokenizer, device=job.device)
        return _PipelineClassifier(pipeline=pipeline, max_tokens=job.max_tokens)
    compiled = settings.get("compile")
    call = torch.compile(model, **_COMPILED[compiled]) if compiled else model

    def encode(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer(texts, truncation=True, max_length=job.max_tokens)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def logits(batch: Batch) -> Floats:
        feed = {name: torch.from_numpy(array).to(job.device) for name, array in batch.items()}
        with torch.inference_mode():
            logits_BK: Floats = call(**feed).logits.float().cpu().numpy()
        return logits_BK

    return PaddedClassifier(encode=encode, run=lambda batches: [*map(logits, batches)])
