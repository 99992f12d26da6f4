"""What is seen to before a bundle is given out.

The graphs compute what torch does, and they reach each weight exactly once.

Shape legend: B sequences, S positions, H hidden size, R rows, K outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from tqdm import tqdm

from albert_serve.bundle import ENCODER_FILE, TaskEntry
from albert_serve.config import AlbertConfig
from albert_serve.weights import StoredTensor, TaskName
from export.errors import ExportError
from training.heads import AlbertForTasks
from training.model import Batch

# Lengths of the sequences of each batch: ragged from 1 up, unpadded; the longest is added.
_BATCHES: Final = ((1, 2, 3, 8, 21), (33, 33))
_NUM_ROWS: Final = 32  # of a batch are given to a head, first and last ones
_SMALL_BYTES: Final = 4096

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """Token ids and types (B, S) of right-padded sequences, and their lengths (B)."""

    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    lengths: NDArray[np.int32]

    @property
    def is_real(self) -> NDArray[np.bool_]:
        """True where a token is no padding, (B, S)."""
        return np.arange(self.ids.shape[1]) < self.lengths[:, None]


def measure_parity(
    folder: Path, tasks: Mapping[TaskName, TaskEntry], model: AlbertForTasks
) -> dict[str, float]:
    """The largest absolute difference from torch, of "encoder" and of each task's logits.

    Batches are random and ragged, with lengths from 1 to all positions; padding is left out of
    the comparison. A head is given its runtime's own hidden states, so its figure is end to end.

    Raises:
        ExportError: the runtime cannot load or run a graph.
    """
    model.eval()
    samples = list(draw_samples(model.config))
    expected, got, worst = [], [], {"encoder": 0.0}
    encoder = _session(folder / ENCODER_FILE)
    for sample in tqdm(samples, desc="comparing with torch", disable=None, delay=3, leave=False):
        expected.append(_torch_rows(model, sample))
        got.append(_runtime_rows(encoder, sample))
        worst["encoder"] = _larger(worst["encoder"], expected[-1], got[-1])
    del encoder  # its packed weights: before the heads pack theirs
    rows, runtime_rows = _pick_rows(expected), _pick_rows(got)
    for task, entry in tasks.items():
        head = _session(folder / entry.graph)
        with torch.inference_mode():
            logits_RK = model.logits(task, torch.from_numpy(rows)).numpy()
        worst[task] = _larger(0.0, logits_RK, _run(head, {"rows": runtime_rows}))
    return worst


def check_parity(parity: Mapping[str, float], max_difference: float) -> None:
    """See that no figure is over the limit.

    Raises:
        ExportError: one is, or is not a number.
    """
    over = {name: value for name, value in parity.items() if not value <= max_difference}
    if over:
        listed = ", ".join(f"{name} {value:.2e}" for name, value in over.items())
        raise ExportError(
            f"the graphs differ from torch by {listed}; allowed is {max_difference:.0e}. Nothing "
            "was written. If the weights are sound, --max-difference raises the limit"
        )


def check_references(files: list[Path], stored: Mapping[str, StoredTensor]) -> list[str]:
    """See that the graphs hold no weight and reach each weight by one name and one range.

    Returns:
        The names of stored weights that no graph uses.

    Raises:
        ExportError: a graph holds a weight, or refers to a range that is no weight's.
    """
    used: set[str] = set()
    for file in files:
        tensors = external_tensors(file)
        ranges = Counter(tensors.values())
        for name, place in tensors.items():
            weight = stored.get(name)
            if weight is None or place != (weight.offset, weight.num_bytes) or ranges[place] > 1:
                raise ExportError(f"{file.name} reaches {name} at a wrong range {place}: a bug")
        used |= tensors.keys()
    return sorted(stored.keys() - used)


def external_tensors(file: Path) -> dict[str, tuple[int, int]]:
    """The (offset, length) of each external initializer of a graph, by name.

    Raises:
        ExportError: an initializer over 4 kB is in the graph itself.
    """
    graph = onnx.load(file, load_external_data=False).graph
    external: dict[str, tuple[int, int]] = {}
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            external[tensor.name] = (int(place["offset"]), int(place["length"]))
        elif tensor.ByteSize() > _SMALL_BYTES:
            raise ExportError(f"{file.name} holds {tensor.name} itself: a bug")
    return external


def draw_samples(config: AlbertConfig) -> Iterator[_Sample]:
    """Random ids: a ragged batch, an unpadded one, and one sequence of all positions."""
    generator = np.random.default_rng(0)
    longest = config.max_positions
    for lengths in (*_BATCHES, (longest,)):
        lengths_B = np.minimum(lengths, longest).astype(np.int32)
        shape = (len(lengths), int(lengths_B.max()))
        yield _Sample(
            ids=generator.integers(0, config.vocab_size, shape),
            types=generator.integers(0, config.num_token_types, shape),
            lengths=lengths_B,
        )


def _torch_rows(model: AlbertForTasks, sample: _Sample) -> Floats:
    """The hidden states that torch gives at real positions, (R, H)."""
    batch = Batch(
        ids=torch.from_numpy(sample.ids),
        types=torch.from_numpy(sample.types),
        lengths=torch.from_numpy(sample.lengths).long(),
    )
    with torch.inference_mode():
        hidden_BSH: Floats = model(batch).numpy()
    return hidden_BSH[sample.is_real]


def _runtime_rows(encoder: onnxruntime.InferenceSession, sample: _Sample) -> Floats:
    """The graph's hidden states at real positions, (R, H)."""
    feed: dict[str, NDArray[Any]] = {
        "input_ids": sample.ids,
        "token_type_ids": sample.types,
        "lengths": sample.lengths,
    }
    return _run(encoder, feed)[sample.is_real]


def _pick_rows(batches: list[Floats]) -> Floats:
    half = _NUM_ROWS // 2
    return np.concatenate(
        [part for rows_RH in batches for part in (rows_RH[:half], rows_RH[-half:])]
    )


def _larger(worst: float, expected: Floats, got: Floats) -> float:
    """The larger difference; NaN stays NaN."""
    return float(np.maximum(worst, np.abs(expected - got).max()))


def _session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own errors share no base of their own
        raise ExportError(f"the runtime cannot load {file.name}: {error}") from error


def _run(session: onnxruntime.InferenceSession, feed: Mapping[str, NDArray[Any]]) -> Floats:
    try:
        (output,) = session.run(None, dict(feed))
    except Exception as error:
        raise ExportError(f"the runtime cannot run the graph: {error}") from error
    result: Floats = output
    return result
