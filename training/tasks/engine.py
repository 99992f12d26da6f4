"""A model in memory as an engine, and the predictions of any engine on items of its tasks.

The engine in torch is that of evaluation, and the reference for a bundle's.
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

_TOKENS_A_BATCH: Final = 8192
# Tokens whose logits are held in memory together.
_TOKENS_AT_ONCE: Final = 8 * _TOKENS_A_BATCH
# Items between two looks at whether to stop.
_ANSWERED_TOGETHER: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineItem:
    """Inputs that are scored together.

    Attributes:
        read: the predictions that its logits are, one (R, K) array an input.
        rights: what they are marked by, one for each; None where that is not known.
    """

    inputs: list[EncoderInput]
    read: Callable[[list[Logits]], list[Any]]
    rights: list[Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens over all inputs."""
        return sum(len(encoded.ids) for encoded in self.inputs)


def predict(runner: Runner, items: Sequence[EngineItem], title: str) -> list[Any]:
    """Return the predictions of all items, in order; items of similar lengths run together."""
    lengths = [item.num_tokens for item in items]
    predictions: list[list[Any]] = [[]] * len(items)
    with progress_bar(title=title, total=sum(lengths), unit="tokens", unit_scale=True) as bar:
        for indices in group_by_length(lengths, _TOKENS_AT_ONCE):
            chunk = [items[index] for index in indices]
            logits = iter(runner.run([encoded for item in chunk for encoded in item.inputs]))
            for index, item in zip(indices, chunk, strict=True):
                predictions[index] = item.read(list(islice(logits, len(item.inputs))))
            bar.update(sum(item.num_tokens for item in chunk))
    return [prediction for batch in predictions for prediction in batch]


class TorchEngine:
    """Counterpart of `albert_serve.runtime.engine.Engine` on a model in memory, in fp32.

    Inputs are sorted by length into batches of at most `max_batch_tokens` tokens.
    """

    def __init__(self, model: AlbertForTasks, *, max_batch_tokens: int = _TOKENS_A_BATCH) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._model = model.eval()
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Return the logits (R, K) of each input, in their order."""
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
    """Held-out items of a task, which a model in training answers like the service.

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
        """Return the answers to a part of the items; None if `should_stop` interrupted it."""
        items, engine, answers = self.items[part], TorchEngine(model), list[Any]()
        for begin in range(0, len(items), _ANSWERED_TOGETHER):
            if should_stop():
                return None
            answers += self.predict(engine, items[begin : begin + _ANSWERED_TOGETHER])
        return answers
