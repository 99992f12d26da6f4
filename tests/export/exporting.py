"""Tiny checkpoints to export, and the runtime that runs the exported graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from tokenizers import Tokenizer, models

from albert_serve.config import AlbertConfig
from albert_serve.runtime.encoders import PaddedBatch
from export.job import ExportConfig, ExportResult, export
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, Task, head_sizes

ALL_TASKS: tuple[Task, ...] = (
    "fill-mask", "sentence-order", "text-classification", "question-answering",
)  # fmt: skip
TINY = AlbertConfig(
    vocab_size=50,
    embedding_size=12,
    hidden_size=24,
    num_layers=4,
    num_heads=3,
    ffn_size=40,
    max_positions=30,
)
Floats = NDArray[np.float32]


def ragged(config: AlbertConfig, seed: int = 1) -> PaddedBatch:
    """Sequences of one token to all positions."""
    generator = np.random.default_rng(seed)
    shape = (4, config.max_positions)
    return PaddedBatch(
        ids=generator.integers(0, config.vocab_size, shape),
        types=generator.integers(0, config.num_token_types, shape),
        lengths=np.array([1, 7, 2, config.max_positions], np.int64),
    )


def is_real(batch: PaddedBatch) -> NDArray[np.bool_]:
    """Whether each position (B, S) has a token."""
    return np.arange(batch.ids.shape[1]) < batch.lengths[:, None]


def randomize(module: torch.nn.Module, seed: int = 0) -> None:
    """Set weights for which every bias and norm matters; in a new model they do not."""
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            parameter.normal_(std=0.3)
            if "orm" in name and name.endswith("weight"):
                parameter.add_(1.0)


def write_tokenizer(folder: Path, num_pieces: int = 20) -> None:
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *(f"▁{i}" for i in range(num_pieces - len(special)))]
    model = models.Unigram([(piece, -1.0) for piece in pieces], 1, False)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_checkpoint(
    folder: Path, config: AlbertConfig = TINY, tasks: tuple[Task, ...] = ALL_TASKS
) -> AlbertForTasks:
    """Write a checkpoint with random weights; return its model."""
    model = AlbertForTasks(config, head_sizes(config, tasks))
    randomize(model)
    save_checkpoint(model.eval(), folder)
    write_tokenizer(folder)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def export_bundle(checkpoint: Path, target: Path, **options: Any) -> ExportResult:
    """Write a bundle that is not compared with torch, unless the options say so."""
    return export(
        ExportConfig(**{"checkpoint": checkpoint, "bundle": target, "quality": False, **options})
    )


def run_encoder(bundle: Path, batch: PaddedBatch, graph: str = "encoder.onnx") -> Floats:
    """Return hidden states (B, S, H)."""
    return run_graph(bundle / graph, batch.graph_inputs())


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
