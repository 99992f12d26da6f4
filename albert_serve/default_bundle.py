"""The bundle that is served where none is named.

A checkout ships the fp32 bundle in `models/`, a wheel the int8 version of it in
`albert_serve/models/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from albert_serve.errors import ConfigError

# The settings that name others.
BUNDLE_VARIABLE: Final = "ALBERT_SERVE_BUNDLE"
MODELS_VARIABLE: Final = "ALBERT_SERVE_MODELS"


def shipped_bundle(models: Path | None = None) -> Path:
    """Return the folder of the bundle in `models/`: next to the package, or else within it.

    Args:
        models: look here instead.
    """
    models = models or _models_folder(Path(__file__).resolve().parent)
    folders = sorted(manifest.parent for manifest in models.glob("*/manifest.json"))
    if len(folders) == 1:
        return folders[0]
    names = ", ".join(folder.name for folder in folders) or "none"
    raise ConfigError(
        f"{models} must hold exactly one bundle, and holds {names}; "
        f"set {BUNDLE_VARIABLE} to the folder of the one to serve"
    )


def _models_folder(package: Path) -> Path:
    beside, within = package.parent / "models", package / "models"
    # Another package may have put a folder of this name into site-packages.
    return beside if not within.is_dir() or any(beside.glob("*/manifest.json")) else within
