"""The catalogue of a service: one bundle, or all bundles in a folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from albert_serve.bundle.manifest import MANIFEST_FILE, Bundle
from albert_serve.bundle.store import locate
from albert_serve.errors import ConfigError
from albert_serve.settings import Settings, store_tag

# These names need no escaping in URLs, metric labels and log lines.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """The configured models.

    Attributes:
        bundles: folder or tag of each model's bundle, by the model's name.
        preferred: configured default model, which may not exist.
    """

    bundles: Mapping[str, Path]
    preferred: str | None = None

    @property
    def default(self) -> str:
        """The name of the default model: the preferred one, or else the first one."""
        return self.default_among(self.bundles)

    def default_among(self, names: Collection[str]) -> str:
        """Return the default model, or the first one if the default is not among `names`."""
        return next(name for name in (self.preferred or "", *self.bundles) if name in names)

    def open_bundles(self) -> tuple[dict[str, Bundle], dict[str, Exception]]:
        """Return the bundles that can be opened, and the errors of the other bundles, by name."""
        opened: dict[str, Bundle] = {}
        errors: dict[str, Exception] = {}
        for name, bundle in self.bundles.items():
            try:
                opened[name] = Bundle.open(locate(bundle))
            except Exception as error:  # noqa: BLE001  # the other models are served
                errors[name] = error
        return opened, errors

    def check_any(self, errors: Mapping[str, Exception]) -> None:
        """Raise a ConfigError if all models have errors, with the reason of each."""
        if len(errors) == len(self.bundles):
            reasons = (" ".join(str(error).split()) for error in errors.values())
            raise ConfigError("; ".join(reasons)) from next(iter(errors.values()))


def read_catalogue(settings: Settings) -> Catalogue:
    """Read the models that the settings name."""
    if settings.models is None:
        assert settings.bundle is not None
        tag = store_tag(settings.bundle)
        # A link's own name is used, because its target may change.
        name = tag.partition(":")[0] if tag else Path(os.path.abspath(settings.bundle)).name
        bundles = {name: settings.bundle}
    else:
        bundles = _read_folder(settings.models)
    return Catalogue(bundles=bundles, preferred=settings.default_model)


def _read_folder(folder: Path) -> dict[str, Path]:
    bundles = sorted(manifest.parent for manifest in folder.glob(f"*/{MANIFEST_FILE}"))
    # Temporary and set-aside folders begin with a dot.
    bundles = [bundle for bundle in bundles if not bundle.name.startswith(".")]
    if not bundles:
        raise ConfigError(
            f"{folder} contains no bundle. Pass a folder of bundles. To serve one bundle, "
            "use --bundle or ALBERT_SERVE_BUNDLE."
        )
    named_bundles = {bundle.name: bundle for bundle in bundles if _NAME.fullmatch(bundle.name)}
    for bundle in bundles:
        if bundle.name not in named_bundles:
            reason = (
                f"{bundle} cannot be a model's name. Rename the folder, with at most 64 of the "
                "characters A-Z a-z 0-9 . _ -."
            )
            if not named_bundles:
                raise ConfigError(reason)
            _logger.error("A bundle is not served: %s", reason)
    return named_bundles
