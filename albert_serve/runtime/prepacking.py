"""A disk cache of encoders whose weights are prepacked for this machine's CPU.

A process that packs weights has a private copy. A process that maps prepacked weights shares their
pages with other processes. There is one entry for each bundle, processor and version of the
runtime, in a folder that is named by their hash. Entries may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from albert_serve.bundle.manifest import ENCODER_FILE, WEIGHTS_FILE, Bundle, FileEntry, file_entry
from albert_serve.bundle.weights import WORDS, read_header, stored_name
from albert_serve.errors import BundleCorruptError
from albert_serve.files import replace_folder
from albert_serve.runtime.ort import cpu_name, encoder_options, open_session
from albert_serve.settings import RuntimeOptions

_GRAPH: Final = "encoder.onnx"
PACKED_FILE: Final = "encoder.data"
_ENTRY: Final = "entry.json"
_ENTRY_TYPE: Final = TypeAdapter(dict[str, FileEntry])
_LAYOUT: Final = 2
_NUMPY_TYPES: Final = {"F32": np.float32, "F16": np.float16, "I8": np.int8}
_logger = logging.getLogger(__name__)


def packed_encoder(bundle: Bundle, options: RuntimeOptions) -> Path | None:
    """Return the file of the encoder's graph with prepacked weights, which is written if missing.

    If the cache cannot be written, log the reason and return None.
    """
    assert options.cache_folder is not None
    folder = options.cache_folder / _key(bundle)
    try:
        if _is_valid(folder):
            return folder / _GRAPH
        options.cache_folder.mkdir(parents=True, exist_ok=True)
        # If workers start together, one of them packs while the others wait.
        with FileLock(options.cache_folder / ".lock"):
            if not _is_valid(folder):
                _make(bundle, options, folder)
    # `open_session` raises a BundleCorruptError if the runtime cannot write a file.
    except (OSError, BundleCorruptError) as error:
        reason = " ".join(str(error).split())
        _logger.warning(
            "Prepacked weights cannot be stored in %s: %s. Is there space for twice the weights?",
            *(options.cache_folder, reason),
        )
        return None
    return folder / _GRAPH


def map_words(bundle: Bundle) -> tuple[str, ort.OrtValue]:
    """Return the word embeddings' name in the graphs, and their pages in the bundle.

    These pages replace the cache entry's copy, so that encoder and heads read the same memory. Word
    embeddings are never packed, because their rows are looked up.
    """
    stored = read_header(bundle.weights_file)
    name = stored_name(WORDS, stored)
    words = stored[name]
    pages = np.memmap(
        bundle.weights_file, _NUMPY_TYPES[words.dtype], "r", words.offset, words.shape
    )
    return name, ort.OrtValue.ortvalue_from_numpy(pages)


def _key(bundle: Bundle) -> str:
    """Return the name of the entry's folder: a hash of the inputs of packing."""
    files = bundle.manifest.files
    sources = (files[WEIGHTS_FILE].sha256, files[ENCODER_FILE].sha256, ort.__version__, cpu_name())
    return hashlib.sha256(json.dumps([_LAYOUT, *sources]).encode()).hexdigest()[:32]


def _is_valid(folder: Path) -> bool:
    """Return whether an entry exists and matches its checksums."""
    try:
        entry = _ENTRY_TYPE.validate_json((folder / _ENTRY).read_bytes())
        return all(file_entry(folder / name) == entry.get(name) for name in (_GRAPH, PACKED_FILE))
    except (OSError, ValidationError):
        return False


def _make(bundle: Bundle, options: RuntimeOptions, folder: Path) -> None:
    with replace_folder(folder) as partial:
        session_options = encoder_options(options)
        session_options.optimized_model_filepath = str(partial / _GRAPH)
        for key, value in {
            "session.save_external_prepacked_constant_initializers": "1",
            "session.optimized_model_external_initializers_file_name": PACKED_FILE,
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }.items():
            session_options.add_session_config_entry(key, value)
        open_session(bundle.encoder_file, session_options)
        files = {name: file_entry(partial / name) for name in (_GRAPH, PACKED_FILE)}
        (partial / _ENTRY).write_bytes(_ENTRY_TYPE.dump_json(files, indent=2))
