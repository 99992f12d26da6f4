"""The ONNX Runtime engine of a bundle: one encoder for all tasks, and a small head for each task.

Every head reads the same hidden states, so one encoder call serves any mix of tasks. A head
computes only the rows that it needs. Feature extraction returns the hidden states without a head.

Shape legend: B sequences, S positions, N = B * S, H hidden size, R rows that a head reads, K
outputs of a head.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.errors import AlbertServeError, EngineError, InvalidInputError, NotFoundError
from albert_serve.runtime.cuda import (
    ADVICE,
    NO_DRIVER,
    cuda_error,
    cuda_provider,
    no_cuda_reason,
)
from albert_serve.runtime.encoders import (
    Encoder,
    EncoderPool,
    OpenEncoder,
    PaddedBatch,
    best_batch_tokens,
)
from albert_serve.runtime.ort import (
    cuda_options,
    head_options,
    open_session,
    return_free_memory,
)
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.base import EncoderInput, Logits, group_by_length

# The overhead of an encoder call, as the number of tokens that could be computed instead.
_CALL_OVERHEAD_TOKENS: Final = {"cpu": 16, "cuda": 1024}
_WARM_UP_TOKENS: Final = 32

_CUDA_FAILURE: Final = re.compile(r"CU\w+ failure \d+: .*?(?= ; )")

_logger = logging.getLogger(__name__)


class Engine:
    """The sessions of one bundle, which threads can share.

    Attributes:
        config: sizes of the model.
        device: "cpu" or "cuda".
        tasks: valid values of `EncoderInput.task`: the bundle's heads and feature extraction.
        max_batch_tokens: maximum number of tokens in an encoder call, with padding. A longer input
            runs alone.
        call_overhead_tokens: overhead of an encoder call, as a number of tokens that take as long.
    """

    def __init__(
        self,
        config: AlbertConfig,
        encoder: OpenEncoder,
        heads: dict[str, ort.InferenceSession],
        *,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.device = device
        self.tasks = (*heads, FEATURE_EXTRACTION)
        self.max_batch_tokens = best_batch_tokens(config, device)
        self.call_overhead_tokens = _CALL_OVERHEAD_TOKENS[device]
        self._encoder = encoder
        self._heads = heads

    @classmethod
    def open(
        cls,
        bundle: Bundle | Path,
        options: RuntimeOptions | None = None,
        pool: EncoderPool | None = None,
    ) -> Engine:
        """Open the sessions of a bundle, which map its weights.

        Args:
            bundle: bundle or its folder.
            options: runtime options (default: `RuntimeOptions()`).
            pool: pool whose encoders bundles with equal weights share.
        """
        options = options or RuntimeOptions()
        bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        pool = pool or EncoderPool()
        engine = None if options.device == "cpu" else cls._try_cuda(bundle, options, pool)
        if engine is None:
            engine = cls._open_on("cpu", bundle, options, pool)
        return_free_memory()
        return engine

    @classmethod
    def _try_cuda(cls, bundle: Bundle, options: RuntimeOptions, pool: EncoderPool) -> Engine | None:
        """Return an engine that has run on CUDA, or log why it failed and return None."""
        reason, cause = no_cuda_reason(), None
        if reason is None:
            try:
                engine = cls._open_on("cuda", bundle, options, pool)
                engine.warm_up()
            except AlbertServeError as error:
                reason, cause = _describe(error), error
            else:
                return engine
        if options.device == "cuda":
            raise cuda_error(reason) from cause
        if reason == NO_DRIVER:
            _logger.info("Running on the CPU. %s", reason)
        else:
            _logger.warning("Running on the CPU. %s %s", reason, ADVICE)
        return None

    @classmethod
    def _open_on(
        cls, device: str, bundle: Bundle, options: RuntimeOptions, pool: EncoderPool
    ) -> Engine:
        heads = {name: _open_head(bundle, name, device) for name in bundle.manifest.heads}
        return cls(bundle.config, pool.open(bundle, options, device), heads, device=device)

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Return the logits (R, K) of each input's rows, in the order of the inputs.

        Inputs of similar lengths share an encoder call, even if their tasks differ.
        """
        for item in inputs:
            self._check(item)
        logits: list[Logits | None] = [None] * len(inputs)
        lengths = [len(item.ids) for item in inputs]
        groups = group_by_length(
            lengths, self.max_batch_tokens, max_padding_tokens=self.call_overhead_tokens
        )
        for group, answers in zip(groups, self._run_groups(inputs, groups), strict=True):
            for index, rows in zip(group, answers, strict=True):
                logits[index] = rows
        return [rows for rows in logits if rows is not None]

    def run_batch(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Return the logits (R, K) of each input's rows, from one encoder call."""
        for item in inputs:
            self._check(item)
        return self._run_group(self._encoder.encoder, inputs)

    def warm_up(self) -> None:
        """Run every task once, so that the first request does not wait for lazy initialisation."""
        num_tokens = min(_WARM_UP_TOKENS, self.config.max_positions)
        ids, types = [self.config.cls_id] * num_tokens, [0] * num_tokens
        self.run([EncoderInput(ids=ids, types=types, task=task, rows=[0]) for task in self.tasks])

    def _run_groups(
        self, inputs: Sequence[EncoderInput], groups: Sequence[Sequence[int]]
    ) -> Iterable[list[Logits]]:
        """Return the logits of each group. Several groups run concurrently, on one thread each."""
        batches = [[inputs[i] for i in group] for group in groups]
        single, threads = self._encoder.single, self._encoder.threads
        if single is not None and threads is not None and len(batches) > 1:
            return threads.map(lambda batch: self._run_group(single, batch), batches)
        return (self._run_group(self._encoder.encoder, batch) for batch in batches)

    def _run_group(self, encoder: Encoder, inputs: Sequence[EncoderInput]) -> list[Logits]:
        if not inputs:
            return []
        batch = _pad(inputs, self.config.pad_id)
        try:
            hidden_BSH = encoder.run(batch)
        except Exception as error:
            raise EngineError(
                f"The runtime failed on ids of shape {batch.ids.shape}: {error}"
            ) from error
        num_positions = batch.ids.shape[1]
        rows = [
            np.arange(len(item.ids)) if item.rows is None else np.array(item.rows, np.int64)
            for item in inputs
        ]
        logits: dict[int, Logits] = {}
        for task in dict.fromkeys(item.task for item in inputs):
            members = [i for i, item in enumerate(inputs) if item.task == task]
            rows_R = np.concatenate([rows[i] + i * num_positions for i in members])
            logits_RK = _finite(self._read(task, hidden_BSH, rows_R), task)
            ends = np.cumsum([len(rows[i]) for i in members])
            for i, part in zip(members, np.split(logits_RK, ends[:-1]), strict=True):
                logits[i] = _reduce(part, inputs[i])
        return [logits[i] for i in range(len(inputs))]

    def _read(
        self, task: str, hidden_BSH: ort.OrtValue, rows_R: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        if task != FEATURE_EXTRACTION:
            return _apply(self._heads[task], hidden_BSH, rows_R, task)
        hidden_NH: NDArray[np.float32] = hidden_BSH.numpy().reshape(-1, self.config.hidden_size)
        return hidden_NH[rows_R]

    def _check(self, item: EncoderInput) -> None:
        if item.task not in self.tasks:
            tasks = ", ".join(self.tasks)
            raise NotFoundError(f"{item.task!r} is not a task of this bundle. Use one of {tasks}.")
        num_tokens = len(item.ids)
        if not 1 <= num_tokens <= self.config.max_positions:
            raise InvalidInputError(
                f"An input has {num_tokens} tokens; the model reads 1 to "
                f"{self.config.max_positions}."
            )
        if len(item.types) != num_tokens:
            raise InvalidInputError(
                f"An input has {num_tokens} ids, but {len(item.types)} token types."
            )
        _check_range("id", item.ids, self.config.vocab_size)
        _check_range("token type", item.types, self.config.num_token_types)
        _check_range("row", item.rows or [], num_tokens)


def _open_head(bundle: Bundle, name: str, device: str) -> ort.InferenceSession:
    if device == "cuda":
        provider = cuda_provider()
        return open_session(bundle.cuda_head_file(name), cuda_options(), cuda=provider)
    return open_session(bundle.head_file(name), head_options(), folds=False)


def _describe(error: AlbertServeError) -> str:
    """Return the reason of a failure on CUDA without the runtime's C++ signatures."""
    text = " ".join(str(error).split())
    failure = _CUDA_FAILURE.search(text)
    return f"{failure.group()}." if failure else text


def _apply(
    head: ort.InferenceSession, hidden_BSH: ort.OrtValue, rows_R: NDArray[np.int64], task: str
) -> NDArray[np.float32]:
    """Return the head's logits (R, K) in host memory, even if the hidden states are on a GPU."""
    try:
        binding = head.io_binding()
        binding.bind_ortvalue_input("hidden_states", hidden_BSH)
        binding.bind_cpu_input("rows", rows_R)
        binding.bind_output("logits")
        head.run_with_iobinding(binding)
        logits_RK: NDArray[np.float32] = binding.get_outputs()[0].numpy()
    except Exception as error:
        raise EngineError(f"The runtime failed on {len(rows_R)} rows of {task}: {error}") from error
    return logits_RK


def _pad(inputs: Sequence[EncoderInput], pad_id: int) -> PaddedBatch:
    lengths_B = np.array([len(item.ids) for item in inputs], np.int64)
    shape = (len(inputs), int(lengths_B.max()))
    ids_BS, types_BS = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    for row, item in enumerate(inputs):
        ids_BS[row, : len(item.ids)] = item.ids
        types_BS[row, : len(item.ids)] = item.types
    return PaddedBatch(ids=ids_BS, types=types_BS, lengths=lengths_B)


def _finite(logits_RK: NDArray[np.float32], task: str) -> NDArray[np.float32]:
    if not np.isfinite(logits_RK).all():
        raise EngineError(f"The model's logits for {task} are not finite.")
    return logits_RK


def _reduce(logits_RK: NDArray[np.float32], item: EncoderInput) -> NDArray[np.float32]:
    if item.reduction == "none":
        return logits_RK
    reduce = np.mean if item.reduction == "mean" else np.max
    row_1K: NDArray[np.float32] = reduce(logits_RK, axis=0, keepdims=True)
    return row_1K


def _check_range(name: str, values: Sequence[int], end: int) -> None:
    if values and not 0 <= min(values) <= max(values) < end:
        invalid_value = next(value for value in values if not 0 <= value < end)
        raise InvalidInputError(f"The {name} {invalid_value} is not between 0 and {end - 1}.")
