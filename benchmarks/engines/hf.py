"""A process that runs `transformers`: eager or compiled, in fp32 or bf16, or its pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers

from benchmarks.engines.hf_questions import HfAnswerer
from benchmarks.engines.inputs import (
    Batch,
    Encode,
    Floats,
    LoadResult,
    PaddedClassifier,
    Tokens,
    in_order,
)
from benchmarks.engines.jobs import Job
from benchmarks.engines.turns import Player, serve

_CLASSES: Final[dict[str, Any]] = {
    "text-classification": transformers.AutoModelForSequenceClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HfModel:
    """A model of `transformers`, called with padded batches.

    Attributes:
        call: the model, compiled or not.
        precision: makes the context that it is called in.
    """

    call: Callable[..., Any]
    precision: Callable[[], AbstractContextManager[Any]]

    def outputs(self, batch: Batch) -> Any:
        """The model's outputs for a batch."""
        feed = {name: torch.from_numpy(array) for name, array in batch.feed().items()}
        with torch.inference_mode(), self.precision():
            return self.call(**feed)

    def logits(self, batches: Sequence[Batch]) -> list[Floats]:
        """Logits (B, K) of each batch, one after another."""
        return [self.outputs(batch).logits.float().numpy() for batch in batches]

    def spans(self, batch: Batch) -> tuple[Floats, Floats]:
        """Logits of starts and ends, both (B, S)."""
        outputs = self.outputs(batch)
        return outputs.start_logits.float().numpy(), outputs.end_logits.float().numpy()


def load_model(job: Job) -> HfModel:
    """The model as the variant's settings want it."""
    settings = job.variant.settings
    dtype = torch.bfloat16 if settings["dtype"] == "bf16" else torch.float32
    model = _CLASSES[job.task].from_pretrained(
        job.model, dtype=dtype, attn_implementation=settings.get("attention", "sdpa")
    )
    model.eval()
    compiled = settings.get("compile") == "yes"
    return HfModel(
        call=torch.compile(model, dynamic=True) if compiled else model,
        precision=_precision(settings),
    )


def load_tokenizer(job: Job) -> Any:
    """The tokenizer of `transformers`."""
    return transformers.AutoTokenizer.from_pretrained(job.tokenizer.parent)


def _precision(settings: Mapping[str, str]) -> Callable[[], AbstractContextManager[Any]]:
    if settings["dtype"] == "autocast":
        return lambda: torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext


def _encoder(tokenizer: Any, max_tokens: int) -> Encode:
    def encode(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer(texts, truncation=True, max_length=max_tokens)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    return encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Classifies with a pipeline."""

    pipeline: Any
    max_tokens: int

    def process(self, items: Sequence[str], batch_size: int) -> LoadResult:
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
        return LoadResult(outputs=outputs, count=lambda: self._count(items, batch_size))

    def _count(self, items: Sequence[str], batch_size: int) -> Tokens:
        encoded = self.pipeline.tokenizer(list(items), truncation=True, max_length=self.max_tokens)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        return Tokens.of(lengths, in_order(len(items), batch_size))


def _open_pipeline(job: Job) -> Player:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        job.model, dtype=torch.float32
    )
    pipeline = transformers.pipeline(
        "text-classification", model=model, tokenizer=load_tokenizer(job), device="cpu"
    )
    return Pipeline(pipeline=pipeline, max_tokens=job.max_tokens)


def open_player(job: Job) -> Player:
    """Either task, as the variant's settings want it."""
    torch.set_num_threads(job.num_threads)
    if job.variant.settings.get("pipeline") == "yes":
        return _open_pipeline(job)
    model, tokenizer = load_model(job), load_tokenizer(job)
    if job.task == "text-classification":
        return PaddedClassifier(encode=_encoder(tokenizer, job.max_tokens), run=model.logits)
    return HfAnswerer(
        tokenizer=tokenizer,
        spans=model.spans,
        max_tokens=job.max_tokens,
        pads_fully=job.variant.settings.get("padding") == "full",
    )


if __name__ == "__main__":
    serve(open_player)
