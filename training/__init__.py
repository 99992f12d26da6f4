"""Training of ALBERT: vocabulary, pretraining, finetuning, evaluation."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

# The packages that modules import as they are loaded, and that metrics need later.
PACKAGES: Final = (
    *("filelock", "google", "huggingface_hub", "numpy", "pyarrow"),
    *("pydantic", "safetensors", "scipy", "sentencepiece", "sentencex", "sklearn", "tokenizers"),
    *("torch", "tqdm", "transformers"),
)


def check_packages(*names: str) -> None:
    """End a command whose packages are not installed, with one line; leave imports alone.

    Called while `python -m PACKAGE` imports the package, before its modules import theirs.
    """
    # Python's name of the program until it has found the module to run.
    if sys.argv[:1] != ["-m"]:
        return
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        sys.exit(
            f"error: {', '.join(missing)} {verb} not installed, which training and export need: "
            "pip install 'albert-serve[train]', or in a clone pip install '.[train]'"
        )


check_packages(*PACKAGES)
