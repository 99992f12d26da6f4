"""Files of a bundle, written under a temporary name and verified before the folder is renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import onnx
import onnxruntime
import torch
from tokenizers import Tokenizer

import albert_serve
from albert_serve.bundle.manifest import (
    CUDA_ENCODER_FILE,
    CUDA_SUFFIX,
    ENCODER_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    FileEntry,
    Manifest,
    file_entry,
)
from albert_serve.bundle.weights import read_header
from albert_serve.files import replace_folder
from albert_serve.progress import progress
from export.config import ExportConfig, ExportError
from export.graph import CUDA_VERSION, GraphVersion
from export.models import build_encoder, build_head
from export.precision import largest_inputs, write_weights
from export.source import HUGGING_FACE_FILES, Source
from export.verify import (
    MAX_CUDA_DIFFERENCES,
    check_parity,
    measure_cuda_parity,
    special_ids,
)
from export.verify import measure_parity as measure_cpu_parity
from training.conversion.weight_files import restore_weights
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks

_CONFIG_FILE: Final = "config.json"


def write_files(
    source: Source, folder: Path, model: AlbertForTasks, config: ExportConfig
) -> list[str]:
    """Write the tokenizer, weights and graphs; return the names of weights that no head reads."""
    _write_tokenizer(source, folder)
    weights = folder / WEIGHTS_FILE
    if config.precision == "fp32":
        _copy_hugging_face_files(source, folder)
        _link_or_copy(source.weights_file, weights)
    else:
        largest = largest_inputs(model, special_ids(folder), source.tensors)
        write_weights(source, weights, config.precision, config.keep_fp32, largest)
    _write_graphs(source, folder, _cuda_version(config))
    return sorted(source.tensors.keys() - source.needed_names)


def _cuda_version(config: ExportConfig) -> GraphVersion:
    return replace(CUDA_VERSION, compute=config.cuda_precision)


def measure_parity(
    source: Source, folder: Path, model: AlbertForTasks, config: ExportConfig
) -> tuple[dict[str, float], dict[str, float]]:
    """Return how much the graphs for the CPU, and the emulated ones for CUDA, differ from torch."""
    parity = measure_cpu_parity(folder, source.heads, model)
    if config.precision == "fp32":
        advice = "If the weights are correct, raise the limit with --max-difference."
        check_parity(parity, config.max_difference, advice=advice)
    cuda_parity = _measure_cuda_parity(source, folder, model, config)
    compute, limit = config.cuda_precision, config.max_cuda_difference
    check_parity(
        cuda_parity,
        MAX_CUDA_DIFFERENCES[compute] if limit is None else limit,
        graphs=f"The graphs for CUDA in {compute}",
        advice=f"If a difference is nan, a value is too large for {compute}: use --cuda-precision "
        "bf16 or fp32. Otherwise, raise the limit with --max-cuda-difference.",
    )
    return parity, cuda_parity


def check_target(checkpoint: Path, target: Path, overwrite: bool) -> None:
    """Check that the target does not exist, or is a bundle that may be replaced."""
    folder = checkpoint.resolve()
    if checkpoint.exists() and target in (folder, *folder.parents):
        raise ExportError(f"{target} contains the checkpoint itself. Choose another folder.")
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / MANIFEST_FILE).is_file()):
        raise ExportError(f"{target} exists but is not a bundle. Choose another folder.")
    if not overwrite:
        raise ExportError(f"{target} already exists. Use --overwrite to replace it.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Create a folder that replaces the target at the end of the `with` block."""
    try:
        with replace_folder(target) as folder:
            yield folder
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error}") from error


def _write_graphs(source: Source, folder: Path, cuda_version: GraphVersion) -> None:
    tensors = read_header(folder / WEIGHTS_FILE)
    graphs = {
        ENCODER_FILE: build_encoder(source.config, tensors),
        CUDA_ENCODER_FILE: build_encoder(source.config, tensors, cuda_version),
    }
    for head, entry in source.heads.items():
        size = entry.num_outputs
        graphs[entry.graph] = cpu_head = build_head(source.config, head, size, tensors)
        cuda_head = build_head(source.config, head, size, tensors, cuda_version)
        if cuda_head != cpu_head:  # the two differ only in int8
            graphs[str(Path(entry.graph).with_suffix(CUDA_SUFFIX))] = cuda_head
    for name, model in graphs.items():
        onnx.save(model, folder / name)


def _measure_cuda_parity(
    source: Source, folder: Path, model: AlbertForTasks, config: ExportConfig
) -> dict[str, float]:
    """Compare the graphs for CUDA with a torch model that has the bundle's rounded weights."""
    cuda_version = _cuda_version(config)
    if config.precision == "fp32":
        return measure_cuda_parity(folder, source.heads, model, cuda_version)
    with tempfile.TemporaryDirectory() as restored:
        shutil.copyfile(source.folder / _CONFIG_FILE, Path(restored) / _CONFIG_FILE)
        restore_weights(folder / WEIGHTS_FILE, Path(restored) / WEIGHTS_FILE)
        rounded_model = load_checkpoint(Path(restored), source.num_outputs)
        return measure_cuda_parity(folder, source.heads, rounded_model, cuda_version)


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write `manifest.json`."""
    content = manifest.model_dump_json(indent=2, exclude_none=True)
    (folder / MANIFEST_FILE).write_text(content + "\n", encoding="utf-8")


def _write_tokenizer(source: Source, folder: Path) -> None:
    """Write the tokenizer as compact JSON, because white space is half of some files."""
    file = source.folder / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ExportError(f"{file} cannot be read: {error}") from error
    (folder / TOKENIZER_FILE).write_bytes(tokenizer.to_str().encode())
    num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    if num_ids > source.config.vocab_size:
        raise ExportError(
            f"The tokenizer of {source.folder} has {num_ids} pieces; the model has embeddings for "
            f"{source.config.vocab_size}. Use the tokenizer that the model was trained with."
        )


def _copy_hugging_face_files(source: Source, folder: Path) -> None:
    """Copy the files that make the bundle a checkpoint for transformers and for training."""
    for name in HUGGING_FACE_FILES:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)


def _link_or_copy(source: Path, target: Path) -> None:
    """Copy a file, or hard-link it if every user may read it and the file system has links."""
    is_readable = source.stat().st_mode & 0o444 == 0o444
    try:
        if is_readable:
            os.link(source.resolve(), target)
    except OSError:
        is_readable = False
    if not is_readable:
        shutil.copyfile(source, target)


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Return the size and hash of each file in a folder, by name."""
    files = sorted(folder.iterdir())
    return {file.name: file_entry(file) for file in progress(files, title="hashing", unit="files")}


def provenance(source: Source, checkpoint: str) -> dict[str, Any]:
    """Return the origin of a bundle: the checkpoint, its training, and the versions of packages."""
    return {
        "checkpoint": checkpoint,
        "albert_serve": albert_serve.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "torch": str(torch.__version__),
        "training": source.training,
    }
