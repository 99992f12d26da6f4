"""A process that runs `transformers`: eager or compiled, in fp32 or bf16, or its pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks.engine.contestants import ModelJob
from benchmarks.engine.player import (
    Batch,
    Floats,
    PaddedClassifier,
    Player,
    StreamResult,
    Tokens,
    play,
)
from benchmarks.harness.process import Channel


@dataclass(frozen=True, kw_only=True, slots=True)
class HfModel:
    """A classifier of `transformers`, called with padded batches.

    Attributes:
        call: the model, compiled or not.
        precision: makes the context that it is called in.
    """

    call: Callable[..., Any]
    precision: Callable[[], AbstractContextManager[Any]]

    def run(self, batches: Sequence[Batch]) -> list[Floats]:
        """Logits (B, K) of each batch, one after another."""
        return [self._logits(batch) for batch in batches]

    def _logits(self, batch: Batch) -> Floats:
        feed = {name: torch.from_numpy(array) for name, array in batch.feed().items()}
        with torch.inference_mode(), self.precision():
            logits_BK: Floats = self.call(**feed).logits.float().numpy()
        return logits_BK


@dataclass(frozen=True, kw_only=True, slots=True)
class HfPipeline:
    """Classifies with a pipeline."""

    pipeline: Any
    max_tokens: int

    def logits(self, batch: Batch) -> Floats:
        """A pipeline takes texts alone."""
        raise NotImplementedError

    def process(self, texts: Sequence[str], batch_size: int) -> StreamResult:
        """Probabilities of each text."""
        labels = self.pipeline.model.config.label2id
        answers = self.pipeline(
            list(texts),
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
        return StreamResult(outputs=outputs, count=lambda: self._count(texts, batch_size))

    def _count(self, texts: Sequence[str], batch_size: int) -> Tokens:
        encoded = self.pipeline.tokenizer(list(texts), truncation=True, max_length=self.max_tokens)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        starts = range(0, len(lengths), batch_size)
        in_order = [range(start, min(start + batch_size, len(lengths))) for start in starts]
        return Tokens.of(lengths, in_order)


def open_player(job: ModelJob) -> Player:
    """The model as the variant's settings want it."""
    settings = job.variant.settings
    torch.set_num_threads(job.num_threads)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        job.model,
        dtype=torch.bfloat16 if settings.get("dtype") == "bf16" else torch.float32,
        attn_implementation=settings.get("attention", "sdpa"),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.tokenizer.parent)
    if settings.get("pipeline") == "yes":
        pipeline: Any = transformers.pipeline(
            "text-classification", model=model, tokenizer=tokenizer, device="cpu"
        )
        return HfPipeline(pipeline=pipeline, max_tokens=job.max_tokens)
    model.eval()

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, truncation=True, max_length=job.max_tokens)[
            "input_ids"
        ]
        return ids

    call = torch.compile(model, dynamic=True) if job.variant.compiles else model
    precision = autocast if settings["dtype"] == "autocast" else contextlib.nullcontext
    return PaddedClassifier(encode=encode, run=HfModel(call=call, precision=precision).run)


def serve(channel: Channel, job: ModelJob) -> None:
    """Be the process of a job."""
    play(channel, job, open_player)
