"""The process of a contestant: it measures on request and sleeps in between.

Shape legend: B sequences, S positions, K labels.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import numpy as np
import psutil
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.engine.contestants import TEXTS, EngineTurn, ModelJob, parse_shape

Floats: TypeAlias = NDArray[np.float32]
# Arrays (B, S) of a padded batch, by their argument names in `transformers`.
Batch: TypeAlias = dict[str, NDArray[np.int64]]
Encode: TypeAlias = Callable[[list[str]], list[list[int]]]
RunBatches: TypeAlias = Callable[[Sequence[Batch]], list[Floats]]
_MIN_CALLS: Final = 2
_CLS_ID: Final = 2
_SEP_ID: Final = 3


class Player(Protocol):
    """A contestant whose model is open."""

    def process(self, texts: Sequence[str], batch_size: int) -> list[list[float]]:
        """Return the probabilities of each text, tokenisation included."""
        ...

    def logits(self, batch: Batch) -> Floats:
        """Return the logits (B, K) of a batch. Only cases of fixed shapes call this method."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedClassifier:
    """A classifier that pads batches of texts of similar length, longest first.

    Attributes:
        run: function that returns the logits (B, K) of each batch.
    """

    encode: Encode
    run: RunBatches

    def logits(self, batch: Batch) -> Floats:
        """Return the logits (B, K) of a batch."""
        return self.run([batch])[0]

    def process(self, texts: Sequence[str], batch_size: int) -> list[list[float]]:
        """Return the probabilities of each text."""
        sequences = self.encode(list(texts))
        order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
        groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        logits = self.run([pad([sequences[index] for index in members]) for members in groups])
        outputs: list[list[float]] = [[]] * len(texts)
        for members, logits_BK in zip(groups, logits, strict=True):
            for index, row in zip(members, _probabilities(logits_BK), strict=True):
                outputs[index] = row
        return outputs


def pad(sequences: Sequence[Sequence[int]]) -> Batch:
    """Return a batch of single-segment sequences, padded on the right."""
    shape = (len(sequences), max(len(ids) for ids in sequences))
    ids_BS, mask_BS = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, ids in enumerate(sequences):
        ids_BS[row, : len(ids)] = ids
        mask_BS[row, : len(ids)] = 1
    types_BS = np.zeros_like(ids_BS)
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "token_type_ids": types_BS}


def _probabilities(logits_BK: Floats) -> list[list[float]]:
    """Return the softmax over the labels."""
    wide = logits_BK.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    rows: list[list[float]] = (powers / powers.sum(axis=1, keepdims=True)).tolist()
    return rows


def plain_encoder(tokenizer_file: Path, max_tokens: int) -> Encode:
    """Return an encoder of the `tokenizers` library, which truncates to `max_tokens`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(max_length=max_tokens)
    tokenizer.no_padding()
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


def serve(connection: Connection, job: ModelJob) -> None:
    """Open the job's model and measure a turn of each requested case."""
    module = importlib.import_module(f"benchmarks.engine.{job.contestant.module}")
    began = time.perf_counter()
    player: Player = module.open_player(job)
    connection.send(time.perf_counter() - began)
    while (case := connection.recv()) is not None:
        is_stream = case == TEXTS
        connection.send(_stream_turn(player, job) if is_stream else _shape_turn(player, job, case))


def _stream_turn(player: Player, job: ModelJob) -> EngineTurn:
    """Measure one pass over the texts."""
    began = time.perf_counter()
    outputs = player.process(job.texts, job.contestant.batch_size)
    seconds = time.perf_counter() - began
    num_items = len(job.texts)
    return EngineTurn(seconds=seconds, num_items=num_items, outputs=outputs, rss_bytes=_rss_bytes())


def _shape_turn(player: Player, job: ModelJob, case: str) -> EngineTurn:
    """Measure the median duration of repeated calls on rows from the pool."""
    num_rows, length = parse_shape(case)
    tokens = np.resize(job.pool, num_rows * length).reshape(num_rows, length)
    tokens[:, 0], tokens[:, -1] = _CLS_ID, _SEP_ID
    batch = pad(tokens.tolist())
    calls: list[float] = []
    while len(calls) < _MIN_CALLS or sum(calls) < job.shape_s:
        began = time.perf_counter()
        logits = player.logits(batch)
        calls.append(time.perf_counter() - began)
    return EngineTurn(
        seconds=statistics.median(calls),
        num_items=num_rows,
        outputs=_probabilities(logits),
        rss_bytes=_rss_bytes(),
    )


def _rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
