"""The content of a bundle: sizes, sharing, precision, tasks, results and origin.

Nothing is run, and no graph is read: counts come from the manifest, the configuration and the
header of the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    Shape,
    StoredTensor,
    read_header,
    stored_name,
)
from albert_serve.config import AlbertConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The size of a bundle on disk.

    Attributes:
        graphs_bytes: all graphs together.
        bundle_bytes: all files.
        bundle_over_weights: all files over the weights.
        files: bytes of each file, by name.
    """

    weights_bytes: int
    tokenizer_bytes: int
    graphs_bytes: int
    manifest_bytes: int
    bundle_bytes: int
    bundle_over_weights: float
    files: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """The sharing of weights.

    Attributes:
        num_layers_applied: layers that a token passes through.
        num_attentions_stored: attention blocks with weights of their own.
        num_ffns_stored: feed-forward blocks with weights of their own.
        num_params: parameters that are stored and used.
        num_params_unshared: the number without sharing between layers.
        num_params_unused: parameters in the file that no task needs.
        num_graphs: graphs that refer to the one weight file.
        num_ranges: ranges of the file that they refer to.
    """

    num_layers_applied: int
    num_attentions_stored: int
    num_ffns_stored: int
    num_params: int
    num_params_unshared: int
    num_params_unused: int
    num_graphs: int
    num_ranges: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The description of a bundle; its attributes are the keys of `albert-serve info --json`.

    Attributes:
        folder: the bundle's.
        format_version: the manifest's.
        config: the sizes of the model.
        precision: the storage type of matrices.
        kept_fp32: parts that are in fp32 whatever the precision.
        bytes_by_dtype: bytes of the weights by type, as safetensors calls it.
        tasks: by task: graph, num_outputs, labels, problem_type; further classifiers of texts by
            `text-classification/NAME`, here and below.
        quality: by task: metric, torch, bundle, cost (all three in percent), count, data.
        parity: the largest absolute difference from torch, of "encoder" and of each task.
        evaluation: results on held-out data.
        provenance: how the weights were trained and the bundle was written.
    """

    folder: str
    format_version: int
    config: AlbertConfig
    sizes: Sizes
    sharing: Sharing
    precision: str
    kept_fp32: list[str]
    bytes_by_dtype: dict[str, int]
    tasks: dict[str, dict[str, Any]]
    quality: dict[str, dict[str, Any]]
    parity: dict[str, float]
    evaluation: dict[str, Any]
    provenance: dict[str, Any]


def describe_bundle(bundle: Bundle) -> Description:
    """Describe a bundle.

    Raises:
        BundleCorruptError: its weights were changed since it was opened.
        OSError: a file cannot be read.
    """
    manifest = bundle.manifest
    stored = read_header(bundle.weights_file)
    quality = {
        str(task): {**measured.model_dump(), "cost": measured.cost}
        for task, measured in manifest.head_quality.items()
    }
    return Description(
        folder=str(bundle.folder),
        format_version=manifest.format_version,
        config=bundle.config,
        sizes=_measure_sizes(bundle),
        sharing=_count_sharing(bundle, stored),
        precision=manifest.precision,
        kept_fp32=list(manifest.kept_fp32),
        bytes_by_dtype=_count_dtypes(stored.values()),
        tasks={
            head: entry.model_dump(exclude={"heads", "quality"})
            for head, entry in manifest.heads.items()
        },
        quality=quality,
        parity=manifest.parity,
        evaluation=manifest.evaluation,
        provenance=manifest.provenance,
    )


def _measure_sizes(bundle: Bundle) -> Sizes:
    files = {str(name): entry.size for name, entry in bundle.manifest.files.items()}
    files[MANIFEST_FILE] = (bundle.folder / MANIFEST_FILE).stat().st_size
    total = sum(files.values())
    return Sizes(
        weights_bytes=files[WEIGHTS_FILE],
        tokenizer_bytes=files[TOKENIZER_FILE],
        graphs_bytes=sum(size for name, size in files.items() if name.endswith(".onnx")),
        manifest_bytes=files[MANIFEST_FILE],
        bundle_bytes=total,
        bundle_over_weights=total / files[WEIGHTS_FILE],
        files=files,
    )


def _count_sharing(bundle: Bundle, stored: Mapping[str, StoredTensor]) -> Sharing:
    config = bundle.config
    expected = needed_shapes(config, bundle.manifest)
    weights = {stored_name(name, stored) for name in expected}
    scales = {name + SCALE_SUFFIX for name in weights} & stored.keys()
    unused = stored.keys() - weights - scales
    return Sharing(
        num_layers_applied=len(config.layer_plan),
        num_attentions_stored=config.num_attentions,
        num_ffns_stored=config.num_ffns,
        num_params=_count(expected.values()),
        num_params_unshared=_count(
            needed_shapes(replace(config, sharing="none"), bundle.manifest).values()
        ),
        num_params_unused=_count(stored[name].shape for name in unused),
        num_graphs=sum(name.endswith(".onnx") for name in bundle.manifest.files),
        num_ranges=len(weights | scales),
    )


def _count(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _count_dtypes(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[tensor.dtype] += tensor.num_bytes
    return dict(counted.most_common())
