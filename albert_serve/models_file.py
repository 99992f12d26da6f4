"""The YAML file that lists the models of a service.

    default: small
    workers: 2
    models:
      small: {bundle: models/albert-small-en}
      reviews: {bundle: bundles/reviews-int8, precision: int8, threads: 2}

Folders are relative to the file. docs/serve.md explains the keys. Wherever a bundle's folder is
named, `bentoml:NAME[:VERSION]` names a bundle in BentoML's model store (bundle/store.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Self

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, model_validator

from albert_serve.config import Precision
from albert_serve.errors import ConfigError, describe_faults
from albert_serve.files import read_small_file

# Names that URLs, metric labels and log lines can contain without escaping.
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
# Before a tag of BentoML's model store.
STORE_PREFIX: Final = "bentoml:"
# The module of our models in that store, by which a bento's own ones are told from others.
STORE_MODULE: Final = "albert_serve"
_BENTO_FILE: Final = "bento.yaml"
_MAX_BYTES: Final = 1 << 20

_ModelName = Annotated[str, Field(pattern=NAME_PATTERN)]


class ModelSpec(BaseModel):
    """A configured model.

    Attributes:
        name: the name in requests; of a models file, its key.
        bundle: its folder, or its tag in BentoML's model store.
        precision: the bundle's required precision; None for any.
        num_threads: threads of one run; None for the service's setting.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    bundle: Path
    precision: Precision | None = None
    num_threads: int | None = Field(None, alias="threads", ge=1, le=1024)


class _ModelsFile(BaseModel):
    """The content of the file.

    Attributes:
        models: by name.
        default: who answers where no model is named; by default the first.
        workers: processes that serve; each has all the models.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: dict[_ModelName, ModelSpec] = Field(min_length=1)
    default: str | None = None
    workers: int | None = Field(None, ge=1, le=256)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for key, spec in self.models.items():
            if spec.name:
                raise ValueError(f"models.{key}.name: the key is the name; leave this out")
        if self.default is not None and self.default not in self.models:
            there = ", ".join(self.models)
            raise ValueError(f"default is {self.default!r}, which is no model; there are {there}")
        return self


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML whose keys are text, and there once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return a mapping.

        Raises:
            ValueError: a key is not text, or is there twice.
        """
        seen = set[str]()
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ValueError(
                    f"line {line}: YAML reads the key {key_node.value} as {key!r}; write it in "
                    f'quotes, "{key_node.value}"'
                )
            if key in seen:
                raise ValueError(f"line {line}: the key {key!r} is there twice; remove one")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_models_file(file: Path) -> _ModelsFile:
    """Return the models that a file lists; their folders are relative to it there, not here.

    Raises:
        ConfigError: it cannot be read, or is not such a file.
    """
    try:
        text = read_small_file(file, _MAX_BYTES).decode()
        # The loader is PyYAML's safe one.
        read = _ModelsFile.model_validate(yaml.load(text, _Loader))  # noqa: S506
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the models in {file} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # a ValidationError is one
        raise ConfigError(f"{file} lists no models: {describe_faults(error)}") from error
    except RecursionError as error:  # nesting that no such file has
        raise ConfigError(f"{file} lists no models: {error}") from error
    models = {
        name: spec.model_copy(update={"name": name, "bundle": _in_folder(spec.bundle, file.parent)})
        for name, spec in read.models.items()
    }
    return read.model_copy(update={"models": models})


def store_tag(bundle: Path) -> str | None:
    """Return the tag in BentoML's model store that is given for a bundle's folder, or None."""
    text = str(bundle)
    return text.removeprefix(STORE_PREFIX) if text.startswith(STORE_PREFIX) else None


def _in_folder(bundle: Path, folder: Path) -> Path:
    """Return a bundle's path relative to a folder; a tag stays as it is."""
    return bundle if store_tag(bundle) is not None else folder / bundle


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
