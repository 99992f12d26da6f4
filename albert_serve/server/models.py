"""The hosted models of a process, each with its tasks, its limits, and a queue for its engine."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from albert_serve import __version__
from albert_serve.api.schemas import ModelReply
from albert_serve.batching.queue import Batcher, BatchObserver
from albert_serve.bundle.catalog import Catalogue, read_catalogue
from albert_serve.bundle.manifest import MANIFEST_FILE, TOKENIZER_FILE, WEIGHTS_FILE, Bundle
from albert_serve.errors import ConfigError, NotFoundError
from albert_serve.runtime.cuda import cuda_error, no_cuda_reason
from albert_serve.runtime.encoders import EncoderPool
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import return_free_memory
from albert_serve.server.limits import LargeRequests, Limits
from albert_serve.server.metrics import Metrics
from albert_serve.server.paths import RequestTarget
from albert_serve.settings import DEFAULT_VARIABLE, RuntimeOptions, Settings
from albert_serve.tasks import Task, load_tasks
from albert_serve.tasks.description import describe
from albert_serve.tokenizer import AlbertTokenizer

# All connections together may have this many bodies of the maximum size in memory.
_MAX_LARGE_BODIES: Final = 16
_CHECK_EVERY_S: Final = 1.0
# glibc may retain this much memory, above the minimum since startup, for the next requests.
_RETAINED_BYTES: Final = 8 << 20
_STATM: Final = Path("/proc/self/statm")
_logger = logging.getLogger(__name__)


def describe_hosted(name: str, bundle: Bundle, settings: Settings, mask_token: str) -> ModelReply:
    """Return a model's description and limits. Call this in a thread, because it reads files."""
    return ModelReply(
        **dict(describe(bundle.manifest, name, bundle.folder)),
        id=name,
        created=int((bundle.folder / MANIFEST_FILE).stat().st_mtime),
        version=__version__,
        mask_token=mask_token,
        max_items=settings.max_items,
        max_body_bytes=settings.max_body_bytes,
        needs_key=settings.needs_key,
    )


@dataclass(kw_only=True, slots=True, eq=False)
class HostedModel:
    """A model that answers the requests of one event loop.

    Attributes:
        name: name of the model, as in paths.
        tasks: tasks of the bundle by endpoint name.
        description: description of the model and its limits.
        info_json: body of the reply of `/info`.
    """

    name: str
    settings: Settings
    bundle: Bundle
    tasks: dict[str, Task]
    batcher: Batcher
    limits: Limits
    description: ModelReply
    info_json: str = field(init=False)

    def __post_init__(self) -> None:
        self.info_json = self.description.model_dump_json()

    async def close(self) -> None:
        """Answer the accepted requests, then end the engine's thread."""
        await self.limits.unused.wait()
        await self.batcher.close()


class Models:
    """The hosted models of a process, for one event loop.

    Attributes:
        accepting: whether requests are accepted, which is false once shutdown begins.
        served: models by name.
        default_name: name of the model that answers requests without a model's name.
    """

    def __init__(self, settings: Settings, metrics: Metrics | None = None) -> None:
        self.settings = settings
        self.accepting = True
        self._metrics = metrics
        self._encoders = EncoderPool()
        self._large = LargeRequests(max_bytes=_MAX_LARGE_BODIES * settings.max_body_bytes)
        self._tokenizers: WeakValueDictionary[str, AlbertTokenizer] = WeakValueDictionary()
        self.served: dict[str, HostedModel] = {}
        self.default_name = ""
        self._trim_task: asyncio.Task[None] | None = None

    @classmethod
    def load(cls, settings: Settings, metrics: Metrics) -> Models:
        """Open and warm up the models of the settings, and log failures."""
        models = cls(settings, metrics)
        catalogue = read_catalogue(settings)
        models.served = {model.name: model for model in models._open_all(catalogue)}
        models.default_name = catalogue.default_among(models.served)
        return models

    def start(self) -> None:
        """Start to return free memory to the system, unless a previous call has started this."""
        if self._trim_task is None:
            self._trim_task = asyncio.get_running_loop().create_task(keep_memory_low())

    @property
    def default(self) -> HostedModel:
        """The model that answers requests without a model's name."""
        return self.served[self.default_name]

    def get(self, name: str | None) -> HostedModel:
        """Return the model with this name, or the default model if the name is None."""
        name = self.default_name if name is None else name
        if name not in self.served:
            raise NotFoundError(
                f"{name!r} is not a model of this service. Use one of {', '.join(self.served)}."
            )
        return self.served[name]

    def find(self, target: RequestTarget) -> tuple[Limits, str] | None:
        """Return the target's task and its model's limits, or None if the model lacks the task."""
        model, task = self.served.get(target.model or self.default_name), target.task
        return (model.limits, task) if task and model and task in model.tasks else None

    async def close(self) -> None:
        """Answer the accepted requests, then close the models."""
        self.accepting = False
        await asyncio.gather(*(model.close() for model in self.served.values()))
        if self._trim_task is not None:
            self._trim_task.cancel()

    def _open_all(self, catalogue: Catalogue) -> Iterator[HostedModel]:
        """Yield each model of the catalogue that can be opened and run."""
        bundles, errors = catalogue.open_bundles()
        options = _shared_options(self.settings, bundles)
        for name, bundle in bundles.items():
            try:
                model = self.open(name, bundle, options)
            except Exception as error:  # noqa: BLE001  # the other models are served
                errors[name] = error
            else:
                yield model
                del model  # so that the caller can hold one model at a time
        catalogue.check_any(errors)
        for name, failure in errors.items():
            _logger.error("Model %s is not served. %s", name, failure)

    def open(self, name: str, bundle: Bundle, options: RuntimeOptions) -> HostedModel:
        """Open a model and run it once, without serving it yet. Any thread may call this."""
        engine = Engine.open(bundle, options, self._encoders)
        if self.settings.max_batch_tokens is not None:
            engine.max_batch_tokens = self.settings.max_batch_tokens
        engine.warm_up()
        tokenizer = self._tokenizer(bundle)
        tasks = load_tasks(bundle, tokenizer)
        description = describe_hosted(name, bundle, self.settings, tokenizer.mask_token)
        observer = BatchObserver()
        if self._metrics is not None:
            observer = self._metrics.observer(name, bundle.manifest.precision, tasks)
        limits = Limits(name, self.settings, self._large, observer)
        batcher = Batcher(
            engine,
            check_room=limits.check_tokens,
            call_overhead_tokens=engine.call_overhead_tokens,
            observer=observer,
        )
        return HostedModel(
            name=name,
            settings=self.settings,
            bundle=bundle,
            tasks=tasks,
            batcher=batcher,
            limits=limits,
            description=description,
        )

    def _tokenizer(self, bundle: Bundle) -> AlbertTokenizer:
        """Return the bundle's tokenizer, which bundles with the same file share."""
        key = bundle.manifest.files[TOKENIZER_FILE].sha256
        tokenizer = self._tokenizers.get(key)
        if tokenizer is None:
            tokenizer = self._tokenizers[key] = AlbertTokenizer.from_file(bundle.tokenizer_file)
        return tokenizer


def check_models(settings: Settings) -> str:
    """Open and run the configured bundles as workers do, and log failures.

    Returns:
        The name of the default model.
    """
    if settings.device == "cuda" and (reason := no_cuda_reason()) is not None:
        raise cuda_error(reason)
    catalogue = read_catalogue(settings)
    preferred = settings.default_model
    if preferred not in (None, *catalogue.bundles):
        raise ConfigError(
            f"{DEFAULT_VARIABLE} is {preferred!r}. Choose one of {', '.join(catalogue.bundles)}."
        )
    # This uses the CPU, because a process never returns all memory of a GPU.
    trial = Models(settings.model_copy(update={"device": "cpu"}))
    names = []
    for model in trial._open_all(catalogue):
        names.append(model.name)
        if not model.bundle.manifest.tasks:
            _logger.warning("%s has no heads, so its only task is embeddings.", model.name)
        del model
    return_free_memory()
    default = catalogue.default_among(names)
    if default != catalogue.default:
        _logger.error("The default model is %s, because %s failed.", default, catalogue.default)
    return default


def _shared_options(settings: Settings, bundles: Mapping[str, Bundle]) -> RuntimeOptions:
    """Return the runtime options that all models share."""
    encoders = {bundle.manifest.files[WEIGHTS_FILE].sha256 for bundle in bundles.values()}
    if settings.spinning == "auto" and len(encoders) > 1:
        return replace(settings.runtime, spinning=False)  # docs/decisions.md has the measurement
    return settings.runtime


async def keep_memory_low() -> None:
    """Return free memory to the system once a second, if there may be much of it.

    glibc would keep most of this memory. A large request frees memory at several moments: when its
    reply has been sent, when its client has disconnected, or when the engine has finished.
    Returning memory takes 2 ms even if none is free, so a separate thread does it.
    """
    minimum = num_anonymous_bytes()
    while minimum is not None:
        await asyncio.sleep(_CHECK_EVERY_S)
        num_bytes = num_anonymous_bytes()
        if num_bytes is None:
            return
        minimum = min(minimum, num_bytes)
        if num_bytes > minimum + _RETAINED_BYTES:
            await asyncio.to_thread(return_free_memory)


def num_anonymous_bytes() -> int | None:
    """Return this process's resident memory without file pages, in bytes, or None if unknown."""
    try:
        _, resident, shared, *_ = map(int, _STATM.read_text(encoding="ascii").split())
    except OSError:  # the file exists only on Linux
        return None
    return (resident - shared) * mmap.PAGESIZE
