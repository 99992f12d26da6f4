"""The encoder of a bundle on a device: ids to hidden states, which stay on that device.

Shape legend: B sequences, S positions, H hidden size.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from albert_serve.config import AlbertConfig
from albert_serve.runtime.cuda import later_on_cuda_thread

_Ints = NDArray[np.int64]

# S of a bucket is a multiple of the first, or of the second past so many positions; B is a power of
# two. So at most 79 shapes are captured of a model of 512 positions.
_LENGTH_STEP: Final = 32
_WIDE_STEP: Final = 128
_WIDE_FROM: Final = 512
# The tokens up to which a call is captured: with more its kernels take longer than their launches.
# The runtime can release no captured graph before its session, hence a limit and no eviction.
_CAPTURED_TOKENS: Final = 4096
_NO_CAPTURE: Final = "-1"
_OUTPUT: Final = "hidden_states"


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """Right-padded sequences: ids and types (B, S), lengths without padding (B); all int64."""

    ids: _Ints
    types: _Ints
    lengths: _Ints

    def padded_to(self, num_sequences: int, num_positions: int) -> PaddedBatch:
        """Return the batch with more padding, and with sequences of one padding token."""
        rows, columns = self.ids.shape
        pads = ((0, num_sequences - rows), (0, num_positions - columns))
        return PaddedBatch(
            ids=np.pad(self.ids, pads),
            types=np.pad(self.types, pads),
            lengths=np.pad(self.lengths, pads[0], constant_values=1),
        )

    def feed(self) -> dict[str, _Ints]:
        """Return the arrays by the names of the graph's inputs."""
        return {"input_ids": self.ids, "token_type_ids": self.types, "lengths": self.lengths}


class Encoder(Protocol):
    """Runs the encoder's graph."""

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        """Return hidden states (B', S', H), B' >= B and S' >= S, on the encoder's device.

        They are valid until the next run, while the encoder is there.
        """
        ...

    @property
    def first_shapes(self) -> list[tuple[int, int]]:
        """Shapes (B, S) to run before the first request, besides a short one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuEncoder:
    """Runs each batch in its own shape on the CPU.

    Attributes:
        words: the word embeddings that the session reads, kept alive as long as the session.
        kept_tokens: the memory of a run of at most so many tokens is kept for the next one; that of
            a longer run is freed.
    """

    session: ort.InferenceSession
    words: ort.OrtValue | None = None
    kept_tokens: int | None = None

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        """See `Encoder`."""
        binding = self.session.io_binding()
        for name, array in batch.feed().items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(_OUTPUT)
        options = ort.RunOptions()
        if self.kept_tokens is not None and batch.ids.size > self.kept_tokens:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self.session.run_with_iobinding(binding, options)
        return binding.get_outputs()[0]

    @property
    def first_shapes(self) -> list[tuple[int, int]]:
        """See `Encoder`."""
        return []


class BucketedEncoder:
    """Runs batches on a device, all calls on one thread; small ones in buckets of shapes.

    A CUDA graph replays the kernels of one shape on the addresses that it was captured with: one
    launch instead of hundreds. Larger batches run in their own shape, without padding.

    Args:
        session: a session of the unrolled graph.
        config: the sizes of the model.
        device: "cuda", or "cpu" for tests without one.
        number: of the session's device.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        config: AlbertConfig,
        device: str = "cuda",
        number: int = 0,
    ) -> None:
        self._config = config
        self._device = (device, number)
        # All that holds device memory, so that it can be freed on another thread.
        self._held = _Held(session=session)
        if device == "cuda":
            weakref.finalize(self, later_on_cuda_thread, self._held.free)

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        """See `Encoder`."""
        num_sequences, num_positions = batch.ids.shape
        shape = bucket_shape(num_sequences, num_positions, self._config.max_positions)
        if shape is None:
            return self._run_uncaptured(batch)
        bucket = self._held.buckets.get(shape) or self._make(shape)
        for name, array in batch.padded_to(*shape).feed().items():
            bucket.inputs[name].update_inplace(array)
        self._held.session.run_with_iobinding(bucket.binding, _run_options(bucket.graph_id))
        return bucket.binding.get_outputs()[0]

    @property
    def first_shapes(self) -> list[tuple[int, int]]:
        """See `Encoder`."""
        longest = self._config.max_positions
        lengths = [1 << power for power in range(5, longest.bit_length()) if 1 << power < longest]
        return [(size, length) for length in [*lengths, longest] for size in (1, 4)]

    def _run_uncaptured(self, batch: PaddedBatch) -> ort.OrtValue:
        binding = self._held.session.io_binding()
        for name, array in batch.feed().items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(_OUTPUT, *self._device)
        self._held.session.run_with_iobinding(binding, _run_options(_NO_CAPTURE))
        return binding.get_outputs()[0]

    def _make(self, shape: tuple[int, int]) -> _Bucket:
        shapes = {"input_ids": shape, "token_type_ids": shape, "lengths": shape[:1]}
        inputs = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(list(size), np.int64, *self._device)
            for name, size in shapes.items()
        }
        binding = self._held.session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        hidden_size = self._config.hidden_size
        if self._held.output is None:
            self._held.output = ort.OrtValue.ortvalue_from_shape_and_type(
                [_CAPTURED_TOKENS, hidden_size], np.float32, *self._device
            )
        address = self._held.output.data_ptr()
        shape_out = [*shape, hidden_size]
        binding.bind_output(_OUTPUT, *self._device, np.float32, shape_out, address)
        graph_id = str(len(self._held.buckets) + 1)
        bucket = _Bucket(inputs=inputs, binding=binding, graph_id=graph_id)
        self._held.buckets[shape] = bucket
        return bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """One shape's inputs on the device, which a captured CUDA graph reads, and its number."""

    inputs: dict[str, ort.OrtValue]
    binding: ort.IOBinding
    graph_id: str


@dataclass(kw_only=True, slots=True)
class _Held:
    """The sessions and memory of an encoder on its device; all buckets write to one output."""

    session: ort.InferenceSession
    buckets: dict[tuple[int, int], _Bucket] = field(default_factory=dict)
    output: ort.OrtValue | None = None

    def free(self) -> None:
        self.buckets.clear()
        self.output = self.session = None


def bucket_shape(
    num_sequences: int, num_positions: int, max_positions: int
) -> tuple[int, int] | None:
    """Return the shape that a batch is padded to; None for one that is not captured.

    Padding adds up to 31 positions (127 past 512), and less than double the sequences.
    """
    step = _LENGTH_STEP if num_positions <= _WIDE_FROM else _WIDE_STEP
    positions = min(-(-num_positions // step) * step, max_positions)
    sequences = 1 << (num_sequences - 1).bit_length()
    return (sequences, positions) if sequences * positions <= _CAPTURED_TOKENS else None


def _run_options(graph_id: str) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph_id)
    return options
