"""The catalogue of a service: one bundle, all bundles in a folder, or a models file's."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from albert_serve.bundle.manifest import MANIFEST_FILE, Bundle
from albert_serve.bundle.store import locate
from albert_serve.errors import BundleError, ConfigError
from albert_serve.models_file import NAME_PATTERN, ModelSpec, read_models_file, store_tag
from albert_serve.settings import Settings

_logger = logging.getLogger(__name__)


def open_model(spec: ModelSpec) -> Bundle:
    """Open a model's bundle and verify every byte; a tag is looked up each time.

    Raises:
        BundleError: it cannot be opened, or has another precision.
    """
    bundle = Bundle.open(locate(spec.bundle))
    stored = bundle.manifest.precision
    if spec.precision not in (None, stored):
        raise BundleError(
            f"model {spec.name} is to be {spec.precision}, and {spec.bundle} is {stored}; "
            f"export it with --precision {spec.precision}, or name another bundle"
        )
    return bundle


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """The configured models.

    Attributes:
        specs: by name.
        chosen: the default model of the models file, if it names one.
        preferred: the default model otherwise, if it exists.
    """

    specs: Mapping[str, ModelSpec]
    chosen: str | None = None
    preferred: str | None = None

    @property
    def default(self) -> str:
        """The name of the default model: the chosen, the preferred, or else the first one."""
        preferred = self.preferred if self.preferred in self.specs else None
        return self.chosen or preferred or next(iter(self.specs))

    def default_among(self, names: Collection[str]) -> str:
        """Return the default model, or the first one if the default is not among `names`."""
        if self.default in names:
            return self.default
        return next(name for name in self.specs if name in names)

    def open_bundles(self) -> tuple[dict[str, Bundle], dict[str, Exception]]:
        """Return the bundles that can be opened, and the errors of the others, by name."""
        bundles: dict[str, Bundle] = {}
        errors: dict[str, Exception] = {}
        for name, spec in self.specs.items():
            try:
                bundles[name] = open_model(spec)
            except Exception as error:  # noqa: BLE001  # whatever it is, the others are served
                errors[name] = error
        return bundles, errors

    def check_any(self, errors: Mapping[str, Exception]) -> None:
        """Raise a ConfigError if all models have errors, with the reason of each."""
        if len(errors) == len(self.specs):
            reasons = (" ".join(f"{error or repr(error)}".split()) for error in errors.values())
            raise ConfigError("; ".join(reasons)) from next(iter(errors.values()))


def read_catalogue(settings: Settings) -> Catalogue:
    """Read the models that the settings name.

    Raises:
        ConfigError: there is no model, or the models file is invalid.
    """
    chosen = None
    if settings.models is None:
        assert settings.bundle is not None
        tag = store_tag(settings.bundle)
        # The name is the link's own: its target may change.
        name = tag.partition(":")[0] if tag else Path(os.path.abspath(settings.bundle)).name
        specs = [ModelSpec(name=name, bundle=settings.bundle)]
    elif settings.models.is_dir():
        specs = _read_folder(settings.models)
    else:
        listed = read_models_file(settings.models)
        specs, chosen = [*listed.models.values()], listed.default
    return Catalogue(
        specs={spec.name: spec for spec in specs},
        chosen=chosen,
        preferred=settings.default_model,
    )


def _read_folder(folder: Path) -> list[ModelSpec]:
    bundles = sorted(manifest.parent for manifest in folder.glob(f"*/{MANIFEST_FILE}"))
    # Temporary and set-aside folders begin with a dot.
    bundles = [bundle for bundle in bundles if not bundle.name.startswith(".")]
    if not bundles:
        raise ConfigError(
            f"{folder} holds no folder of a bundle; is it a bundle itself? "
            "Then give it as --bundle, or ALBERT_SERVE_BUNDLE"
        )
    named_bundles = [bundle for bundle in bundles if re.fullmatch(NAME_PATTERN, bundle.name)]
    for bundle in bundles:
        if bundle not in named_bundles:
            reason = f"{bundle} cannot be a model's name; allowed are up to 64 of A-Z a-z 0-9 . _ -"
            if not named_bundles:
                raise ConfigError(reason)
            _logger.error("a bundle is not served: %s", reason)
    return [ModelSpec(name=bundle.name, bundle=bundle) for bundle in named_bundles]
