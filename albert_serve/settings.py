"""The settings of the service, read from the environment once, and nowhere else.

Each is a variable `ALBERT_SERVE_<NAME>`; `Settings` has the list with defaults and meanings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from albert_serve.errors import ConfigError

BUNDLE_VARIABLE: Final = "ALBERT_SERVE_BUNDLE"
# BentoML itself gives up after 60 s (service.py); ours must come first, for it says why.
_LONGEST_DEADLINE_S: Final = 55.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a deployment can choose.

    Attributes:
        bundle: BUNDLE, the folder to serve; by default the one that ships in `models/`.
        num_threads: THREADS of one run; by default the CPUs that the process may use.
        max_batch_tokens: MAX_BATCH_TOKENS, padding included, that run together; by default what
            suits the engine's device.
        max_queue_tokens: MAX_QUEUE_TOKENS that may wait; past it requests get 429.
        deadline_s: DEADLINE_S, seconds after which a request gets 504.
        max_body_bytes: MAX_BODY_BYTES of one request; past it 413.
        max_items: MAX_ITEMS in one request's list; past it 422.
        drain_grace_s: DRAIN_GRACE_S, seconds after SIGTERM during which the service is not ready
            but still answers, for load balancers that need to notice.
    """

    bundle: Path
    num_threads: int | None = None
    max_batch_tokens: int | None = None
    max_queue_tokens: int = 131_072
    deadline_s: float = 30.0
    max_body_bytes: int = 4_194_304
    max_items: int = 1024
    drain_grace_s: float = 0.0

    @classmethod
    def from_environment(cls, options: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; those not set, or set to nothing, keep their defaults.

        Args:
            options: values that go before the environment's, by variable.

        Raises:
            ConfigError: a value is not one that its variable takes, or no bundle is named and
                `models/` does not hold exactly one.
        """
        source = {**os.environ, **(options or {})}
        given = {name: text.strip() for name, text in source.items() if text.strip()}
        chosen = {
            field: _read(variable, given[variable], kind, least, most)
            for variable, (field, kind, least, most) in _NUMBERS.items()
            if variable in given
        }
        folder = given.get(BUNDLE_VARIABLE)
        return cls(bundle=Path(folder) if folder else shipped_bundle(), **chosen)

    def environment(self) -> dict[str, str]:
        """This process's environment with these settings in it, for a process to be started."""
        numbers = {
            variable: str(value)
            for variable, (field, *_) in _NUMBERS.items()
            if (value := getattr(self, field)) is not None
        }
        # BentoML reports each start to its makers unless told not to; who wants that can say so.
        quiet = {"BENTOML_DO_NOT_TRACK": "True"}
        bundle = {BUNDLE_VARIABLE: str(self.bundle.resolve())}
        return {**quiet, **os.environ, **numbers, **bundle}


def shipped_bundle(models: Path | None = None) -> Path:
    """The folder of the bundle that ships beside the package, in `models/`.

    Args:
        models: look here instead.

    Raises:
        ConfigError: there is none, or more than one.
    """
    models = models or Path(__file__).resolve().parent.parent / "models"
    if (models / "manifest.json").is_file():
        return models
    found = sorted(manifest.parent for manifest in models.glob("*/manifest.json"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(folder.name for folder in found) or "none"
    raise ConfigError(
        f"{models} must hold exactly one bundle, and holds {names}; "
        f"set {BUNDLE_VARIABLE} to the folder of the one to serve"
    )


def _read(name: str, text: str, kind: type[int | float], least: float, most: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        what = "a whole number" if kind is int else "a number of seconds"
        raise ConfigError(f"{name} is {text!r}; it must be {what} from {least:.16g} to {most:.16g}")
    return value


# Variable -> field, kind, and the least and most that it takes.
_NUMBERS: Final[dict[str, tuple[str, type[int | float], float, float]]] = {
    "ALBERT_SERVE_THREADS": ("num_threads", int, 1, 1024),
    "ALBERT_SERVE_MAX_BATCH_TOKENS": ("max_batch_tokens", int, 1, 1 << 24),
    "ALBERT_SERVE_MAX_QUEUE_TOKENS": ("max_queue_tokens", int, 1, 1 << 30),
    "ALBERT_SERVE_DEADLINE_S": ("deadline_s", float, 0.05, _LONGEST_DEADLINE_S),
    "ALBERT_SERVE_MAX_BODY_BYTES": ("max_body_bytes", int, 1, 1 << 30),
    "ALBERT_SERVE_MAX_ITEMS": ("max_items", int, 1, 1 << 20),
    "ALBERT_SERVE_DRAIN_GRACE_S": ("drain_grace_s", float, 0, 600),
}
