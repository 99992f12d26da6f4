"""Opening of checkpoints by folder or by name on the Hugging Face Hub, for all commands."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from albert_serve.bundle.manifest import MANIFEST_FILE
from albert_serve.bundle.sentence_vectors import SENTENCE_FILES
from albert_serve.errors import AlbertServeError
from albert_serve.files import local_path
from albert_serve.hub import HubModel, check_reachable, download
from albert_serve.settings import shipped_bundle
from training.conversion.standard import is_standard, write_standard
from training.conversion.weight_files import find_weights, missing_files, write_from_int8
from training.errors import TrainingError
from training.model.checkpoint import CheckpointError, check_config, read_config

REFERENCE_HELP: Final = (
    "checkpoint: a folder, or a model of the Hugging Face Hub such as albert/albert-base-v2 or "
    "albert/albert-base-v2@main"
)
_SMALL_FILES: Final = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt",
    "training.json", "evaluation.json", MANIFEST_FILE, "adapter_config.json",
    *SENTENCE_FILES,
)  # fmt: skip
_NUM_BYTES_CHECKED: Final = 256
_TEXT_SUFFIXES: Final = (".html", ".md")
_PAGE: Final = "a web page, such as the Hub's login page. Log in and download the file again."
# First bytes of files that a failed download leaves, and the message for each.
_PLACEHOLDERS: Final = MappingProxyType(
    {
        b"version https://git-lfs.": "a pointer of Git LFS, not the file. Run git lfs pull.",
        b"<!doctype html": _PAGE,
        b"<html": _PAGE,
    }
)
# File patterns by format. If a model has both formats, only the first is downloaded.
_WEIGHTS: Final = (
    ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint on this machine."""

    folder: Path
    name: str


@contextmanager
def open_checkpoint(reference: str | Path | None) -> Iterator[Checkpoint]:
    """Open a checkpoint of any format. Converted files are removed at the end of `with`.

    Args:
        reference: folder, or a model's id on the Hub, or `id@revision` (`files.local_path` tells
            them apart). None for the default model.
    """
    folder, name = _locate(shipped_bundle() if reference is None else reference)
    _check_files(folder)
    is_int8 = reference is None and not (folder / "config.json").is_file()
    if not is_int8 and is_standard(folder):
        yield Checkpoint(folder=folder, name=name)
        return
    with tempfile.TemporaryDirectory(prefix="albert-") as scratch:
        converted = Path(scratch) / "checkpoint"
        with _name_source(folder, converted):
            if is_int8:
                write_from_int8(folder, converted)
            else:
                write_standard(folder, converted)
            yield Checkpoint(folder=converted, name=name)


@contextmanager
def _name_source(folder: Path, converted: Path) -> Iterator[None]:
    """Name the source folder, not the converted folder, in errors within `with`."""
    try:
        yield
    except (TrainingError, AlbertServeError) as error:
        error.args = tuple(str(line).replace(str(converted), str(folder)) for line in error.args)
        raise


def _check_files(folder: Path) -> None:
    """Check that no file is the placeholder of a failed download."""
    for file in sorted(folder.glob("*")):
        if file.suffix in _TEXT_SUFFIXES or not file.is_file():
            continue
        with file.open("rb") as stream:
            first_bytes = stream.read(_NUM_BYTES_CHECKED).lstrip().lower()
        for prefix, reason in _PLACEHOLDERS.items():
            if first_bytes.startswith(prefix):
                raise CheckpointError(f"{file} is {reason}")


def _locate(reference: str | Path) -> tuple[Path, str]:
    """Return a checkpoint's folder and its name."""
    folder = local_path(reference)
    if folder is not None:
        if not folder.exists():
            raise CheckpointError(
                f"{reference} is a local path, but there is no such folder. If it is a run's "
                "folder, check the run's --output."
            )
        return folder, folder.resolve().name
    model = HubModel.parse(str(reference))
    if model is None:
        raise CheckpointError(
            f"{reference} is not a local folder, and not the name of a model on the Hugging Face "
            "Hub. Use OWNER/MODEL or OWNER/MODEL@REVISION."
        )
    folder = _download(model)
    return folder, f"{model.repo_id}@{folder.name}"


def _download(model: HubModel) -> Path:
    """Download a model's configuration and, if it is an ALBERT's, its weights."""
    folder = download(model, _SMALL_FILES)
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        check_reachable(model, "config.json")
        raise CheckpointError(f"{model} is not a transformers model: it has no config.json.")
    check_config(read_config(folder), model)
    pinned = HubModel(repo_id=model.repo_id, revision=folder.name)
    for patterns in _WEIGHTS:
        # huggingface_hub would warn if no file matched, so the patterns include config.json.
        folder = download(pinned, ("config.json", *patterns))
        weights = find_weights(folder)
        if weights is not None:
            if missing := missing_files(weights):
                check_reachable(model, missing[0])
            return folder
    check_reachable(model, "its weights")
    raise CheckpointError(
        f"{model} has no weights in a supported format: "
        f"neither {' nor '.join(patterns[0] for patterns in _WEIGHTS)}."
    )
