"""Functions that write bundles and run their graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto

from albert_serve.runtime.encoders import PaddedBatch
from export.job import ExportConfig, ExportResult, export
from training.model.albert import ModelInputs

Floats = NDArray[np.float32]


def export_bundle(checkpoint: Path, target: Path, **options: Any) -> ExportResult:
    """Write a bundle; by default, without comparing its answers with torch's."""
    return export(
        ExportConfig(**{"checkpoint": checkpoint, "bundle": target, "quality": False, **options})
    )


def run_encoder(bundle: Path, batch: ModelInputs, graph: str = "encoder.onnx") -> Floats:
    """Return hidden states (B, S, H)."""
    assert batch.lengths is not None
    arrays = {"ids": batch.ids, "types": batch.types, "lengths": batch.lengths}
    padded = PaddedBatch(**{name: tensor.numpy() for name, tensor in arrays.items()})
    return run_graph(bundle / graph, padded.graph_inputs())


def run_head(bundle: Path, task: str, rows_RH: Floats) -> Floats:
    """Return logits (R, K) of all rows."""
    inputs = {"hidden_states": rows_RH[None], "rows": np.arange(len(rows_RH))}
    return run_graph(bundle / f"{task}.onnx", inputs)


def run_graph(file: Path, inputs: dict[str, Any]) -> Floats:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    result: Floats = session.run(None, inputs)[0]
    return result


def external_tensors(file: Path) -> dict[str, tuple[int, int]]:
    """Return the (offset, length) of each external initializer; check that others are small."""
    external: dict[str, tuple[int, int]] = {}
    for tensor in onnx.load(file, load_external_data=False).graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            external[tensor.name] = (int(entries["offset"]), int(entries["length"]))
        else:
            assert tensor.ByteSize() < 4096, tensor.name
    return external
