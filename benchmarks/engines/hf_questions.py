"""Extractive question answering as the example of `transformers` does it (`run_qa.py`).

Version 5 has no pipeline for it. A context is read in overlapping windows; the answer is the span
with the largest sum of start and end logit over all windows, looked for among the best starts and
ends of each.

Shape legend: B windows, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.engines.inputs import Batch, Floats, LoadResult, Tokens, group, in_order, pad

MAX_SEQUENCE: Final = 384
MAX_ANSWER_TOKENS: Final = 30
_NUM_BEST: Final = 20
_OVERLAP: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of a window with its question, and those that neighbouring windows share."""

    sequence: int
    overlap: int

    @classmethod
    def fitting(cls, max_tokens: int) -> Lengths:
        """The example's, or less where the model has fewer positions."""
        sequence = min(max_tokens, MAX_SEQUENCE)
        return cls(sequence=sequence, overlap=min(_OVERLAP, sequence // 4))


@dataclass(frozen=True, kw_only=True, slots=True)
class HfAnswerer:
    """Answers questions.

    Attributes:
        spans: logits of starts and ends (B, S) of a batch of windows.
        pads_fully: whether every window is padded to the longest that there can be, in the
            questions' order, as the example does; or to the longest of a batch of like lengths.
    """

    tokenizer: Any
    spans: Callable[[Batch], tuple[Floats, Floats]]
    max_tokens: int
    pads_fully: bool

    def process(self, items: Sequence[Mapping[str, str]], batch_size: int) -> LoadResult:
        """The text of the answer to each question."""
        windows = self._windows(items)
        sizes = [len(ids) for ids in windows["input_ids"]]
        batches = in_order(len(sizes), batch_size) if self.pads_fully else group(sizes, batch_size)
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(items)
        for members in batches:
            starts, ends = self.spans(_batch(windows, members))
            for row, window in enumerate(members):
                item = windows["overflow_to_sample_mapping"][window]
                answer = _best_span(
                    starts[row], ends[row], _context_offsets(windows, window), items[item]
                )
                best[item] = max(best[item], answer, key=lambda one: one[0])
        return LoadResult(
            outputs=[text for _, text in best],
            count=lambda: Tokens(
                num_real=sum(map(sum, windows["attention_mask"])),
                num_computed=Tokens.of(sizes, batches).num_computed,
            ),
        )

    def _windows(self, items: Sequence[Mapping[str, str]]) -> Any:
        lengths = Lengths.fitting(self.max_tokens)
        return self.tokenizer(
            [item["question"] for item in items],
            [item["context"] for item in items],
            truncation="only_second",
            max_length=lengths.sequence,
            stride=lengths.overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
            padding="max_length" if self.pads_fully else False,
        )


def _batch(windows: Any, members: Sequence[int]) -> Batch:
    batch = pad(
        [windows["input_ids"][i] for i in members], [windows["token_type_ids"][i] for i in members]
    )
    for row, i in enumerate(members):
        mask = windows["attention_mask"][i]
        batch.mask[row, : len(mask)] = mask
    return batch


def _context_offsets(windows: Any, window: int) -> list[tuple[int, int] | None]:
    """Characters of each token of the context; None for all other tokens."""
    segments = windows.sequence_ids(window)
    offsets = windows["offset_mapping"][window]
    return [
        characters if segment == 1 else None
        for characters, segment in zip(offsets, segments, strict=True)
    ]


def _best_span(
    starts_S: Floats,
    ends_S: Floats,
    offsets: Sequence[tuple[int, int] | None],
    item: Mapping[str, str],
) -> tuple[float, str]:
    """Score and text of a window's best span."""
    best, answer = -np.inf, ""
    for start in np.argsort(starts_S)[: -_NUM_BEST - 1 : -1].tolist():
        for end in np.argsort(ends_S)[: -_NUM_BEST - 1 : -1].tolist():
            if not start <= end < min(start + MAX_ANSWER_TOKENS, len(offsets)):
                continue
            first, last = offsets[start], offsets[end]
            score = float(starts_S[start] + ends_S[end])
            if first is not None and last is not None and score > best:
                best, answer = score, item["context"][first[0] : last[1]].strip()
    return best, answer
