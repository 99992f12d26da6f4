"""The encoder of a bundle on a device: ids to hidden states, which stay on that device.

Shape legend: B sequences, S positions, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

_Ints = NDArray[np.int64]
_OUTPUT: Final = "hidden_states"


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """Right-padded sequences: ids and types (B, S), lengths without padding (B); all int64."""

    ids: _Ints
    types: _Ints
    lengths: _Ints

    def graph_inputs(self) -> dict[str, _Ints]:
        """Return the arrays by the names of the graph's inputs."""
        return {"input_ids": self.ids, "token_type_ids": self.types, "lengths": self.lengths}


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Runs the encoder's graph; each batch in its own shape.

    Attributes:
        device: name and number of the session's device.
        words: the word embeddings that the session reads, kept alive as long as the session.
        kept_tokens: on a CPU, the memory of a run of at most so many tokens is kept for the next
            one; that of a longer run is freed.
    """

    session: ort.InferenceSession
    device: tuple[str, int] = ("cpu", 0)
    words: ort.OrtValue | None = None
    kept_tokens: int | None = None

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        """Return hidden states (B, S, H) on the encoder's device."""
        binding = self.session.io_binding()
        for name, array in batch.graph_inputs().items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(_OUTPUT, *self.device)
        options = ort.RunOptions()
        if self.kept_tokens is not None and batch.ids.size > self.kept_tokens:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self.session.run_with_iobinding(binding, options)
        return binding.get_outputs()[0]
