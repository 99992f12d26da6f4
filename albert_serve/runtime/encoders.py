"""The encoder of a bundle on a device: ids to hidden states, which stay on that device.

Shape legend: B sequences, S positions, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from albert_serve.runtime.time_limit import run_options

Ints = NDArray[np.int64]

# S of a bucket is a multiple of this; B is a power of two.
_LENGTH_STEP: Final = 32
_CUDA_PROVIDER: Final = {
    "arena_extend_strategy": "kSameAsRequested",
    "use_tf32": "0",
    "enable_skip_layer_norm_strict_mode": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """Right-padded sequences: ids and types (B, S), lengths without padding (B); all int64."""

    ids: Ints
    types: Ints
    lengths: Ints

    def padded_to(self, num_sequences: int, num_positions: int) -> PaddedBatch:
        """Return the batch with more padding, and with sequences of one padding token."""
        rows, columns = self.ids.shape
        pads = ((0, num_sequences - rows), (0, num_positions - columns))
        return PaddedBatch(
            ids=np.pad(self.ids, pads),
            types=np.pad(self.types, pads),
            lengths=np.pad(self.lengths, pads[0], constant_values=1),
        )

    def feed(self) -> dict[str, Ints]:
        """Return the arrays by the names of the graph's inputs."""
        return {"input_ids": self.ids, "token_type_ids": self.types, "lengths": self.lengths}


class Encoder(Protocol):
    """Runs the encoder's graph."""

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        """Return hidden states (B', S', H), B' >= B and S' >= S, on the encoder's device.

        They are valid until the next run.
        """
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
        binding.bind_output("hidden_states")
        options = run_options()
        if self.kept_tokens is not None and batch.ids.size > self.kept_tokens:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self.session.run_with_iobinding(binding, options)
        return binding.get_outputs()[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """One shape's buffers on the device, which a captured CUDA graph reads and writes."""

    inputs: dict[str, ort.OrtValue]
    binding: ort.IOBinding
    options: ort.RunOptions


@dataclass(kw_only=True)
class BucketedEncoder:
    """Runs batches on a device in buckets of shapes, each with buffers of its own.

    A CUDA graph replays the kernels of one shape on the addresses that it was captured with: one
    launch instead of hundreds. Calls are made one at a time.

    Args:
        session: a session of the unrolled graph.
        device: "cuda", or "cpu" for tests without one.
        hidden_size: H.
    """

    session: ort.InferenceSession
    hidden_size: int
    device: str = "cuda"
    _buckets: dict[tuple[int, int], _Bucket] = field(default_factory=dict)

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        """See `Encoder`."""
        shape = bucket_shape(*batch.ids.shape)
        bucket = self._buckets.get(shape) or self._make(shape)
        for name, array in batch.padded_to(*shape).feed().items():
            bucket.inputs[name].update_inplace(array)
        self.session.run_with_iobinding(bucket.binding, bucket.options)
        return bucket.binding.get_outputs()[0]

    def _make(self, shape: tuple[int, int]) -> _Bucket:
        shapes = {"input_ids": shape, "token_type_ids": shape, "lengths": shape[:1]}
        inputs = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(list(size), np.int64, self.device, 0)
            for name, size in shapes.items()
        }
        hidden = ort.OrtValue.ortvalue_from_shape_and_type(
            [*shape, self.hidden_size], np.float32, self.device, 0
        )
        binding = self.session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("hidden_states", hidden)
        options = run_options()
        options.add_run_config_entry("gpu_graph_id", str(len(self._buckets) + 1))
        bucket = _Bucket(inputs=inputs, binding=binding, options=options)
        self._buckets[shape] = bucket
        return bucket


def bucket_shape(num_sequences: int, num_positions: int) -> tuple[int, int]:
    """Return the shape that a batch is padded to: up to 31 more positions, up to double B."""
    positions = -(-num_positions // _LENGTH_STEP) * _LENGTH_STEP
    return 1 << (num_sequences - 1).bit_length(), positions


def cuda_provider(*, captures: bool) -> dict[str, str]:
    """Return the options of the CUDA provider.

    Args:
        captures: whether runs are captured as CUDA graphs.
    """
    return {**_CUDA_PROVIDER, "enable_cuda_graph": str(int(captures))}
