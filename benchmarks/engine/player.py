"""A contestant's side of the measurement: its process works on request and sleeps otherwise.

Shape legend: B sequences, S positions, K labels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import numpy as np
import psutil
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.engine.contestants import (
    TEXTS,
    EngineTurn,
    Inputs,
    ModelJob,
    Opening,
    Shape,
    TurnRequest,
)
from benchmarks.harness.process import Channel

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Encode: TypeAlias = Callable[[list[str]], list[list[int]]]
_LEAST_CALLS: Final = 2
_CLS_ID: Final = 2
_SEP_ID: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences of one segment padded on the right; all (B, S).

    Attributes:
        mask: 1 at real tokens.
    """

    ids: Ints
    mask: Ints

    def feed(self) -> dict[str, Ints]:
        """Return the arrays under the names of `transformers`."""
        return {
            "input_ids": self.ids,
            "attention_mask": self.mask,
            "token_type_ids": np.zeros_like(self.ids),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Tokens of a pass: real ones, and those computed, padding included."""

    num_real: int
    num_computed: int

    @classmethod
    def of(cls, lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> Tokens:
        """Return those of sequences in groups, each padded to its longest."""
        computed = sum(len(members) * max(lengths[i] for i in members) for members in groups)
        return cls(num_real=sum(lengths), num_computed=computed)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamResult:
    """The result of a pass over texts.

    Attributes:
        outputs: probabilities of each text, in order.
        count: counts its tokens; called when the time has been taken.
    """

    outputs: list[list[float]]
    count: Callable[[], Tokens]


class Player(Protocol):
    """A classifier that is ready."""

    def process(self, texts: Sequence[str], batch_size: int) -> StreamResult:
        """Classify texts, tokenisation included."""
        ...

    def logits(self, batch: Batch) -> Floats:
        """Logits (B, K) of a batch of ids; asked only of those that take part in shapes."""
        ...


RunBatches: TypeAlias = Callable[[Sequence[Batch]], list[Floats]]


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

    def process(self, texts: Sequence[str], batch_size: int) -> StreamResult:
        """Probabilities of each text."""
        sequences = self.encode(list(texts))
        lengths = [len(ids) for ids in sequences]
        groups = group(lengths, batch_size)
        logits = self.run([pad([sequences[i] for i in members]) for members in groups])
        outputs: list[list[float]] = [[]] * len(texts)
        for members, logits_BK in zip(groups, logits, strict=True):
            for index, row in zip(members, probabilities(logits_BK), strict=True):
                outputs[index] = row
        return StreamResult(outputs=outputs, count=lambda: Tokens.of(lengths, groups))


def group(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return indices in batches of like lengths, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def pad(sequences: Sequence[Sequence[int]]) -> Batch:
    """Return a batch of these ids."""
    shape = (len(sequences), max(len(ids) for ids in sequences))
    ids_BS, mask_BS = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, ids in enumerate(sequences):
        ids_BS[row, : len(ids)] = ids
        mask_BS[row, : len(ids)] = 1
    return Batch(ids=ids_BS, mask=mask_BS)


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


def shape_batch(inputs: Inputs, shape: Shape) -> Batch:
    """Return real text of this shape: each row begins elsewhere in the pool."""
    rows = []
    for row in range(shape.num_rows):
        start = row * shape.length
        inner = [inputs.pool[(start + i) % len(inputs.pool)] for i in range(shape.length - 2)]
        rows.append([_CLS_ID, *inner, _SEP_ID])
    return pad(rows)


def play(channel: Channel, job: ModelJob, open_player: Callable[[ModelJob], Player]) -> None:
    """Open the job's model, and do turns until there is no further one."""
    import_bytes = _rss_bytes()
    began = time.perf_counter()
    player = open_player(job)
    channel.send(Opening(load_s=time.perf_counter() - began, import_bytes=import_bytes))
    timed = Timed(player, job.inputs)
    while (request := channel.receive()) is not None:
        channel.send(timed.turn(request))


class Timed:
    """Times a player's work."""

    def __init__(self, player: Player, inputs: Inputs) -> None:
        self._player, self._inputs = player, inputs
        self._seen: set[str] = set()

    def turn(self, request: TurnRequest) -> EngineTurn:
        """Do a turn."""
        is_first = request.case not in self._seen
        self._seen.add(request.case)
        if request.case == TEXTS:
            return self._stream(request, is_first=is_first)
        return self._shape(request, is_first=is_first)

    def _stream(self, request: TurnRequest, *, is_first: bool) -> EngineTurn:
        """Make one pass over the texts; before the first, two of them are not timed."""
        texts = self._inputs.part(request.part)
        for few in (texts[:2], texts[:1]) if is_first else ():
            self._player.process(few, request.batch_size)
        began, began_cpu = time.perf_counter(), time.process_time()
        result = self._player.process(texts, request.batch_size)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        tokens = result.count()
        return EngineTurn(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            num_items=len(texts),
            num_tokens=tokens.num_real,
            num_computed=tokens.num_computed,
            outputs=result.outputs,
            rss_bytes=_rss_bytes(),
        )

    def _shape(self, request: TurnRequest, *, is_first: bool) -> EngineTurn:
        """Return the median of some calls; before the first of a shape, one is not timed."""
        shape = Shape.parse(request.case)
        batch = shape_batch(self._inputs, shape)
        if is_first:
            self._player.logits(batch)
        calls: list[float] = []
        began_cpu = time.process_time()
        while len(calls) < _LEAST_CALLS or sum(calls) < request.seconds:
            began = time.perf_counter()
            logits = self._player.logits(batch)
            calls.append(time.perf_counter() - began)
        num_tokens = shape.num_rows * shape.length
        return EngineTurn(
            seconds=statistics.median(calls),
            cpu_seconds=(time.process_time() - began_cpu) / len(calls),
            num_items=shape.num_rows,
            num_tokens=num_tokens,
            num_computed=num_tokens,
            outputs=probabilities(logits),
            rss_bytes=_rss_bytes(),
        )


def _rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
