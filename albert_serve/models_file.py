"""Models of BentoML's model store: their tags in place of a bundle's folder, and in a bento."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml  # type: ignore[import-untyped]

from albert_serve.errors import ConfigError
from albert_serve.files import read_small_file

# Before a tag of BentoML's model store.
STORE_PREFIX: Final = "bentoml:"
# The module of our models in that store, by which a bento's own ones are told from others.
STORE_MODULE: Final = "albert_serve"
_BENTO_FILE: Final = "bento.yaml"
_MAX_BYTES: Final = 1 << 20


def store_tag(bundle: Path) -> str | None:
    """Return the tag in BentoML's model store that is given for a bundle's folder, or None."""
    text = str(bundle)
    return text.removeprefix(STORE_PREFIX) if text.startswith(STORE_PREFIX) else None


def packed_bundles(bento: Path) -> list[Path]:
    """Return the tags of our models that a bento's folder names under `models:`.

    Raises:
        ConfigError: the bento's description cannot be read.
    """
    file = bento / _BENTO_FILE
    if not file.is_file():
        return []
    try:
        models = yaml.safe_load(read_small_file(file, _MAX_BYTES)).get("models") or []
        tags = [model["tag"] for model in models if model.get("module") == STORE_MODULE]
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    return [Path(f"{STORE_PREFIX}{tag}") for tag in tags]
