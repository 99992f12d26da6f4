"""The settings of the service, read from the environment once, and nowhere else.

Each is a variable `ALBERT_SERVE_<NAME>`; docs/operate.md has the list with their meanings.
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
# Before a tag of BentoML's model store.
STORE_PREFIX: Final = "bentoml:"
# Set by the supervisor for its workers; no settings.
SUPERVISOR_VARIABLE: Final = "_ALBERT_SERVE_SUPERVISOR"
METRICS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
HOSTS_VARIABLE: Final = "ALBERT_SERVE_ALLOWED_HOSTS"
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]")
_LIKE_OURS: Final = re.compile("ALBERT(_?SERV|_.*KEY)")
# The addresses of services that Kubernetes gives to every container; a service named
# `albert-serve` makes ALBERT_SERVE_PORT=tcp://10.0.0.1:80.
_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_|_PORT=(tcp|udp|sctp)://")
# Of the Python clients (client/server.py).
_CLIENTS_KEY: Final = "ALBERT_API_KEY"
_HOST: Final = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\]")
_ORIGIN: Final = re.compile(r"https?://[^/\s?#@]+")
# BentoML's timeout is 60 s (service.py); ours must be shorter, because it replies with a reason.
_LONGEST_DEADLINE_S: Final = 55.0

Device = Literal["auto", "cpu", "cuda"]
# The surfaces that keys can guard: the tasks and /info, the metrics, and the documentation.
Surface = Literal["api", "metrics", "docs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """The runtime options of a bundle.

    Attributes:
        device: "auto" is CUDA where a call on it succeeds, else the CPU.
        num_threads: threads of one run; None: the CPUs that this process may use.
        spinning: whether threads wait for each other actively: 5 to 10 % faster, unless other
            processes want the same cores.
        cache_folder: of weights pre-packed for this CPU's kernels, which processes and sessions
            share; None: each session packs them into memory of its own.
        gpu_mem_limit: of the activations of an encoder on CUDA, in bytes.
    """

    device: Device = "auto"
    num_threads: int | None = None
    gpu_mem_limit: int | None = None
    spinning: bool = True
    cache_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.device not in get_args(Device):
            allowed = ", ".join(get_args(Device))
            raise ConfigError(f"device is {self.device!r}; allowed are {allowed}")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads is {self.num_threads}; it must be 1 or more")

    @property
    def threads(self) -> int:
        """Threads of one run."""
        return self.num_threads or num_usable_cpus()


def _split(value: object) -> object:
    """Return comma-separated values as a tuple, without duplicates."""
    if not isinstance(value, str):
        return value
    parts = (part.strip() for part in value.split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def _check_set(value: object) -> object:
    """Refuse a variable of keys that holds none: the service would be open to everyone."""
    if isinstance(value, str) and not value.strip(", "):
        raise ValueError(
            "is set, but empty; put into it what it is for, or unset it: without keys the service "
            "is open to everyone who reaches it"
        )
    return value


def _each_like(pattern: re.Pattern[str], description: str) -> AfterValidator:
    """Return a check of comma-separated values, each of which may be * as well."""

    def check(values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if value != "*" and not pattern.fullmatch(value):
                raise ValueError(f"holds {value!r}; {description}, or * for all")
        return values

    return AfterValidator(check)


def cache_folder() -> Path | None:
    """Return the cache folder of the settings; None without one and without a home folder."""
    if named := os.environ.get(CACHE_VARIABLE, "").strip():
        return Path(named)
    if folder := os.environ.get("XDG_CACHE_HOME", "").strip():
        return Path(folder) / "albert-serve"
    try:
        return Path.home() / ".cache/albert-serve"
    except RuntimeError:
        return None


class Settings(BaseModel):
    """The settings of a deployment. `from_environment` reads them; docs/operate.md has each.

    Attributes:
        bundle: the folder to serve, or a tag of BentoML's model store; None if `models` is set.
        models: a folder of bundles.
        max_batch_tokens: None for the engine's own, which depends on its device.
        allowed_hosts: empty: all, but those of the loopback alone where no key is needed and the
            service listens there only.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # they may be keys
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
    deadline_s: float = Field(30.0, ge=0.05, le=_LONGEST_DEADLINE_S)
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
        _each_like(_ORIGIN, "an origin is like https://app.example.com, without a path"),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        BeforeValidator(_split),
        _each_like(_HOST, "a host is like app.example.com, *.example.com or [::1], without a port"),
    ] = ()
    log_format: Literal["text", "json"] = "text"

    @classmethod
    def from_environment(cls, options: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; those that are unset or empty keep their defaults.

        Args:
            options: values that go before the environment's, by variable.
        """
        source = {**os.environ, **(options or {})}
        _check_names(source)
        values: dict[str, Any] = {
            field: source[variable].strip()
            for variable, field in VARIABLES.items()
            # An empty variable of keys is refused: the service would be open.
            if source.get(variable, "").strip() or ("keys" in field and variable in source)
        }
        if "models" not in values:
            values.setdefault("bundle", shipped_bundle())
        elif "bundle" in values:
            raise ConfigError(f"{BUNDLE_VARIABLE} and {MODELS_VARIABLE} are set; set one of them")
        if "guard" in values and not {"api_keys", "api_keys_file"} & values.keys():
            raise ConfigError(
                f"{_PREFIX}GUARD is set, but there is no key; set {_PREFIX}API_KEYS or "
                f"{_PREFIX}API_KEYS_FILE"
            )
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_describe, error.errors()))) from error

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
        return self._runtime(self.num_workers, shares_weights=self.num_workers > 1)

    @property
    def job_runtime(self) -> RuntimeOptions:
        """The runtime options of batch scoring: alone on the machine, in parallel sessions."""
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
        # Disables BentoML's usage reports, unless the variable is set.
        quiet = {"BENTOML_DO_NOT_TRACK": "True"}
        inherited = {name: text for name, text in os.environ.items() if name not in VARIABLES}
        chosen = {name: _text(getattr(self, field)) for name, field in VARIABLES.items()}
        if not self.has_keys:
            del chosen[f"{_PREFIX}GUARD"]
        return {**quiet, **inherited, **{name: text for name, text in chosen.items() if text}}


def store_tag(bundle: Path) -> str | None:
    """Return the tag in BentoML's model store that is passed in place of a folder, or None."""
    text = str(bundle)
    return text.removeprefix(STORE_PREFIX) if text.startswith(STORE_PREFIX) else None


def _text(value: object) -> str:
    """Return a setting as its variable has it; empty if it is None."""
    if isinstance(value, Path):
        if store_tag(value) is not None:
            return str(value)
        return os.path.abspath(value)  # links are not resolved: their targets may change
    if isinstance(value, tuple):
        return ",".join(value)
    return "" if value is None else str(value)


# Those that are not called as their fields are.
_NAMES: Final = {"num_workers": "WORKERS", "num_threads": "THREADS", "cache_folder": "CACHE"}
# Variable -> field.
VARIABLES: Final = {
    _PREFIX + _NAMES.get(field, field.upper()): field for field in Settings.model_fields
}


def _check_names(variables: Mapping[str, str]) -> None:
    """Refuse variables that look like settings and are none: a misspelt one would go unnoticed."""
    for name, value in variables.items():
        if (
            not _LIKE_OURS.match(name.upper())
            or name in VARIABLES
            or name == _CLIENTS_KEY
            or _KUBERNETES.search(f"{name}={value}")
        ):
            continue
        near = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.85)
        hint = f"did you mean {near[0]}?" if near else "unset it; docs/operate.md lists them"
        raise ConfigError(f"{name} is set, but there is no such setting; {hint}")


def _describe(error: ErrorDetails) -> str:
    """Return a fault of a variable in one sentence: what it is, and what it may be."""
    name = str(error["loc"][0])
    variable = next(each for each, field in VARIABLES.items() if field == name)
    if reason := error.get("ctx", {}).get("error"):
        return f"{variable} {reason}"
    if error["type"] == "literal_error":
        allowed = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        return f"{variable} is {error['input']!r}; allowed are {allowed}"
    bounds = {
        key: getattr(one, key)
        for one in Settings.model_fields[name].metadata
        for key in ("ge", "le")
        if hasattr(one, key)
    }
    what = "a number of seconds" if variable.endswith("_S") else "a whole number"
    return (
        f"{variable} is {error['input']!r}; it must be {what} from {bounds['ge']:.16g} to "
        f"{bounds['le']:.16g}"
    )


def num_usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def supervisor_pid() -> int | None:
    """Return the process that started this one as its worker; None if it is not a worker."""
    value = os.environ.get(SUPERVISOR_VARIABLE)
    return int(value) if value else None


def metrics_folder() -> Path | None:
    """Return the folder of the metrics of all workers; None outside of a service."""
    value = os.environ.get(METRICS_VARIABLE)
    return Path(value) if value else None


def num_workers() -> int:
    """Return the number of workers, which BentoML reads at import; 1 if a setting is invalid."""
    with contextlib.suppress(ConfigError):
        return Settings.from_environment().num_workers
    return 1


def allocator_variables() -> dict[str, str]:
    """Return the variables by which a worker has one heap for all threads.

    glibc returns the free pages of its first heap only. Those of the environment hold.
    """
    return {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")}


def shipped_bundle(models: Path | None = None) -> Path:
    """Return the folder of the default bundle, in `models/` next to the package or within it.

    A checkout has the fp32 version next to it, a wheel the int8 version within it.

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
