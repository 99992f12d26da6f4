"""Verification of a bundle's graphs, which compute what torch does.

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
from export.graph import Compute, Form, rounded
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks

# Lengths of the sequences of each batch: ragged from 1 up, unpadded; the longest is added.
_BATCHES: Final = ((1, 2, 3, 8, 21), (33, 33))
_NUM_ROWS: Final = 32  # of a batch are given to a head, first and last ones
# Of the largest value: fp16 rounds to 0.05 %, bf16 to 0.4 %, and roundings add up over the layers.
# A trained model of four layers had 0.002 and 0.02 at most, random weights, which amplify what
# trained ones do not, 0.034 and 0.071; a wrong graph has about 1.
MAX_CUDA_SHARE: Final[Mapping[Compute, float]] = {"fp32": 1e-4, "fp16": 0.06, "bf16": 0.3}

_Floats = NDArray[np.float32]


def measure_parity(
    folder: Path, heads: Mapping[str, HeadEntry], model: AlbertForTasks
) -> dict[str, float]:
    """Return the largest difference from torch, of "encoder" and of each head's logits.

    Differences are shares of the largest value that torch has, or of 1 where all are smaller: the
    numbers that a regression answers may be of any size.
    Batches are random and ragged, with lengths from 1 to all positions; padding is left out of
    the comparison. A head is given its runtime's own hidden states, so its figure is end to end.
    """
    files = {head: folder / entry.graph for head, entry in heads.items()}
    return _measure(folder / ENCODER_FILE, files, model, special_ids(folder))


def measure_cuda_parity(
    folder: Path, heads: Mapping[str, HeadEntry], model: AlbertForTasks, form: Form
) -> dict[str, float]:
    """Return the same of the graphs for CUDA, with the roundings of their form, on the CPU.

    Args:
        folder: the bundle's.
        heads: its heads.
        model: the bundle's own weights in torch (`restore_weights`).
        form: the form of its encoder for CUDA.
    """
    files = {}
    for head, entry in heads.items():
        cuda_head = (folder / entry.graph).with_suffix(CUDA_SUFFIX)
        files[head] = cuda_head if cuda_head.exists() else folder / entry.graph
    emulated = folder / ".emulated.onnx"  # in the folder of the weights that it refers to
    graph = onnx.load(folder / CUDA_ENCODER_FILE, load_external_data=False)
    onnx.save(rounded(graph, form), emulated)
    try:
        return _measure(emulated, files, model, special_ids(folder))
    finally:
        emulated.unlink()


def special_ids(folder: Path) -> SpecialIds:
    """Return the special tokens of a folder's tokenizer."""
    try:
        return AlbertTokenizer.from_file(folder / TOKENIZER_FILE).special
    except BundleError as error:
        raise ExportError(str(error)) from error


def _measure(
    encoder_file: Path, head_files: Mapping[str, Path], model: AlbertForTasks, special: SpecialIds
) -> dict[str, float]:
    model.eval()
    worst: dict[str, _Floats] = {}
    try:
        encoder = Encoder(session=open_session(encoder_file, encoder_options(RuntimeOptions())))
        heads = {task: open_session(file, head_options()) for task, file in head_files.items()}
        batches = list(random_batches(model.config, special))
        for batch in progress(batches, title="comparing with torch", unit="batches"):
            hidden_BSH = encoder.run(batch).numpy()
            for name, difference in _differences(model, heads, batch, hidden_BSH):
                worst[name] = np.maximum(worst.get(name, 0), difference)  # NaN stays NaN
    except AlbertServeError as error:
        raise ExportError(str(error)) from error
    except Exception as error:  # the runtime's exceptions share no base but this
        raise ExportError(f"the runtime cannot run the graphs: {error}") from error
    return {name: float(value / max(1.0, largest)) for name, (value, largest) in worst.items()}


def check_parity(
    parity: Mapping[str, float], limit: float, *, graphs: str = "the graphs", advice: str
) -> None:
    """Check that no difference is over the limit.

    Args:
        graphs: what is compared, in words.
        advice: what can be done.
    """
    over = {name: value for name, value in parity.items() if not value <= limit}
    if over:
        listed = ", ".join(f"{name} {value:.2e}" for name, value in over.items())
        raise ExportError(
            f"{graphs} differ from torch by {listed}; allowed is {limit:.0e}. Nothing was written. "
            f"{advice}"
        )


def random_batches(config: AlbertConfig, special: SpecialIds) -> Iterator[PaddedBatch]:
    """Random ids: a ragged batch, an unpadded one, and one sequence of all positions.

    As in real inputs, each begins with [CLS] and ends with [SEP], and one token is [MASK]: it is
    at these that trained models have their largest values.
    """
    generator = np.random.default_rng(0)
    longest = config.max_positions
    for lengths in (*_BATCHES, (longest,)):
        lengths_B = np.minimum(lengths, longest).astype(np.int64)
        shape = (len(lengths), int(lengths_B.max()))
        ids_BS = generator.integers(0, config.vocab_size, shape)
        every_B = np.arange(len(lengths))
        for place_B, token in (
            (0, special.cls),
            (lengths_B // 2, special.mask),
            (lengths_B - 1, special.sep),
        ):
            ids_BS[every_B, place_B] = token
        yield PaddedBatch(
            ids=ids_BS,
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
    heads: Mapping[str, onnxruntime.InferenceSession],
    batch: PaddedBatch,
    hidden_BSH: _Floats,
) -> Iterator[tuple[str, _Floats]]:
    """Yield the largest difference on this batch, and torch's largest value, of each graph."""
    expected_RH = model(torch_batch(batch)).flatten(0, 1)
    real = _real_rows(batch)
    got_RH = hidden_BSH.reshape(expected_RH.shape)
    yield "encoder", _compare(expected_RH[real], got_RH[real])
    rows = np.unique(np.concatenate([real[: _NUM_ROWS // 2], real[-_NUM_ROWS // 2 :]]))
    for task, head in heads.items():
        (got_RK,) = head.run(None, {"hidden_states": hidden_BSH, "rows": rows})
        yield task, _compare(model.logits(task, expected_RH[rows]), got_RK)


def torch_batch(batch: PaddedBatch) -> ModelInputs:
    """Return the same ids, types and lengths in torch."""
    return ModelInputs(
        ids=torch.from_numpy(batch.ids),
        types=torch.from_numpy(batch.types),
        lengths=torch.from_numpy(batch.lengths),
    )


def _compare(expected: torch.Tensor, got: _Floats) -> _Floats:
    reference = expected.numpy()
    return np.array([np.abs(reference - got).max(), np.abs(reference).max()])
