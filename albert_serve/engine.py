"""ONNX Runtime over a bundle: one encoder for all tasks, one small head beside it for each.

Every head reads the same hidden states, so one encoder call serves any mix of tasks, and a head
sees only the rows that were asked for.

Shape legend: B sequences, S positions, H hidden size, R rows asked for, K outputs of a head.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from albert_serve.bundle import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.errors import BundleCorruptError, EngineError, InvalidInputError, NotFoundError
from albert_serve.tasks.base import EncoderInput, Logits

# Older ones pack a shared weight once for each use of it: 24 copies of one layer.
_OLDEST_RUNTIME: Final = (1, 31)
# What one more encoder call costs on a CPU, as tokens of compute (docs/decisions.md).
_CALL_COST_TOKENS: Final = 16
# A larger batch is hardly faster per token on a CPU, and whoever comes next waits for its end.
_CPU_BATCH_TOKENS: Final = 512
_WARM_UP_TOKENS: Final = 32


class Engine:
    """The sessions of one bundle. Safe to call from many threads at once.

    Attributes:
        config: the sizes of the model.
        tasks: the names of the tasks whose heads the bundle holds.
        max_batch_tokens: the most tokens, padding included, of one encoder call; a longer
            single input runs alone.
    """

    def __init__(
        self,
        config: AlbertConfig,
        encoder: ort.InferenceSession,
        heads: dict[str, ort.InferenceSession],
    ) -> None:
        self.config = config
        self.tasks = tuple(heads)
        self.max_batch_tokens = _CPU_BATCH_TOKENS
        self._encoder = encoder
        self._heads = heads

    @classmethod
    def open(cls, bundle: Bundle | Path, *, num_threads: int | None = None) -> Engine:
        """Make the sessions of a bundle; weights are mapped from its one file.

        Args:
            num_threads: threads of one run; by default the CPUs that this process may use.

        Raises:
            BundleError: the bundle cannot be opened.
            BundleCorruptError: the runtime refuses one of its graphs.
            EngineError: this onnxruntime is too old to share weights.
        """
        check_runtime()
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        threads = num_threads or len(_usable_cpus())
        heads = {
            str(name): _session(opened.head_file(name), threads) for name in opened.manifest.tasks
        }
        engine = cls(opened.config, _session(opened.encoder_file, threads), heads)
        _return_free_memory()
        return engine

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Logits (R, K) of each input's rows, in the order of the inputs.

        Inputs of like lengths share an encoder call, whatever their tasks.

        Raises:
            NotFoundError: the bundle has no head for a task.
            InvalidInputError: ids, types or rows that the model cannot take.
            EngineError: the runtime failed, or gave numbers that are not finite.
        """
        for given in inputs:
            self._check(given)
        logits: list[Logits | None] = [None] * len(inputs)
        lengths = [len(given.ids) for given in inputs]
        for group in group_by_length(lengths, self.max_batch_tokens):
            for index, rows in zip(group, self._run_group([inputs[i] for i in group]), strict=True):
                logits[index] = rows
        return [rows for rows in logits if rows is not None]

    def warm_up(self) -> None:
        """Run every task once, so that the first request does not pay for first-call work.

        Raises:
            EngineError: a graph cannot be run.
        """
        num_tokens = min(_WARM_UP_TOKENS, self.config.max_positions)
        ids = [self.config.cls_id] * num_tokens
        self.run(
            [EncoderInput(ids=ids, types=[0] * num_tokens, task=t, rows=[0]) for t in self.tasks]
        )

    def _run_group(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        hidden_BSH = _call(self._encoder, _pad(inputs, self.config.pad_id))
        rows = [
            hidden_H[: len(given.ids)] if given.rows is None else hidden_H[given.rows]
            for given, hidden_H in zip(inputs, hidden_BSH, strict=True)
        ]
        logits: list[Logits] = [np.empty((0, 0), np.float32)] * len(inputs)
        for task in dict.fromkeys(given.task for given in inputs):
            members = [i for i, given in enumerate(inputs) if given.task == task]
            wanted_RH = np.concatenate([rows[i] for i in members])
            logits_RK = _finite(_call(self._heads[task], {"rows": wanted_RH}), task)
            ends = np.cumsum([len(rows[i]) for i in members])
            for i, part in zip(members, np.split(logits_RK, ends[:-1]), strict=True):
                logits[i] = part
        return logits

    def _check(self, given: EncoderInput) -> None:
        if given.task not in self._heads:
            there = ", ".join(self.tasks) or "none"
            raise NotFoundError(f"this bundle has no task {given.task!r}; it has {there}")
        num_tokens = len(given.ids)
        if not 1 <= num_tokens <= self.config.max_positions:
            raise InvalidInputError(
                f"an input of {num_tokens} tokens; the model takes 1 to {self.config.max_positions}"
            )
        if len(given.types) != num_tokens:
            raise InvalidInputError(f"{num_tokens} ids but {len(given.types)} token types")
        _check_range("id", given.ids, self.config.vocab_size)
        _check_range("token type", given.types, self.config.num_token_types)
        _check_range("row", given.rows or [], num_tokens)


def group_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in groups to run together, longest first; every index is in exactly one group.

    A group is closed when it would exceed `max_tokens` (its number times its longest length), or
    when its padding would cost more than another call does.
    """
    groups: list[list[int]] = []
    longest = padding = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padding += longest - lengths[index]
        full = bool(groups) and (len(groups[-1]) + 1) * longest > max_tokens
        if not groups or full or padding > _CALL_COST_TOKENS:
            groups.append([])
            longest, padding = lengths[index], 0
        groups[-1].append(index)
    return groups


def check_runtime() -> None:
    """Refuse an onnxruntime that would hold one copy of the shared layer for each use.

    Raises:
        EngineError: it is older than 1.31.
    """
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if version < _OLDEST_RUNTIME:
        raise EngineError(
            f"onnxruntime {ort.__version__} copies a shared layer once for each use of it; "
            "1.31 or newer is needed: pip install 'onnxruntime>=1.31'"
        )


def _session(graph: Path, num_threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    # Shapes change with every batch: an arena would keep the largest of each, for no speed.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    try:
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's exceptions share no base but this
        raise BundleCorruptError(f"{graph} cannot be loaded: {error}; export it again") from error


def _call(session: ort.InferenceSession, feed: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    try:
        output: NDArray[np.float32] = session.run(None, feed)[0]
    except Exception as error:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in feed.items())
        raise EngineError(f"the runtime failed on {shapes}: {error}") from error
    return output


def _pad(inputs: Sequence[EncoderInput], pad_id: int) -> dict[str, NDArray[Any]]:
    lengths_B = np.array([len(given.ids) for given in inputs], np.int32)
    shape = (len(inputs), int(lengths_B.max()))
    ids_BS, types_BS = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    for row, given in enumerate(inputs):
        ids_BS[row, : len(given.ids)] = given.ids
        types_BS[row, : len(given.ids)] = given.types
    return {"input_ids": ids_BS, "token_type_ids": types_BS, "lengths": lengths_B}


def _finite(logits_RK: NDArray[np.float32], task: str) -> NDArray[np.float32]:
    if not np.isfinite(logits_RK).all():
        raise EngineError(f"the model gave numbers that are not finite for {task}")
    return logits_RK


def _check_range(what: str, values: Sequence[int], end: int) -> None:
    if values and not 0 <= min(values) <= max(values) < end:
        bad = next(value for value in values if not 0 <= value < end)
        raise InvalidInputError(f"{what} {bad} is out of range; allowed are 0 to {end - 1}")


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _return_free_memory() -> None:
    """Give back what packing the weights used: glibc would keep it, as much as a layer."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
