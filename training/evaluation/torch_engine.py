"""Inference engine in torch: the reference of evaluation and of the export tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tasks.grouping import group_by_length
from training.data.batch import pad
from training.evaluation.predictions import Item, predict
from training.model.heads import AlbertForTasks

_TOKENS_A_BATCH: Final = 8192
_TOKENS_AT_ONCE: Final = 8 * _TOKENS_A_BATCH


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
            logits_RK = self._model.logits(encoded.task, hidden_SH[rows])
            results[index] = logits_RK.float().cpu().numpy()
        return results


def predict_in_torch(model: AlbertForTasks, items: Sequence[Item], title: str) -> list[Any]:
    """Return the predictions of all items, in order.

    Args:
        title: of the progress bar.
    """
    engine = TorchEngine(model)
    return predict(engine, items, max_tokens_at_once=_TOKENS_AT_ONCE, title=title)
