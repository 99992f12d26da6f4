"""Which models a service has: one bundle, each bundle of a folder, or those that a file lists."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from albert_serve.bundle.manifest import MANIFEST_FILE, Bundle
from albert_serve.config import Precision
from albert_serve.errors import BundleError, ConfigError
from albert_serve.models_file import NAME_PATTERN, read_models_file
from albert_serve.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model that is to be served.

    Attributes:
        name: what requests call it.
        bundle: its folder.
        precision: what the bundle must have; None for any.
        num_threads: of one run; None for the service's.
    """

    name: str
    bundle: Path
    precision: Precision | None = None
    num_threads: int | None = None

    def open_bundle(self) -> Bundle:
        """The bundle, every byte of it verified.

        Raises:
            BundleError: it cannot be opened, or is of another precision.
        """
        bundle = Bundle.open(self.bundle)
        stored = bundle.manifest.precision
        if self.precision not in (None, stored):
            raise BundleError(
                f"model {self.name} is to be {self.precision}, and {self.bundle} is {stored}; "
                f"export it with --precision {self.precision}, or name another bundle"
            )
        return bundle


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """Models that are to be served.

    Attributes:
        specs: by name.
        chosen: the name of the one that answers where none is asked for, if their file chooses.
        preferred: if it does not, and there is such a one.
    """

    specs: Mapping[str, ModelSpec]
    chosen: str | None = None
    preferred: str | None = None

    @property
    def default(self) -> str:
        """The name of the one that was chosen or is preferred, or else of the first."""
        preferred = self.preferred if self.preferred in self.specs else None
        return self.chosen or preferred or next(iter(self.specs))


def read_catalogue(settings: Settings) -> Catalogue:
    """The models that the settings name, as they are listed now.

    Raises:
        ConfigError: there is none, or the file that lists them is wrong.
    """
    if settings.models is None:
        assert settings.bundle is not None
        # Not where a link leads: what it leads to may be changed, and the name stays.
        name = Path(os.path.abspath(settings.bundle)).name
        return _catalogue([ModelSpec(name=name, bundle=settings.bundle)], settings)
    if settings.models.is_dir():
        return _catalogue(_read_folder(settings.models), settings)
    listed = read_models_file(settings.models)
    specs = [
        ModelSpec(
            name=name,
            bundle=entry.bundle,
            precision=entry.precision,
            num_threads=entry.threads,
        )
        for name, entry in listed.models.items()
    ]
    return _catalogue(specs, settings, listed.default)


def _read_folder(folder: Path) -> list[ModelSpec]:
    found = sorted(manifest.parent for manifest in folder.glob(f"*/{MANIFEST_FILE}"))
    # What is being written or was put aside begins with a dot.
    found = [bundle for bundle in found if not bundle.name.startswith(".")]
    if not found:
        raise ConfigError(
            f"{folder} holds no folder of a bundle; is it a bundle itself? "
            "Then give it as --bundle, or ALBERT_SERVE_BUNDLE"
        )
    for bundle in found:
        if not re.fullmatch(NAME_PATTERN, bundle.name):
            raise ConfigError(
                f"{bundle} cannot be a model's name; allowed are up to 64 of A-Z a-z 0-9 . _ -"
            )
    return [ModelSpec(name=bundle.name, bundle=bundle) for bundle in found]


def _catalogue(specs: list[ModelSpec], settings: Settings, chosen: str | None = None) -> Catalogue:
    return Catalogue(
        specs={spec.name: spec for spec in specs},
        chosen=chosen,
        preferred=settings.default_model,
    )
