"""A cache on disk of encoders with weights pre-packed for this machine's CPU.

A process that packs the weights itself has a private copy; one that maps the pre-packed copy shares
its pages with all others. An entry is made once for a bundle, a processor and a version of the
runtime, in a folder named by their hash; it may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from albert_serve.bundle.manifest import ENCODER_FILE, WEIGHTS_FILE, Bundle, FileEntry, file_entry
from albert_serve.bundle.weights import WORDS, read_header, stored_name
from albert_serve.errors import BundleCorruptError
from albert_serve.runtime.ort import cpu_name, encoder_options, open_session
from albert_serve.settings import RuntimeOptions

_GRAPH: Final = "encoder.onnx"
PACKED_FILE: Final = "encoder.data"
_ENTRY: Final = "entry.json"
_LAYOUT: Final = 1
_NUMPY_TYPES: Final = {"F32": np.float32, "F16": np.float16, "I8": np.int8}
_logger = logging.getLogger(__name__)


class _Entry(BaseModel):
    """The sources of an entry, and its files."""

    model_config = ConfigDict(frozen=True)

    weights: str
    graph: str
    runtime: str
    cpu: str
    layout: int = _LAYOUT
    files: dict[str, FileEntry] = {}

    @property
    def key(self) -> str:
        """The name of the entry's folder."""
        sources = json.dumps(self.model_dump(exclude={"files"}), sort_keys=True)
        return hashlib.sha256(sources.encode()).hexdigest()[:32]


def packed_encoder(bundle: Bundle, options: RuntimeOptions) -> Path | None:
    """Return the encoder's graph with pre-packed weights, made now if it is missing.

    Returns None, and logs the reason, if the cache cannot be written.
    """
    assert options.cache_folder is not None
    entry = _describe(bundle)
    folder = options.cache_folder / entry.key
    try:
        if _is_whole(folder, entry):
            return folder / _GRAPH
        options.cache_folder.mkdir(parents=True, exist_ok=True)
        # Of workers that start together, one packs and the others wait.
        with FileLock(options.cache_folder / ".lock"):
            if not _is_whole(folder, entry):
                _make(bundle, options, entry, folder)
    except OSError as error:
        reason = " ".join(str(error).split())
        _logger.warning("no packed weights are kept in %s: %s", options.cache_folder, reason)
        return None
    return folder / _GRAPH


def map_words(bundle: Bundle) -> tuple[str, ort.OrtValue]:
    """Return the word embeddings' name in the graphs, and their pages in the bundle.

    They replace an entry's own copy, so that encoder and heads read the same pages. They are never
    packed, because their rows are looked up.
    """
    stored = read_header(bundle.weights_file)
    name = stored_name(WORDS, stored)
    words = stored[name]
    pages = np.memmap(
        bundle.weights_file, _NUMPY_TYPES[words.dtype], "r", words.offset, words.shape
    )
    return name, ort.OrtValue.ortvalue_from_numpy(pages)


def _describe(bundle: Bundle) -> _Entry:
    files = bundle.manifest.files
    return _Entry(
        weights=files[WEIGHTS_FILE].sha256,
        graph=files[ENCODER_FILE].sha256,
        runtime=ort.__version__,
        cpu=cpu_name(),
    )


def _is_whole(folder: Path, expected: _Entry) -> bool:
    """Whether an entry exists, has the expected sources, and matches its checksums."""
    try:
        entry = _Entry.model_validate_json((folder / _ENTRY).read_bytes())
        same = entry.key == expected.key and {_GRAPH, PACKED_FILE} <= entry.files.keys()
        return same and all(file_entry(folder / name) == file for name, file in entry.files.items())
    except (OSError, ValidationError):
        return False


def _make(bundle: Bundle, options: RuntimeOptions, entry: _Entry, folder: Path) -> None:
    """Write an entry to a temporary folder, and rename it when it is complete."""
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        session_options = encoder_options(options)
        session_options.optimized_model_filepath = str(partial / _GRAPH)
        for key, value in {
            "session.save_external_prepacked_constant_initializers": "1",
            "session.optimized_model_external_initializers_file_name": PACKED_FILE,
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }.items():
            session_options.add_session_config_entry(key, value)
        _write_packed(bundle.encoder_file, session_options)
        files = {name: file_entry(partial / name) for name in (_GRAPH, PACKED_FILE)}
        content = entry.model_copy(update={"files": files}).model_dump_json(indent=2)
        (partial / _ENTRY).write_text(content, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _remove_stale_entries(folder, entry)


def _write_packed(graph: Path, options: ort.SessionOptions) -> None:
    """Have the runtime write the packed weights.

    Raises:
        OSError: the runtime cannot write them.
    """
    try:
        open_session(graph, options)
    except BundleCorruptError as error:
        raise OSError(
            f"the runtime could not write them; is there room for twice the weights? ({error})"
        ) from error


def _remove_stale_entries(folder: Path, entry: _Entry) -> None:
    """Delete entries of the same bundle for another processor or version of the runtime."""
    for other in folder.parent.glob(f"*/{_ENTRY}"):
        with contextlib.suppress(OSError, ValidationError):
            other_entry = _Entry.model_validate_json(other.read_bytes())
            if other.parent != folder and other_entry.weights == entry.weights:
                shutil.rmtree(other.parent)
