"""The model that ships, to finetune where no other is named; a wheel holds it in int8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file

from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE, read_manifest
from albert_serve.bundle.weights import CLASSIFICATION, SCALE_SUFFIX
from training.model.checkpoint import label_keys, write_weights


def write_from_int8(bundle: Path, folder: Path) -> None:
    """Write the checkpoint that an int8 bundle stands for, with its rounding, into a new folder.

    Raises:
        BundleError: the bundle cannot be read.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True)
    manifest = read_manifest(bundle)
    classifier = manifest.tasks.get(CLASSIFICATION)
    labels = label_keys(classifier.labels or ()) if classifier is not None else {}
    config = json.dumps({**manifest.config, **labels}, indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    stored = load_file(bundle / WEIGHTS_FILE)
    weights = {
        # Matrices of int8 lie the other way round, [in, out], with a scale for each output.
        name: (tensor * stored[scale]).T if (scale := name + SCALE_SUFFIX) in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith(SCALE_SUFFIX)
    }
    write_weights(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS_FILE
    )
    shutil.copyfile(bundle / TOKENIZER_FILE, folder / TOKENIZER_FILE)
