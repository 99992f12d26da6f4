"""Tiny checkpoints, their bundles, and runs of the bundles' graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto
from tokenizers import Tokenizer, models

from albert_serve.config import AlbertConfig
from albert_serve.runtime.encoders import PaddedBatch
from export.job import ExportConfig, ExportResult, export
from tests.training import support
from training.data.corpus import read_documents
from training.model.albert import ModelInputs
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, Task, head_sizes
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.training import train_vocab

Floats = NDArray[np.float32]
ALL_TASKS: Final[tuple[Task, ...]] = (
    "fill-mask", "sentence-order", "text-classification", "question-answering",
)  # fmt: skip
TINY: Final = replace(support.TINY, max_positions=30)


def write_tokenizer(folder: Path, num_pieces: int = 20) -> None:
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *(f"▁{i}" for i in range(num_pieces - len(special)))]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 1, False))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_checkpoint(
    folder: Path, config: AlbertConfig = TINY, tasks: tuple[Task, ...] = ALL_TASKS
) -> AlbertForTasks:
    """Write a checkpoint with random weights; return its model."""
    model = AlbertForTasks(config, head_sizes(config, tasks))
    support.randomize(model, seed=0)
    save_checkpoint(model.eval(), folder)
    write_tokenizer(folder)
    return model


def write_real_checkpoint(folder: Path, config: AlbertConfig, scale: float = 1.0) -> Path:
    """Write a checkpoint with scaled random weights and a vocabulary that was trained on text."""
    vocab = folder.with_name("vocab")
    spiece = train_vocab(read_documents([support.WIKI]), vocab, vocab_size=config.vocab_size)
    build_tokenizer(spiece).save(str(vocab / "tokenizer.json"))
    model = AlbertForTasks(config, head_sizes(config, ALL_TASKS))
    support.randomize(model, seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    labels = {"id2label": {"0": "negative", "1": "positive"}}
    save_checkpoint(model.eval(), folder, tokenizer_from=vocab, extra_config=labels)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


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
