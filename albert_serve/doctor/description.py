"""The content of a bundle: sizes, sharing, precision, tasks, results and origin.

Nothing is run, and no graph is read: counts come from the manifest, the configuration and the
header of the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from albert_serve.bundle.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Bundle,
    needed_shapes,
)
from albert_serve.bundle.weights import (
    SCALE_SUFFIX,
    SMOOTHING_SUFFIX,
    Shape,
    StoredTensor,
    read_header,
    stored_name,
)


def describe_bundle(bundle: Bundle) -> dict[str, Any]:
    """Return the content of `albert-serve info --json`.

    Figures of quality are in percent; those of parity are the largest differences from torch, as
    shares of the largest value, of "encoder" and of each task. A further classifier of texts is
    `text-classification/NAME`.

    Raises:
        BundleCorruptError: its weights were changed since it was opened.
        OSError: a file cannot be read.
    """
    manifest = bundle.manifest
    stored = read_header(bundle.weights_file)
    bytes_by_dtype: Counter[str] = Counter()
    for tensor in stored.values():
        bytes_by_dtype[tensor.dtype] += tensor.num_bytes
    return {
        "folder": str(bundle.folder),
        "format_version": manifest.format_version,
        "config": asdict(bundle.config),
        "sizes": _measure_sizes(bundle),
        "sharing": _count_sharing(bundle, stored),
        "precision": manifest.precision,
        "kept_fp32": list(manifest.kept_fp32),
        "bytes_by_dtype": dict(bytes_by_dtype.most_common()),
        "tasks": {
            head: entry.model_dump(exclude={"heads", "quality"})
            for head, entry in manifest.heads.items()
        },
        "sentence_vectors": manifest.sentence_vectors and asdict(manifest.sentence_vectors),
        "quality": {
            str(task): {**measured.model_dump(), "cost": measured.cost}
            for task, measured in manifest.head_quality.items()
        },
        "parity": manifest.parity,
        "evaluation": manifest.evaluation,
        "provenance": manifest.provenance,
    }


def _measure_sizes(bundle: Bundle) -> dict[str, Any]:
    files = {str(name): entry.size for name, entry in bundle.manifest.files.items()}
    files[MANIFEST_FILE] = (bundle.folder / MANIFEST_FILE).stat().st_size
    total = sum(files.values())
    return {
        "weights_bytes": files[WEIGHTS_FILE],
        "tokenizer_bytes": files[TOKENIZER_FILE],
        "graphs_bytes": sum(size for name, size in files.items() if name.endswith(".onnx")),
        "manifest_bytes": files[MANIFEST_FILE],
        "bundle_bytes": total,
        "bundle_over_weights": total / files[WEIGHTS_FILE],
        "files": files,
    }


def _count_sharing(bundle: Bundle, stored: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Count layers, parameters, and the ranges of the one weight file that graphs refer to."""
    config = bundle.config
    expected = needed_shapes(config, bundle.manifest.tasks)
    unshared = needed_shapes(replace(config, sharing="none"), bundle.manifest.tasks)
    weights = {stored_name(name, stored) for name in expected}
    suffixes = (SCALE_SUFFIX, SMOOTHING_SUFFIX)
    scales = {name + suffix for name in weights for suffix in suffixes} & stored.keys()
    unused = stored.keys() - weights - scales
    return {
        "num_layers_applied": len(config.layer_plan),
        "num_attentions_stored": config.num_attentions,
        "num_ffns_stored": config.num_ffns,
        "num_params": _count(expected.values()),
        "num_params_unshared": _count(unshared.values()),
        "num_params_unused": _count(stored[name].shape for name in unused),
        "num_graphs": sum(name.endswith(".onnx") for name in bundle.manifest.files),
        "num_ranges": len(weights | scales),
    }


def _count(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)
