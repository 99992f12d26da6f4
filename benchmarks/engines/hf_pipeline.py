"""A process that runs `pipeline("text-classification")` as it comes, texts in their own order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks.engines.hf import load_tokenizer
from benchmarks.engines.jobs import Job
from benchmarks.engines.padded import Outcome, Tokens, in_order
from benchmarks.engines.turns import Player, serve


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Classifies with a pipeline."""

    pipeline: Any
    max_tokens: int

    def process(self, items: Sequence[str], batch_size: int) -> Outcome:
        """Probabilities of each text."""
        labels = self.pipeline.model.config.label2id
        answers = self.pipeline(
            list(items),
            batch_size=batch_size,
            top_k=None,
            function_to_apply="softmax" if len(labels) > 1 else "sigmoid",
            truncation=True,
            max_length=self.max_tokens,
        )
        outputs = [
            [
                score
                for _, score in sorted((labels[each["label"]], each["score"]) for each in answer)
            ]
            for answer in answers
        ]
        return Outcome(outputs=outputs, count=lambda: self._count(items, batch_size))

    def _count(self, items: Sequence[str], batch_size: int) -> Tokens:
        encoded = self.pipeline.tokenizer(list(items), truncation=True, max_length=self.max_tokens)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        return Tokens.of(lengths, in_order(len(items), batch_size))


def open_player(job: Job) -> Player:
    """The pipeline over the checkpoint."""
    torch.set_num_threads(job.num_threads)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        job.model, dtype=torch.float32
    )
    pipeline = transformers.pipeline(
        "text-classification", model=model, tokenizer=load_tokenizer(job), device="cpu"
    )
    return Pipeline(pipeline=pipeline, max_tokens=job.max_tokens)


if __name__ == "__main__":
    serve(open_player)
