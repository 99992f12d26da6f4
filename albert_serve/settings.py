"""The settings of the service, read from the environment once, and nowhere else.

Each is a variable `ALBERT_SERVE_<NAME>`; `Settings` has the list with defaults and meanings.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from albert_serve.errors import ConfigError
from albert_serve.models_file import read_models_file

BUNDLE_VARIABLE: Final = "ALBERT_SERVE_BUNDLE"
MODELS_VARIABLE: Final = "ALBERT_SERVE_MODELS"
DEFAULT_VARIABLE: Final = "ALBERT_SERVE_DEFAULT_MODEL"
CACHE_VARIABLE: Final = "ALBERT_SERVE_CACHE"
_WORKERS: Final = "ALBERT_SERVE_WORKERS"
_API_KEYS: Final = "ALBERT_SERVE_API_KEYS"
_API_KEYS_FILE: Final = "ALBERT_SERVE_API_KEYS_FILE"
_GUARD: Final = "ALBERT_SERVE_GUARD"
_CORS_ORIGINS: Final = "ALBERT_SERVE_CORS_ORIGINS"
_ORIGIN: Final = re.compile(r"https?://[^/\s?#@]+")
# BentoML's timeout is 60 s (service.py); ours must be shorter, because it replies with a reason.
_LONGEST_DEADLINE_S: Final = 55.0


Device = Literal["auto", "cpu", "cuda"]
Prepack = Literal["memory", "cache", "none"]
# The surfaces that keys can guard: the tasks and /info, the metrics, and the documentation.
Surface = Literal["api", "metrics", "docs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """The runtime options of a bundle.

    Attributes:
        device: "auto" takes a CUDA device where there is one.
        num_threads: threads of one run; None: the CPUs that this process may use.
        spinning: whether threads wait for each other actively: 5 to 10 % faster, unless other
            processes want the same cores.
        prepack: the location of weights pre-packed for this CPU's kernels: in this process'
            "memory", or in a "cache" on disk that processes share; "none" multiplies with
            the bundle's own pages and is slower for small batches.
        cache_folder: the folder of prepack "cache".
    """

    device: Device = "auto"
    num_threads: int | None = None
    spinning: bool = True
    prepack: Prepack = "memory"
    cache_folder: Path | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("device", self.device, get_args(Device)),
            ("prepack", self.prepack, get_args(Prepack)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
        if self.prepack == "cache" and self.cache_folder is None:
            raise ConfigError("prepack is 'cache', which needs a cache_folder")

    @property
    def threads(self) -> int:
        """Threads of one run."""
        return self.num_threads or num_usable_cpus()


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a deployment.

    Attributes:
        bundle: BUNDLE, the folder to serve; by default the one that ships in `models/`.
        models: MODELS, instead of BUNDLE: a folder of bundles, or a YAML file that lists some.
        default_model: DEFAULT_MODEL, for requests that name no model, if the YAML file sets
            none; by default the first.
        num_workers: WORKERS, the worker processes.
        num_threads: THREADS of one run; by default the usable CPUs, divided among the workers.
        device: DEVICE to run on: auto (CUDA where there is a device), cpu or cuda.
        prepack: PREPACK, the location of pre-packed weights: memory, cache (a folder
            whose pages all workers share), none, or auto: cache if there are several workers.
        spinning: SPINNING, on or off: whether threads wait for each other actively; auto: unless
            there are models of different weights, whose threads would wait for each other's cores.
        cache_folder: CACHE, the folder of prepack "cache"; by default the user's cache folder.
        max_batch_tokens: MAX_BATCH_TOKENS, padding included, that run together; the default
            depends on the engine's device.
        max_queue_tokens: MAX_QUEUE_TOKENS that may wait; past it requests get 429.
        max_wait_s: MAX_WAIT_S, seconds, the bound on the expected latency of interactive
            requests; over its concurrency limit they get 429 (server/admission.py).
        deadline_s: DEADLINE_S, seconds after which a request gets 504.
        max_body_bytes: MAX_BODY_BYTES of one request; past it 413.
        max_items: MAX_ITEMS in one request's list; past it 422.
        drain_grace_s: DRAIN_GRACE_S, seconds after SIGTERM during which the service is not ready
            but still answers, for load balancers that need to notice.
        api_keys: API_KEYS, separated by commas. With none, and no file, everything is open.
        api_keys_file: API_KEYS_FILE, keys one a line; it is read again when it changes.
        guard: GUARD, what needs a key, if there are keys: api, metrics, docs, by commas.
        cors_origins: CORS_ORIGINS, whose pages may call the service from a browser, by commas; *
            for all.
        log_format: LOG_FORMAT, text or json.
    """

    bundle: Path | None
    models: Path | None = None
    default_model: str | None = None
    num_workers: int = 1
    num_threads: int | None = None
    device: Device = "auto"
    prepack: Literal["auto"] | Prepack = "auto"
    spinning: Literal["auto", "on", "off"] = "auto"
    cache_folder: Path | None = None
    max_batch_tokens: int | None = None
    max_queue_tokens: int = 131_072
    max_wait_s: float = 0.5
    deadline_s: float = 30.0
    max_body_bytes: int = 4_194_304
    max_items: int = 1024
    drain_grace_s: float = 0.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_keys_file: Path | None = None
    guard: tuple[Surface, ...] = get_args(Surface)
    cors_origins: tuple[str, ...] = ()
    log_format: Literal["text", "json"] = "text"

    @property
    def job_runtime(self) -> RuntimeOptions:
        """The runtime options of batch scoring: alone on the machine, in parallel sessions."""
        prepack = self.prepack
        if prepack == "auto":
            prepack = "cache" if self.cache_folder else "memory"
        return replace(self, num_workers=1, prepack=prepack).runtime

    @classmethod
    def from_environment(cls, options: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; those that are unset or empty keep their defaults.

        Args:
            options: values that go before the environment's, by variable.

        Raises:
            ConfigError: a value is not one that its variable takes, a bundle and models are
                named, or neither is and `models/` does not hold exactly one bundle.
        """
        source = {**os.environ, **(options or {})}
        variables = {name: text.strip() for name, text in source.items() if text.strip()}
        chosen = {
            name: _read(variable, variables[variable], kind, least, most)
            for variable, (name, kind, least, most) in _NUMBERS.items()
            if variable in variables
        }
        chosen |= {
            name: _choose(variable, variables[variable], allowed)
            for variable, (name, allowed) in _CHOICES.items()
            if variable in variables
        }
        sources = _sources(variables)
        if sources["models"] is not None and "num_workers" not in chosen:
            chosen["num_workers"] = _listed_workers(sources["models"])
        return cls(
            **sources,
            default_model=variables.get(DEFAULT_VARIABLE),
            cache_folder=_cache_folder(variables),
            **_access(variables),
            **chosen,
        )

    @property
    def has_keys(self) -> bool:
        """Whether any surface needs a key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def needs_key(self) -> bool:
        """Whether the tasks need a key."""
        return self.has_keys and "api" in self.guard

    @property
    def runtime(self) -> RuntimeOptions:
        """The runtime options of a worker."""
        prepack = self.prepack
        if prepack == "auto":
            prepack = "cache" if self.num_workers > 1 and self.cache_folder else "memory"
        return RuntimeOptions(
            device=self.device,
            num_threads=self.num_threads or max(1, num_usable_cpus() // self.num_workers),
            spinning=self.spinning != "off",
            prepack=prepack,
            cache_folder=self.cache_folder,
        )

    def environment(self) -> dict[str, str]:
        """Return this process's environment with these settings, for a child process."""
        numbers = {
            variable: str(value)
            for variable, (name, *_) in _NUMBERS.items()
            if (value := getattr(self, name)) is not None
        }
        # Disables BentoML's usage reports, unless the variable is set.
        quiet = {"BENTOML_DO_NOT_TRACK": "True"}
        choices = {variable: str(getattr(self, name)) for variable, (name, _) in _CHOICES.items()}
        # Absolute, but links are not resolved: their targets may change before a reload.
        folders = {
            variable: os.path.abspath(folder) if folder else ""
            for variable, folder in ((BUNDLE_VARIABLE, self.bundle), (MODELS_VARIABLE, self.models))
        }
        if self.cache_folder is not None:
            folders[CACHE_VARIABLE] = str(self.cache_folder.absolute())
        return {**quiet, **os.environ, **numbers, **choices, **folders, **self._access()}

    def _access(self) -> dict[str, str]:
        access = {_CORS_ORIGINS: ",".join(self.cors_origins)}
        if self.has_keys:
            access |= {_API_KEYS: ",".join(self.api_keys), _GUARD: ",".join(self.guard)}
        if self.api_keys_file is not None:
            access[_API_KEYS_FILE] = str(self.api_keys_file.absolute())
        return access


def shipped_bundle(models: Path | None = None) -> Path:
    """Return the folder of the bundle in `models/`, next to the package.

    Args:
        models: look here instead.

    Raises:
        ConfigError: there is none, or more than one.
    """
    models = models or Path(__file__).resolve().parent.parent / "models"
    if (models / "manifest.json").is_file():
        return models
    folders = sorted(manifest.parent for manifest in models.glob("*/manifest.json"))
    if len(folders) == 1:
        return folders[0]
    names = ", ".join(folder.name for folder in folders) or "none"
    raise ConfigError(
        f"{models} must hold exactly one bundle, and holds {names}; "
        f"set {BUNDLE_VARIABLE} to the folder of the one to serve"
    )


def num_usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_workers() -> int:
    """Return the number of workers, which BentoML reads at import; 1 if it is invalid."""
    with contextlib.suppress(ConfigError):
        if text := os.environ.get(_WORKERS):
            return int(_read(_WORKERS, text, *_NUMBERS[_WORKERS][1:]))
        if file := os.environ.get(MODELS_VARIABLE):
            return _listed_workers(Path(file))
    return 1


def _listed_workers(models: Path) -> int:
    """Return the workers of a models file; 1 for a folder."""
    return 1 if models.is_dir() else read_models_file(models).workers or 1


def _sources(variables: Mapping[str, str]) -> dict[str, Any]:
    bundle, models = variables.get(BUNDLE_VARIABLE), variables.get(MODELS_VARIABLE)
    if bundle and models:
        raise ConfigError(f"{BUNDLE_VARIABLE} and {MODELS_VARIABLE} are set; set one of them")
    if models:
        return {"bundle": None, "models": Path(models)}
    return {"bundle": Path(bundle) if bundle else shipped_bundle(), "models": None}


def _cache_folder(variables: Mapping[str, str]) -> Path | None:
    """Return the user's cache folder; None without a home folder."""
    if CACHE_VARIABLE in variables:
        return Path(variables[CACHE_VARIABLE])
    if "XDG_CACHE_HOME" in variables:
        return Path(variables["XDG_CACHE_HOME"]) / "albert-serve"
    try:
        return Path.home() / ".cache/albert-serve"
    except RuntimeError:
        return None


def _access(variables: Mapping[str, str]) -> dict[str, Any]:
    keys, file = _listed(variables, _API_KEYS), variables.get(_API_KEYS_FILE)
    chosen: dict[str, Any] = {"api_keys": keys, "cors_origins": _listed(variables, _CORS_ORIGINS)}
    for origin in chosen["cors_origins"]:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{_CORS_ORIGINS} holds {origin!r}; an origin is like https://app.example.com, "
                "without a path, or * for all"
            )
    if file:
        chosen["api_keys_file"] = Path(file)
    if _GUARD in variables:
        if not keys and not file:
            raise ConfigError(
                f"{_GUARD} is set, but there is no key; set {_API_KEYS} or {_API_KEYS_FILE}"
            )
        names = _listed(variables, _GUARD)
        chosen["guard"] = tuple(_choose(_GUARD, name, get_args(Surface)) for name in names)
    return chosen


def _listed(variables: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """Return a variable's comma-separated values, without duplicates."""
    parts = (part.strip() for part in variables.get(variable, "").split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def _choose(name: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise ConfigError(f"{name} is {text!r}; allowed are {', '.join(allowed)}")
    return text


def _read(name: str, text: str, kind: type[int | float], least: float, most: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        what = "a whole number" if kind is int else "a number of seconds"
        raise ConfigError(f"{name} is {text!r}; it must be {what} from {least:.16g} to {most:.16g}")
    return value


# Variable -> field, type, minimum and maximum.
_NUMBERS: Final[dict[str, tuple[str, type[int | float], float, float]]] = {
    _WORKERS: ("num_workers", int, 1, 256),
    "ALBERT_SERVE_THREADS": ("num_threads", int, 1, 1024),
    "ALBERT_SERVE_MAX_BATCH_TOKENS": ("max_batch_tokens", int, 1, 1 << 24),
    "ALBERT_SERVE_MAX_QUEUE_TOKENS": ("max_queue_tokens", int, 1, 1 << 30),
    "ALBERT_SERVE_MAX_WAIT_S": ("max_wait_s", float, 0.05, _LONGEST_DEADLINE_S),
    "ALBERT_SERVE_DEADLINE_S": ("deadline_s", float, 0.05, _LONGEST_DEADLINE_S),
    "ALBERT_SERVE_MAX_BODY_BYTES": ("max_body_bytes", int, 1, 1 << 30),
    "ALBERT_SERVE_MAX_ITEMS": ("max_items", int, 1, 1 << 16),
    "ALBERT_SERVE_DRAIN_GRACE_S": ("drain_grace_s", float, 0, 600),
}
# Variable -> field, and its allowed values.
_CHOICES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "ALBERT_SERVE_DEVICE": ("device", get_args(Device)),
    "ALBERT_SERVE_PREPACK": ("prepack", ("auto", *get_args(Prepack))),
    "ALBERT_SERVE_SPINNING": ("spinning", ("auto", "on", "off")),
    "ALBERT_SERVE_LOG_FORMAT": ("log_format", ("text", "json")),
}
