"""A contestant's side of the measurement: its process works on request and sleeps otherwise.

Shape legend: B sequences, S positions, K labels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import psutil
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.engine.contestants import TEXTS, EngineTurn, ModelJob, Opening, Shape
from benchmarks.harness.process import Channel

Floats: TypeAlias = NDArray[np.float32]
# The arrays (B, S) of a padded batch under the names of `transformers`.
Batch: TypeAlias = dict[str, NDArray[np.int64]]
Encode: TypeAlias = Callable[[list[str]], list[list[int]]]
RunBatches: TypeAlias = Callable[[Sequence[Batch]], list[Floats]]
_LEAST_CALLS: Final = 2
_CLS_ID: Final = 2
_SEP_ID: Final = 3


class Tokens(NamedTuple):
    """Tokens of a pass: real ones, and those computed, padding included."""

    num_real: int
    num_computed: int


def count_tokens(lengths: Sequence[int], groups: Iterable[Sequence[int]]) -> Tokens:
    """Count those of sequences in groups, each padded to its longest."""
    computed = sum(len(members) * max(lengths[i] for i in members) for members in groups)
    return Tokens(num_real=sum(lengths), num_computed=computed)


class Player(Protocol):
    """A classifier that is ready."""

    def process(self, texts: Sequence[str], batch_size: int) -> list[list[float]]:
        """Return the probabilities of each text, tokenisation included."""
        ...

    def tokens(self, texts: Sequence[str], batch_size: int) -> Tokens:
        """Count the tokens of that."""
        ...

    def logits(self, batch: Batch) -> Floats:
        """Logits (B, K) of a batch of ids; asked only of those that take part in shapes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedClassifier:
    """Classifies texts in batches of like lengths, each padded to its longest.

    Attributes:
        run: logits (B, K) of each batch, in whatever way is fastest.
    """

    encode: Encode
    run: RunBatches

    def logits(self, batch: Batch) -> Floats:
        """Logits (B, K) of a batch."""
        return self.run([batch])[0]

    def process(self, texts: Sequence[str], batch_size: int) -> list[list[float]]:
        """Return the probabilities of each text."""
        sequences = self.encode(list(texts))
        groups = _group([len(ids) for ids in sequences], batch_size)
        logits = self.run([pad([sequences[i] for i in members]) for members in groups])
        outputs: list[list[float]] = [[]] * len(texts)
        for members, logits_BK in zip(groups, logits, strict=True):
            for index, row in zip(members, probabilities(logits_BK), strict=True):
                outputs[index] = row
        return outputs

    def tokens(self, texts: Sequence[str], batch_size: int) -> Tokens:
        """Count the tokens of a pass."""
        lengths = [len(ids) for ids in self.encode(list(texts))]
        return count_tokens(lengths, _group(lengths, batch_size))


def _group(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return indices in batches of like lengths, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def pad(sequences: Sequence[Sequence[int]]) -> Batch:
    """Return a batch of sequences of one segment, padded on the right."""
    shape = (len(sequences), max(len(ids) for ids in sequences))
    ids_BS, mask_BS = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, ids in enumerate(sequences):
        ids_BS[row, : len(ids)] = ids
        mask_BS[row, : len(ids)] = 1
    types_BS = np.zeros_like(ids_BS)
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "token_type_ids": types_BS}


def probabilities(logits_BK: Floats) -> list[list[float]]:
    """Return the softmax over the labels; the logistic function of a single one."""
    wide = logits_BK.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    chosen = shares if wide.shape[1] > 1 else 1 / (1 + np.exp(-wide))
    return [[float(share) for share in row] for row in chosen]


def plain_encoder(tokenizer_file: Path, max_tokens: int) -> Encode:
    """Return the encoder of the `tokenizers` library alone, which cuts texts to `max_tokens`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(max_length=max_tokens)
    tokenizer.no_padding()
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


def play(channel: Channel, job: ModelJob, open_player: Callable[[ModelJob], Player]) -> None:
    """Open the job's model, and do a turn of each case that is asked for."""
    import_bytes = _rss_bytes()
    began = time.perf_counter()
    player = open_player(job)
    channel.send(Opening(load_s=time.perf_counter() - began, import_bytes=import_bytes))
    while (case := channel.receive()) is not None:
        is_stream = case == TEXTS
        turn = _stream_turn(player, job) if is_stream else _shape_turn(player, job, case)
        channel.send(turn)


def _stream_turn(player: Player, job: ModelJob) -> EngineTurn:
    """Make one pass over the texts."""
    batch_size = job.contestant.batch_size
    began = time.perf_counter()
    outputs = player.process(job.texts, batch_size)
    seconds = time.perf_counter() - began
    rss_bytes = _rss_bytes()
    tokens = player.tokens(job.texts, batch_size)
    return EngineTurn(
        seconds=seconds,
        num_items=len(job.texts),
        num_tokens=tokens.num_real,
        num_computed=tokens.num_computed,
        outputs=outputs,
        rss_bytes=rss_bytes,
    )


def _shape_turn(player: Player, job: ModelJob, case: str) -> EngineTurn:
    """Repeat calls, and take their median."""
    shape = Shape.parse(case)
    batch = _shape_batch(job.pool, shape)
    calls: list[float] = []
    while len(calls) < _LEAST_CALLS or sum(calls) < job.shape_s:
        began = time.perf_counter()
        logits = player.logits(batch)
        calls.append(time.perf_counter() - began)
    num_tokens = shape.num_rows * shape.length
    return EngineTurn(
        seconds=statistics.median(calls),
        num_items=shape.num_rows,
        num_tokens=num_tokens,
        num_computed=num_tokens,
        outputs=probabilities(logits),
        rss_bytes=_rss_bytes(),
    )


def _shape_batch(pool: Sequence[int], shape: Shape) -> Batch:
    """Return real text of this shape: each row begins elsewhere in the pool."""
    rows = []
    for row in range(shape.num_rows):
        start = row * shape.length
        inner = [pool[(start + i) % len(pool)] for i in range(shape.length - 2)]
        rows.append([_CLS_ID, *inner, _SEP_ID])
    return pad(rows)


def _rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
