"""The bundle's folder: written beside its place, checked, and only then moved there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

import albert_serve
from albert_serve.bundle import (
    ENCODER_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Bundle,
    FileEntry,
    Manifest,
    file_entry,
)
from export.encoder import build_encoder
from export.errors import ExportError
from export.heads import build_head
from export.source import SPIECE_FILE, Source, read_source
from export.verify import check_parity, check_references, measure_parity
from training.checkpoint import load_checkpoint
from training.vocab import build_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export gave.

    Attributes:
        unused: names of the checkpoint's weights that no graph reads.
    """

    bundle: Bundle
    unused: list[str]


def export_bundle(
    checkpoint: Path,
    target: Path,
    *,
    evaluation: Mapping[str, Any] | None = None,
    max_difference: float = 1e-4,
    overwrite: bool = False,
) -> Exported:
    """Write a checkpoint as a bundle; the target appears whole or not at all.

    Args:
        checkpoint: a Hugging Face directory.
        target: the folder to write.
        evaluation: results by name; they stand before those of the checkpoint's
            `evaluation.json`.
        max_difference: the largest absolute difference from torch that is let through.
        overwrite: whether a bundle that is at the target is replaced.

    Raises:
        ExportError: the checkpoint cannot be exported, the graphs differ from torch, or the
            target is there or cannot be written.
        CheckpointError, ConfigError, BundleCorruptError: see `read_source`.
        VocabError: there is only a `spiece.model`, and it is not ALBERT's.
    """
    target = target.resolve()
    _check_target(checkpoint.resolve(), target, overwrite)
    source = read_source(checkpoint)
    with _partial_folder(target) as folder:
        graphs = _write_graphs(source, folder)
        _write_tokenizer(source, folder)
        _link_or_copy(source.weights_file, folder / WEIGHTS_FILE)
        unused = check_references(graphs, source.stored)
        parity = measure_parity(
            folder, source.tasks, load_checkpoint(checkpoint, source.num_outputs)
        )
        check_parity(parity, max_difference)
        manifest = Manifest(
            config=source.config.to_hf(),
            tasks=source.tasks,
            files=_describe_files(folder),
            parity=parity,
            evaluation={**source.evaluation, **(evaluation or {})},
            provenance=_provenance(source),
        )
        content = manifest.model_dump_json(indent=2, exclude_none=True)
        (folder / MANIFEST_FILE).write_text(content + "\n", encoding="utf-8")
        Bundle.open(folder, verify="size")
        _move(folder, target)
    return Exported(bundle=Bundle.open(target, verify="size"), unused=unused)


def _check_target(checkpoint: Path, target: Path, overwrite: bool) -> None:
    """Refuse before any work is done; never let a folder be replaced that is no bundle."""
    if target in (checkpoint, *checkpoint.parents):
        raise ExportError(f"{target} holds the checkpoint itself; choose another folder")
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / MANIFEST_FILE).is_file()):
        raise ExportError(f"{target} is there and is no bundle; choose another folder")
    if not overwrite:
        raise ExportError(f"{target} is there already; --overwrite replaces it")


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """A new folder beside the target, gone afterwards unless it was moved."""
    folder = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ExportError(f"{target.parent} cannot be written to: {error}") from error
    try:
        yield folder
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_graphs(source: Source, folder: Path) -> list[Path]:
    graphs = {ENCODER_FILE: build_encoder(source.config, source.stored)}
    for task, entry in source.tasks.items():
        graphs[entry.graph] = build_head(source.config, task, entry.num_outputs, source.stored)
    for name, model in graphs.items():
        onnx.save(model, folder / name)
    return [folder / name for name in graphs]


def _write_tokenizer(source: Source, folder: Path) -> None:
    file = folder / TOKENIZER_FILE
    if (source.folder / TOKENIZER_FILE).is_file():
        shutil.copyfile(source.folder / TOKENIZER_FILE, file)
    else:
        build_tokenizer(source.folder / SPIECE_FILE).save(str(file))
    try:
        num_ids = max(Tokenizer.from_file(str(file)).get_vocab().values(), default=-1) + 1
    except Exception as error:  # tokenizers raises plain Exception
        raise ExportError(f"{source.folder / TOKENIZER_FILE} cannot be read: {error}") from error
    if num_ids > source.config.vocab_size:
        raise ExportError(
            f"the tokenizer of {source.folder} has {num_ids} pieces; the model has embeddings for "
            f"{source.config.vocab_size}. They are not of one checkpoint"
        )


def _link_or_copy(source: Path, target: Path) -> None:
    """One file under two names where the file system can, so that a bundle costs no disk."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _describe_files(folder: Path) -> dict[str, FileEntry]:
    files = sorted(folder.iterdir())
    bar = tqdm(files, desc="hashing", disable=None, delay=3, leave=False)
    return {file.name: file_entry(file) for file in bar}


def _provenance(source: Source) -> dict[str, Any]:
    return {
        "checkpoint": source.folder.resolve().name,
        "albert_serve": albert_serve.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "torch": str(torch.__version__),
        "training": source.training,
    }


def _move(folder: Path, target: Path) -> None:
    """Put the folder in the target's place; what was there stays if that fails."""
    if not target.exists():
        folder.rename(target)
        return
    old = folder.with_suffix(".old")
    target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)
