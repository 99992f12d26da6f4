"""Training of ALBERT: vocabulary, pretraining, finetuning, evaluation."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

# Packages that modules import when they are loaded, and packages that metrics need later.
PACKAGES: Final = (
    *("filelock", "google", "huggingface_hub", "numpy", "pyarrow"),
    *("pydantic", "safetensors", "scipy", "sentencepiece", "sentencex", "sklearn", "tokenizers"),
    *("torch", "tqdm", "transformers"),
)


def check_packages(*names: str) -> None:
    """Exit with a one-line message if this is a command and a package is not installed.

    It is called while `python -m PACKAGE` imports the package, before its modules import others.
    """
    # "-m" is the program's name until Python has found the module to run.
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
