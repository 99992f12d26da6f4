"""The settings of the service, which are read from the environment once, and only here.

Each setting is a variable `ALBERT_SERVE_<NAME>`. docs/operate.md describes them.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from albert_serve.errors import ConfigError

_PREFIX: Final = "ALBERT_SERVE_"
BUNDLE_VARIABLE: Final = "ALBERT_SERVE_BUNDLE"
MODELS_VARIABLE: Final = "ALBERT_SERVE_MODELS"
DEFAULT_VARIABLE: Final = "ALBERT_SERVE_DEFAULT_MODEL"
CACHE_VARIABLE: Final = "ALBERT_SERVE_CACHE"
# This prefix distinguishes a tag of BentoML's model store from a folder.
STORE_PREFIX: Final = "bentoml:"
# These two are not settings. The supervisor sets them for its workers.
SUPERVISOR_VARIABLE: Final = "_ALBERT_SERVE_SUPERVISOR"
METRICS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
HOSTS_VARIABLE: Final = "ALBERT_SERVE_ALLOWED_HOSTS"
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]")
_SIMILAR_NAME: Final = re.compile("ALBERT(_?SERV|_.*KEY)")
# Kubernetes sets the addresses of all services in every container: for a service named
# `albert-serve`, ALBERT_SERVE_PORT=tcp://10.0.0.1:80.
_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_|_PORT=(tcp|udp|sctp)://")
# The Python clients read this variable (client/server.py).
_CLIENT_KEY: Final = "ALBERT_API_KEY"
_HOST: Final = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\]")
_ORIGIN: Final = re.compile(r"https?://[^/\s?#@]+")
# BentoML's timeout is 60 s (service.py). Deadlines are shorter, so that replies give a reason.
_MAX_DEADLINE_S: Final = 55.0

Device = Literal["auto", "cpu", "cuda"]
# Keys can guard these surfaces: the tasks and /info, the metrics, and the documentation.
Surface = Literal["api", "metrics", "docs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """The runtime options of a bundle.

    Attributes:
        device: device to run on. "auto" is CUDA if a test call succeeds there, or else the CPU.
        num_threads: number of threads of one run (default: one per CPU that this process may use).
        gpu_mem_limit: maximum size of an encoder's activations on CUDA, in bytes.
        spinning: whether threads wait for each other actively. This is 5 to 10 % faster, unless
            other processes use the same cores.
        cache_folder: folder of weights prepacked for this CPU, which processes and sessions share.
            If it is None, each session packs the weights into its own memory.
    """

    device: Device = "auto"
    num_threads: int | None = None
    gpu_mem_limit: int | None = None
    spinning: bool = True
    cache_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.device not in get_args(Device):
            allowed = ", ".join(get_args(Device))
            raise ConfigError(f"device is {self.device!r}. Choose one of {allowed}.")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads is {self.num_threads}. Use 1 or more.")

    @property
    def threads(self) -> int:
        """The number of threads of one run."""
        return self.num_threads or num_usable_cpus()


def _split(value: object) -> object:
    """Return comma-separated values as a tuple, without duplicates."""
    if not isinstance(value, str):
        return value
    parts = (part.strip() for part in value.split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def _check_set(value: object) -> object:
    """Reject an empty variable for keys, because the service would be open to everyone."""
    if isinstance(value, str) and not value.strip(", "):
        raise ValueError(
            "is set but empty. Set a value, or unset it. Without keys, anyone who reaches the "
            "service can use it."
        )
    return value


def _check_each(pattern: re.Pattern[str], examples: str) -> AfterValidator:
    """Return a check of comma-separated values, each of which may also be *."""

    def check(values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if value != "*" and not pattern.fullmatch(value):
                raise ValueError(f"contains {value!r}. Use {examples}, or * for all.")
        return values

    return AfterValidator(check)


def cache_folder() -> Path | None:
    """Return the cache folder, or None if it is not set and there is no home folder."""
    if folder := os.environ.get(CACHE_VARIABLE, "").strip():
        return Path(folder)
    if parent := os.environ.get("XDG_CACHE_HOME", "").strip():
        return Path(parent) / "albert-serve"
    try:
        return Path.home() / ".cache/albert-serve"
    except RuntimeError:
        return None


class Settings(BaseModel):
    """The settings of a deployment. docs/operate.md describes each.

    Attributes:
        bundle: bundle to serve (folder or tag of BentoML's model store), or None if `models` is
            set.
        models: folder of bundles to serve.
        max_batch_tokens: maximum number of tokens in a batch (default: the engine's maximum).
        allowed_hosts: hosts that requests may name (default: all, or only the loopback's names if
            the service listens only there and requires no key).
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # an input may be a key
    )

    bundle: Path | None = None
    models: Path | None = None
    default_model: str | None = None
    num_workers: int = Field(1, ge=1, le=256)
    num_threads: int | None = Field(None, ge=1, le=1024)
    device: Device = "auto"
    gpu_mem_limit: int | None = Field(None, ge=1 << 20, le=1 << 50)
    spinning: Literal["auto", "on", "off"] = "auto"
    cache_folder: Path | None = Field(default_factory=cache_folder)
    max_batch_tokens: int | None = Field(None, ge=1, le=1 << 24)
    max_queue_tokens: int = Field(131_072, ge=1, le=1 << 30)
    max_concurrency: int = Field(128, ge=1, le=1 << 16)
    deadline_s: float = Field(30.0, ge=0.05, le=_MAX_DEADLINE_S)
    max_body_bytes: int = Field(4_194_304, ge=1, le=1 << 30)
    max_items: int = Field(1024, ge=1, le=1 << 16)
    drain_grace_s: float = Field(0.0, ge=0, le=600)
    api_keys: Annotated[tuple[str, ...], BeforeValidator(_split), BeforeValidator(_check_set)] = (
        Field((), repr=False)
    )
    api_keys_file: Annotated[Path | None, BeforeValidator(_check_set)] = None
    guard: Annotated[tuple[Surface, ...], BeforeValidator(_split)] = get_args(Surface)
    cors_origins: Annotated[
        tuple[str, ...],
        BeforeValidator(_split),
        _check_each(_ORIGIN, "origins such as https://app.example.com without a path"),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        BeforeValidator(_split),
        _check_each(_HOST, "hosts such as app.example.com, *.example.com or [::1] without a port"),
    ] = ()
    log_format: Literal["text", "json"] = "text"

    @classmethod
    def from_environment(cls, options: Mapping[str, str] | None = None) -> Settings:
        """Read the variables. An unset or empty variable means the default.

        Args:
            options: values by variable, which override the environment's.
        """
        source = {**os.environ, **(options or {})}
        _check_names(source)
        values: dict[str, Any] = {
            field: source[variable].strip()
            for variable, field in VARIABLES.items()
            # An empty variable for keys reaches `_check_set`, which rejects it.
            if source.get(variable, "").strip() or ("keys" in field and variable in source)
        }
        if "models" not in values:
            values.setdefault("bundle", shipped_bundle())
        elif "bundle" in values:
            raise ConfigError(
                f"{BUNDLE_VARIABLE} and {MODELS_VARIABLE} are both set. Set only one of them."
            )
        if "guard" in values and not {"api_keys", "api_keys_file"} & values.keys():
            raise ConfigError(
                f"{_PREFIX}GUARD is set, but there is no key. Set {_PREFIX}API_KEYS or "
                f"{_PREFIX}API_KEYS_FILE."
            )
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(" ".join(map(_describe, error.errors()))) from error

    @property
    def has_keys(self) -> bool:
        """Whether any surface requires a key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def needs_key(self) -> bool:
        """Whether the tasks require a key."""
        return self.has_keys and "api" in self.guard

    @property
    def runtime(self) -> RuntimeOptions:
        """The runtime options of a worker."""
        return self._runtime(self.num_workers, shares_weights=self.num_workers > 1)

    @property
    def job_runtime(self) -> RuntimeOptions:
        """The runtime options of batch scoring, which has the machine to itself."""
        return self._runtime(1, shares_weights=True)

    def _runtime(self, num_workers: int, *, shares_weights: bool) -> RuntimeOptions:
        return RuntimeOptions(
            device=self.device,
            num_threads=self.num_threads or max(1, num_usable_cpus() // num_workers),
            spinning=self.spinning != "off",
            cache_folder=self.cache_folder if shares_weights else None,
            gpu_mem_limit=self.gpu_mem_limit,
        )

    def environment(self) -> dict[str, str]:
        """Return this process's environment with these settings, for a child process."""
        # This disables BentoML's usage reports, unless the user has set the variable.
        defaults = {"BENTOML_DO_NOT_TRACK": "True"}
        inherited = {name: text for name, text in os.environ.items() if name not in VARIABLES}
        settings = {name: _text(getattr(self, field)) for name, field in VARIABLES.items()}
        if not self.has_keys:
            del settings[f"{_PREFIX}GUARD"]
        return {**defaults, **inherited, **{name: text for name, text in settings.items() if text}}


def store_tag(bundle: Path) -> str | None:
    """Return the tag of BentoML's model store that `bundle` contains, or None for a folder."""
    text = str(bundle)
    return text.removeprefix(STORE_PREFIX) if text.startswith(STORE_PREFIX) else None


def _text(value: object) -> str:
    """Return the text of a setting's variable, which is empty for None."""
    if isinstance(value, Path):
        if store_tag(value) is not None:
            return str(value)
        return os.path.abspath(value)  # keeps links, because their targets may change
    if isinstance(value, tuple):
        return ",".join(value)
    return "" if value is None else str(value)


# The variables whose names differ from their fields.
_NAMES: Final = {"num_workers": "WORKERS", "num_threads": "THREADS", "cache_folder": "CACHE"}
# This maps variables to fields.
VARIABLES: Final = {
    _PREFIX + _NAMES.get(field, field.upper()): field for field in Settings.model_fields
}


def _check_names(variables: Mapping[str, str]) -> None:
    """Reject variables whose names resemble a setting's, because misspellings go unnoticed."""
    for name, value in variables.items():
        if (
            not _SIMILAR_NAME.match(name.upper())
            or name in VARIABLES
            or name == _CLIENT_KEY
            or _KUBERNETES.search(f"{name}={value}")
        ):
            continue
        similar = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.85)
        hint = f"Did you mean {similar[0]}?" if similar else "Unset it. See docs/operate.md."
        raise ConfigError(f"{name} is not a setting. {hint}")


def _describe(error: ErrorDetails) -> str:
    """Return a message with a variable's value and its allowed values."""
    name = str(error["loc"][0])
    variable = next(variable for variable, field in VARIABLES.items() if field == name)
    if reason := error.get("ctx", {}).get("error"):
        return f"{variable} {reason}"
    if error["type"] == "literal_error":
        allowed = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        return f"{variable} is {error['input']!r}. Choose one of {allowed}."
    bounds = {
        key: getattr(constraint, key)
        for constraint in Settings.model_fields[name].metadata
        for key in ("ge", "le")
        if hasattr(constraint, key)
    }
    number = "a number of seconds" if variable.endswith("_S") else "a whole number"
    return (
        f"{variable} is {error['input']!r}. Use {number} from {bounds['ge']:.16g} to "
        f"{bounds['le']:.16g}."
    )


def num_usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def supervisor_pid() -> int | None:
    """Return the id of this worker's supervisor, or None if this process is not a worker."""
    value = os.environ.get(SUPERVISOR_VARIABLE)
    return int(value) if value else None


def metrics_folder() -> Path | None:
    """Return the folder of all workers' metrics, or None outside a service."""
    value = os.environ.get(METRICS_VARIABLE)
    return Path(value) if value else None


def num_workers() -> int:
    """Return the number of workers, or 1 if a setting is invalid. BentoML reads it at import."""
    with contextlib.suppress(ConfigError):
        return Settings.from_environment().num_workers
    return 1


def allocator_variables() -> dict[str, str]:
    """Return the variables that give a worker one heap for all threads.

    glibc returns only the free pages of its first heap. The environment's value has precedence.
    """
    return {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")}


def shipped_bundle(models: Path | None = None) -> Path:
    """Return the folder of the default bundle.

    A checkout has it in `models/` next to the package (fp32), a wheel within the package (int8).

    Args:
        models: folder to search instead.
    """
    models = models or _models_folder(Path(__file__).resolve().parent)
    folders = sorted(manifest.parent for manifest in models.glob("*/manifest.json"))
    if len(folders) == 1:
        return folders[0]
    names = ", ".join(folder.name for folder in folders) or "none"
    raise ConfigError(
        f"{models} must contain exactly one bundle, but contains {names}. "
        f"Set {BUNDLE_VARIABLE} to the folder of the bundle to serve."
    )


def _models_folder(package: Path) -> Path:
    outside, inside = package.parent / "models", package / "models"
    # Another package may have put a folder of this name into site-packages.
    return outside if not inside.is_dir() or any(outside.glob("*/manifest.json")) else inside
