"""The checkpoint of a bundle in lower precision, such as the default model in int8."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE, read_manifest
from albert_serve.bundle.weights import CLASSIFICATION, SCALE_SUFFIX, SMOOTHING_SUFFIX
from training.model.checkpoint import label_keys, write_weights


def write_from_int8(bundle: Path, folder: Path) -> None:
    """Write an int8 bundle, with its rounding, as a checkpoint into a new folder."""
    folder.mkdir(parents=True)
    manifest = read_manifest(bundle)
    classifier = manifest.tasks.get(CLASSIFICATION)
    labels = label_keys(classifier.labels or ()) if classifier is not None else {}
    config = json.dumps({**manifest.config, **labels}, indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    restore_weights(bundle / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    shutil.copyfile(bundle / TOKENIZER_FILE, folder / TOKENIZER_FILE)


def restore_weights(file: Path, target: Path) -> None:
    """Write a bundle's weights of any precision as fp32."""
    stored = load_file(file)
    names = (name for name in stored if not name.endswith(SCALE_SUFFIX))
    write_weights({name: _restore(name, stored) for name in names}, target)


def _restore(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """Return a weight as fp32; int8 matrices are transposed, because they are stored [in, out]."""
    scale_O, factors_I = stored.get(name + SCALE_SUFFIX), stored.get(name + SMOOTHING_SUFFIX)
    weight = stored[name].float()
    if scale_O is not None:
        weight = (weight * scale_O).T
    if factors_I is not None:
        weight = weight * factors_I
    return weight.contiguous()
