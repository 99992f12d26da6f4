"""Training of ALBERT: vocabulary, pretraining, finetuning, evaluation."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

# Packages that training imports at startup or, for metrics, later.
PACKAGES: Final = (
    *("filelock", "google", "huggingface_hub", "numpy", "pyarrow"),
    *("pydantic", "safetensors", "scipy", "sentencepiece", "sentencex", "sklearn", "tokenizers"),
    *("torch", "tqdm", "transformers"),
)


def check_packages(*names: str) -> None:
    """Exit with a one-line message if a command runs without one of these packages.

    Packages with commands call this when they are imported, before their modules import others.
    """
    # While Python looks for the module of `python -m`, sys.argv[0] is "-m".
    if sys.argv[:1] != ["-m"]:
        return
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        sys.exit(
            f"error: {', '.join(missing)} {verb} not installed. For training and export, run "
            "pip install 'albert-serve[train]', or in a clone pip install '.[train]'"
        )


check_packages(*PACKAGES)
