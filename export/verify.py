"""Comparison of a bundle's graphs with torch.

Shape legend: B sequences, S positions, H hidden size, R rows, K outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray

from albert_serve.bundle.manifest import (
    CUDA_ENCODER_FILE,
    CUDA_SUFFIX,
    ENCODER_FILE,
    TOKENIZER_FILE,
    HeadEntry,
)
from albert_serve.config import AlbertConfig
from albert_serve.errors import AlbertServeError, BundleError
from albert_serve.progress import progress
from albert_serve.runtime.encoders import Encoder, PaddedBatch
from albert_serve.runtime.ort import encoder_options, head_options, open_session
from albert_serve.settings import RuntimeOptions
from albert_serve.tokenizer import AlbertTokenizer, SpecialIds
from export.config import ExportError
from export.graph import Compute, GraphVersion, emulate_rounding
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks

# Sequence lengths in two batches. `random_batches` adds a batch of the maximum length.
_BATCHES: Final = ((1, 2, 3, 8, 21), (33, 33))
# Number of rows that a head reads: half from the start of a batch and half from its end.
_NUM_ROWS: Final = 32
# Fractions of the largest value. fp16 rounds to 0.05 %, bf16 to 0.4 %, and errors add up over the
# layers. A trained model of four layers differed by 0.002 in fp16 and 0.02 in bf16. Random weights
# amplify errors: they differed by 0.034 and 0.071. A wrong graph differs by about 1.
MAX_CUDA_DIFFERENCES: Final[Mapping[Compute, float]] = {"fp32": 1e-4, "fp16": 0.06, "bf16": 0.3}

_Floats = NDArray[np.float32]


def measure_parity(
    folder: Path, heads: Mapping[str, HeadEntry], model: AlbertForTasks
) -> dict[str, float]:
    """Return the largest difference from torch of each graph: "encoder" and the heads.

    A difference is a fraction of torch's largest value, or of 1 if all values are smaller. Batches
    are random, with lengths from 1 to the maximum. Padding is ignored. A head reads the hidden
    states of the runtime, so its difference includes the encoder's.
    """
    files = {head: folder / entry.graph for head, entry in heads.items()}
    return _measure(folder / ENCODER_FILE, files, model, special_ids(folder))


def measure_cuda_parity(
    folder: Path, heads: Mapping[str, HeadEntry], model: AlbertForTasks, version: GraphVersion
) -> dict[str, float]:
    """Return how much the graphs for CUDA, with rounding emulated on the CPU, differ from torch.

    Args:
        folder: folder of the bundle.
        heads: heads of the bundle.
        model: torch model with the bundle's weights (`restore_weights`).
        version: version of the encoder for CUDA.
    """
    files = {}
    for head, entry in heads.items():
        cuda_head = (folder / entry.graph).with_suffix(CUDA_SUFFIX)
        files[head] = cuda_head if cuda_head.exists() else folder / entry.graph
    emulated = folder / ".emulated.onnx"  # in the folder of the weights that it refers to
    graph = onnx.load(folder / CUDA_ENCODER_FILE, load_external_data=False)
    onnx.save(emulate_rounding(graph, version), emulated)
    try:
        return _measure(emulated, files, model, special_ids(folder))
    finally:
        emulated.unlink()


def special_ids(folder: Path) -> SpecialIds:
    """Return the ids of the special tokens of a folder's tokenizer."""
    try:
        return AlbertTokenizer.from_file(folder / TOKENIZER_FILE).special
    except BundleError as error:
        raise ExportError(str(error)) from error


def _measure(
    encoder_file: Path, head_files: Mapping[str, Path], model: AlbertForTasks, special: SpecialIds
) -> dict[str, float]:
    model.eval()
    largest: dict[str, _Floats] = {}
    try:
        encoder = Encoder(session=open_session(encoder_file, encoder_options(RuntimeOptions())))
        heads = {task: open_session(file, head_options()) for task, file in head_files.items()}
        batches = list(random_batches(model.config, special))
        for batch in progress(batches, title="comparing with torch", unit="batches"):
            hidden_BSH = encoder.run(batch).numpy()
            for name, difference in _differences(model, heads, batch, hidden_BSH):
                largest[name] = np.maximum(largest.get(name, 0), difference)  # np.maximum keeps NaN
    except AlbertServeError as error:
        raise ExportError(str(error)) from error
    except Exception as error:  # the runtime's exceptions have no other common base
        raise ExportError(f"The runtime cannot run the graphs: {error}") from error
    return {name: float(value / max(1.0, scale)) for name, (value, scale) in largest.items()}


def check_parity(
    parity: Mapping[str, float], limit: float, *, graphs: str = "The graphs", advice: str
) -> None:
    """Check that no difference exceeds the limit.

    Args:
        parity: differences by graph.
        limit: maximum difference.
        graphs: name of the graphs in the message.
        advice: last sentence of the message.
    """
    failures = {name: value for name, value in parity.items() if not value <= limit}
    if failures:
        listed = ", ".join(f"{name} {value:.2e}" for name, value in failures.items())
        raise ExportError(
            f"{graphs} differ from torch by {listed}, as fractions of the largest value; the "
            f"limit is {limit:.0e}. Nothing was written. {advice}"
        )


def random_batches(config: AlbertConfig, special: SpecialIds) -> Iterator[PaddedBatch]:
    """Yield batches of random ids: a ragged one, an unpadded one, and one of maximum length.

    Each sequence begins with [CLS], ends with [SEP] and contains [MASK], because trained models
    have their largest values at these tokens.
    """
    generator = np.random.default_rng(0)
    max_length = config.max_positions
    for lengths in (*_BATCHES, (max_length,)):
        lengths_B = np.minimum(lengths, max_length).astype(np.int64)
        shape = (len(lengths), int(lengths_B.max()))
        ids_BS = generator.integers(0, config.vocab_size, shape)
        sequences_B = np.arange(len(lengths))
        for position_B, token in (
            (0, special.cls),
            (lengths_B // 2, special.mask),
            (lengths_B - 1, special.sep),
        ):
            ids_BS[sequences_B, position_B] = token
        yield PaddedBatch(
            ids=ids_BS,
            types=generator.integers(0, config.num_token_types, shape),
            lengths=lengths_B,
        )


def _token_rows(batch: PaddedBatch) -> NDArray[np.int64]:
    """Return the indices of the rows that are not padding, among the batch's B * S rows."""
    is_token_BS = np.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    return np.flatnonzero(is_token_BS)


@torch.inference_mode()
def _differences(
    model: AlbertForTasks,
    heads: Mapping[str, onnxruntime.InferenceSession],
    batch: PaddedBatch,
    hidden_BSH: _Floats,
) -> Iterator[tuple[str, _Floats]]:
    """Yield the largest difference of each graph on this batch, and torch's largest value."""
    expected_RH = model(torch_batch(batch)).flatten(0, 1)
    token_rows = _token_rows(batch)
    actual_RH = hidden_BSH.reshape(expected_RH.shape)
    yield "encoder", _compare(expected_RH[token_rows], actual_RH[token_rows])
    num_per_end = _NUM_ROWS // 2
    rows = np.unique(np.concatenate([token_rows[:num_per_end], token_rows[-num_per_end:]]))
    for task, head in heads.items():
        (actual_RK,) = head.run(None, {"hidden_states": hidden_BSH, "rows": rows})
        yield task, _compare(model.logits(task, expected_RH[rows]), actual_RK)


def torch_batch(batch: PaddedBatch) -> ModelInputs:
    """Return a batch as tensors."""
    return ModelInputs(
        ids=torch.from_numpy(batch.ids),
        types=torch.from_numpy(batch.types),
        lengths=torch.from_numpy(batch.lengths),
    )


def _compare(expected: torch.Tensor, actual: _Floats) -> _Floats:
    """Return the largest difference and the largest expected value, in an array (2,)."""
    reference = expected.numpy()
    return np.array([np.abs(reference - actual).max(), np.abs(reference).max()])
