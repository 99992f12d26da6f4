"""A torch engine, and the predictions of any engine for the items of a task.

Evaluation uses the torch engine. Export compares a bundle's engine with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.progress import progress_bar
from albert_serve.tasks.base import EncoderInput, Logits, Runner, group_by_length
from training.data.batch import pad
from training.model.heads import AlbertForTasks, Task

_MAX_BATCH_TOKENS: Final = 8192
# Limits the memory that logits take.
_MAX_TOKENS_IN_MEMORY: Final = 8 * _MAX_BATCH_TOKENS
# Number of items in a batch. A run can stop only between batches.
_ANSWER_BATCH_SIZE: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineItem:
    """The model inputs of one item, such as a question.

    Attributes:
        decode: function that returns predictions from logits, an (R, K) array for each input.
        targets: correct predictions, or None if unknown.
    """

    inputs: list[EncoderInput]
    decode: Callable[[list[Logits]], list[Any]]
    targets: list[Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all inputs."""
        return sum(len(encoded.ids) for encoded in self.inputs)


def predict(runner: Runner, items: Sequence[EngineItem], title: str) -> list[Any]:
    """Return the predictions of all items, in order. Batches have items of similar lengths."""
    lengths = [item.num_tokens for item in items]
    predictions: list[list[Any]] = [[]] * len(items)
    with progress_bar(title=title, total=sum(lengths), unit="tokens", unit_scale=True) as bar:
        for indices in group_by_length(lengths, _MAX_TOKENS_IN_MEMORY):
            chunk = [items[index] for index in indices]
            logits = iter(runner.run([encoded for item in chunk for encoded in item.inputs]))
            for index, item in zip(indices, chunk, strict=True):
                predictions[index] = item.decode(list(islice(logits, len(item.inputs))))
            bar.update(sum(item.num_tokens for item in chunk))
    return [prediction for batch in predictions for prediction in batch]


class TorchEngine:
    """An engine that runs a model in memory, in fp32, like `albert_serve.runtime.engine.Engine`.

    Batches have inputs of similar lengths and at most `max_batch_tokens` tokens.
    """

    def __init__(self, model: AlbertForTasks, *, max_batch_tokens: int = _MAX_BATCH_TOKENS) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._model = model.eval()
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Return the logits (R, K) of each input, in order."""
        results: dict[int, Logits] = {}
        for batch in group_by_length([len(item.ids) for item in inputs], self.max_batch_tokens):
            results |= self._run_batch({index: inputs[index] for index in batch})
        return [results[index] for index in range(len(inputs))]

    def _run_batch(self, batch: dict[int, EncoderInput]) -> dict[int, Logits]:
        padded = pad([(encoded.ids, encoded.types) for encoded in batch.values()])
        hidden_BSH = self._model(padded.to(self._device))
        results: dict[int, Logits] = {}
        for (index, encoded), hidden_SH in zip(batch.items(), hidden_BSH, strict=True):
            rows = list(range(len(encoded.ids))) if encoded.rows is None else encoded.rows
            logits_RK = hidden_SH[rows]
            if encoded.task != FEATURE_EXTRACTION:
                logits_RK = self._model.logits(encoded.task, logits_RK)
            if encoded.reduction == "mean":
                logits_RK = logits_RK.mean(0, keepdim=True)
            results[index] = logits_RK.float().cpu().numpy()
        return results


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutItems:
    """Held-out items that a model in training answers as the service would.

    Attributes:
        predict: function that returns an engine's answers to items.
        compute_metrics: function that returns the metrics of all answers.
    """

    task: Task
    items: Sequence[EngineItem]
    predict: Callable[[Runner, Sequence[EngineItem]], Sequence[Any]]
    compute_metrics: Callable[[Sequence[Any]], dict[str, float]]

    def answer(
        self, model: AlbertForTasks, part: slice, *, should_stop: Callable[[], bool]
    ) -> list[Any] | None:
        """Answer a part of the items, or return None if `should_stop` is true between batches."""
        items, engine, answers = self.items[part], TorchEngine(model), list[Any]()
        for begin in range(0, len(items), _ANSWER_BATCH_SIZE):
            if should_stop():
                return None
            answers += self.predict(engine, items[begin : begin + _ANSWER_BATCH_SIZE])
        return answers
