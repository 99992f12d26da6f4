"""Verification of a bundle's graphs.

The graphs compute what torch does, and they reach each weight exactly once.

Shape legend: B sequences, S positions, H hidden size, R rows, K outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from tqdm import tqdm

from albert_serve.bundle.manifest import ENCODER_FILE, TaskEntry
from albert_serve.bundle.weights import StoredTensor, TaskName
from albert_serve.config import AlbertConfig
from albert_serve.errors import AlbertServeError
from albert_serve.runtime.encoders import CpuEncoder, PaddedBatch
from albert_serve.runtime.ort import encoder_options, head_options, open_session
from albert_serve.settings import RuntimeOptions
from export.errors import ExportError
from training.model.albert import Batch
from training.model.heads import AlbertForTasks

# Lengths of the sequences of each batch: ragged from 1 up, unpadded; the longest is added.
_BATCHES: Final = ((1, 2, 3, 8, 21), (33, 33))
_NUM_ROWS: Final = 32  # of a batch are given to a head, first and last ones
_SMALL_BYTES: Final = 4096

Floats = NDArray[np.float32]


def measure_parity(
    folder: Path,
    tasks: Mapping[TaskName, TaskEntry],
    model: AlbertForTasks,
    *,
    encoder_file: str = ENCODER_FILE,
) -> dict[str, float]:
    """Return the largest absolute difference from torch, of "encoder" and of each task's logits.

    Batches are random and ragged, with lengths from 1 to all positions; padding is left out of
    the comparison. A head is given its runtime's own hidden states, so its figure is end to end.

    Raises:
        ExportError: the runtime cannot load or run a graph.
    """
    model.eval()
    worst = dict.fromkeys(("encoder", *tasks), 0.0)
    try:
        encoder = CpuEncoder(
            session=open_session(folder / encoder_file, encoder_options(RuntimeOptions()))
        )
        heads = {
            task: open_session(folder / entry.graph, head_options())
            for task, entry in tasks.items()
        }
        batches = list(random_batches(model.config))
        for batch in tqdm(batches, desc="comparing with torch", disable=None, delay=3, leave=False):
            hidden_BSH = encoder.run(batch).numpy()
            for name, difference in _differences(model, heads, batch, hidden_BSH):
                worst[name] = float(np.maximum(worst[name], difference))  # NaN stays NaN
    except AlbertServeError as error:
        raise ExportError(str(error)) from error
    except Exception as error:  # the runtime's exceptions share no base but this
        raise ExportError(f"the runtime cannot run the graphs: {error}") from error
    return worst


def check_parity(parity: Mapping[str, float], max_difference: float) -> None:
    """Check that no difference is over the limit.

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
    """Check that the graphs hold no weight and refer to each weight by one name and one range.

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
    """Return the (offset, length) of each external initializer of a graph, by name.

    Raises:
        ExportError: an initializer over 4 kB is in the graph itself.
    """
    external: dict[str, tuple[int, int]] = {}
    for tensor in _tensors(onnx.load(file, load_external_data=False).graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            external[tensor.name] = (int(place["offset"]), int(place["length"]))
        elif tensor.ByteSize() > _SMALL_BYTES:
            raise ExportError(f"{file.name} holds {tensor.name} itself: a bug")
    return external


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a graph, of its nodes and its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == onnx.AttributeProto.GRAPH:
                yield from _tensors(attribute.g)


def random_batches(config: AlbertConfig) -> Iterator[PaddedBatch]:
    """Random ids: a ragged batch, an unpadded one, and one sequence of all positions."""
    generator = np.random.default_rng(0)
    longest = config.max_positions
    for lengths in (*_BATCHES, (longest,)):
        lengths_B = np.minimum(lengths, longest).astype(np.int64)
        shape = (len(lengths), int(lengths_B.max()))
        yield PaddedBatch(
            ids=generator.integers(0, config.vocab_size, shape),
            types=generator.integers(0, config.num_token_types, shape),
            lengths=lengths_B,
        )


def _real_rows(batch: PaddedBatch) -> NDArray[np.int64]:
    """Return the unpadded rows of the batch's B * S."""
    is_real_BS = np.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    return np.flatnonzero(is_real_BS)


@torch.inference_mode()
def _differences(
    model: AlbertForTasks,
    heads: Mapping[TaskName, onnxruntime.InferenceSession],
    batch: PaddedBatch,
    hidden_BSH: Floats,
) -> Iterator[tuple[str, float]]:
    """Return the largest difference from torch on this batch, of the encoder and each head."""
    given = Batch(
        ids=torch.from_numpy(batch.ids),
        types=torch.from_numpy(batch.types),
        lengths=torch.from_numpy(batch.lengths),
    )
    expected_RH = model(given).flatten(0, 1)
    real = _real_rows(batch)
    got_RH = hidden_BSH.reshape(expected_RH.shape)
    yield "encoder", _largest(expected_RH[real], got_RH[real])
    rows = np.unique(np.concatenate([real[: _NUM_ROWS // 2], real[-_NUM_ROWS // 2 :]]))
    for task, head in heads.items():
        (got_RK,) = head.run(None, {"hidden_states": hidden_BSH, "rows": rows})
        yield task, _largest(model.logits(task, expected_RH[rows]), got_RK)


def _largest(expected: torch.Tensor, got: Floats) -> float:
    return float(np.abs(expected.numpy() - got).max())
