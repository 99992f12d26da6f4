"""The registry of hosted models, by name; each can be replaced while it is in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry

from albert_serve.api.model_card import ModelCard
from albert_serve.batching.batcher import Batcher
from albert_serve.bundle.catalog import Catalogue, ModelSpec, read_catalogue
from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE, Bundle
from albert_serve.errors import ConfigError, NotFoundError
from albert_serve.runtime.cuda import cannot_be_used, no_cuda_reason
from albert_serve.runtime.encoder_pool import EncoderPool
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import return_free_memory
from albert_serve.server.metrics import Metrics
from albert_serve.server.models.hosted_model import HostedModel, read_card
from albert_serve.server.paths import Target
from albert_serve.server.process.memory import keep_memory_low
from albert_serve.server.process.threads import RequestThreads, lower_priority
from albert_serve.settings import DEFAULT_VARIABLE, RuntimeOptions, Settings
from albert_serve.tasks import AnyTask
from albert_serve.tasks.load import load_tasks
from albert_serve.tokenizer import AlbertTokenizer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """A model in memory that is warmed up."""

    spec: ModelSpec
    options: RuntimeOptions
    bundle: Bundle
    engine: Engine
    tasks: dict[str, AnyTask]
    card: ModelCard

    def is_same(self, spec: ModelSpec, options: RuntimeOptions, bundle: Bundle) -> bool:
        """Whether reloading would change nothing."""
        same = (self.spec, self.options) == (spec, options)
        return same and self.bundle.manifest.revision == bundle.manifest.revision


class Models:
    """The hosted models of a process. `Models.load` makes it, `start` binds it to the event loop.

    Attributes:
        accepting: False from the moment that the process begins to shut down.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.accepting = True
        self._metrics = metrics
        self._pool = EncoderPool()
        self._threads = RequestThreads(start_thread=lower_priority)
        self._tokenizers: WeakValueDictionary[str, AlbertTokenizer] = WeakValueDictionary()
        self._loaded: dict[str, _Loaded] = {}
        self._hosted: dict[str, HostedModel] = {}
        self._default = ""
        self._num_changes = 0
        self._reload_lock = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._trimming: asyncio.Task[None] | None = None

    @classmethod
    def load(cls, settings: Settings, metrics: Metrics) -> Models:
        """Open and warm up the models that the settings name; the log says which cannot be.

        Raises:
            ConfigError: none can be opened and run.
        """
        models = cls(settings, metrics)
        catalogue = read_catalogue(settings)
        models._loaded = {loaded.spec.name: loaded for loaded in models._load_each(catalogue)}
        models._default = catalogue.default_among(models._loaded)
        return models

    def start(self) -> None:
        """Start hosting; call it and all other methods on the event loop."""
        for name, loaded in self._loaded.items():
            self._hosted[name] = self._serve(loaded)
        self._trimming = asyncio.get_running_loop().create_task(keep_memory_low())

    @property
    def default(self) -> HostedModel:
        """The model of requests that name none."""
        return self._hosted[self._default]

    @property
    def names(self) -> list[str]:
        """The names of the hosted models."""
        return list(self._hosted)

    def get(self, name: str | None) -> HostedModel:
        """Return a model by its name, or the default.

        Raises:
            NotFoundError: there is none.
        """
        hosted = self.default if name is None else self._hosted.get(name)
        if hosted is None:
            raise NotFoundError(f"there is no model {name!r}; there are {', '.join(self.names)}")
        return hosted

    def find_task(self, target: Target) -> tuple[str, str] | None:
        """Return the names of a target's model and task; None if it is no task that there is."""
        name, task = target.model or self._default, target.task
        hosted = self._hosted.get(name)
        return (name, task) if task and hosted and task in hosted.tasks else None

    def count_refusal(self, model: str, task: str) -> None:
        """Count a request refused by admission control."""
        self._metrics.count_refusal(model, task)

    async def reload(self) -> None:
        """Read the catalogue again and replace the models that changed, without downtime.

        A model that cannot be opened stays as it was; the log and a metric say so. A replaced or
        removed model is closed after its last request. The log says, too, if nothing has changed.
        """
        async with self._reload_lock:
            try:
                catalogue = await asyncio.to_thread(read_catalogue, self.settings)
                bundles, kept = await asyncio.to_thread(self._open_bundles, catalogue)
                options = _options(self.settings, catalogue, bundles | kept)
            except Exception as error:  # noqa: BLE001  # whatever it is, the service goes on
                _logger.error("the models were not reloaded, those before go on: %s", error)
                for name in self._hosted:
                    self._metrics.count_reload(name, "rejected")
                return
            before = (self._num_changes, self._default)
            for name, bundle in bundles.items():
                await self._replace(catalogue.specs[name], bundle, options[name])
            for name in sorted(set(self._hosted) - set(catalogue.specs)):
                self._remove(name)
            # Without a configured default it stays the same: a new model may sort first.
            if catalogue.chosen in self._hosted:
                self._default = catalogue.chosen
            elif self._default not in self._hosted:
                there = [name for name in catalogue.specs if name in self._hosted]
                self._default = (there or list(self._hosted))[0]
            if before == (self._num_changes, self._default):
                _logger.warning("the reload has changed nothing: %s", self._revisions())

    async def close(self) -> None:
        """Answer the accepted requests, and close the models."""
        self.accepting = False
        await asyncio.gather(*(hosted.close() for hosted in self._hosted.values()), *self._closing)
        if self._trimming is not None:
            self._trimming.cancel()

    def _revisions(self) -> str:
        return ", ".join(
            f"model {name} is revision {loaded.bundle.manifest.revision}"
            for name, loaded in self._loaded.items()
        )

    def _load_each(self, catalogue: Catalogue) -> Iterator[_Loaded]:
        """Yield each model of the catalogue that can be opened and run.

        Raises:
            ConfigError: there is none.
        """
        bundles, errors = catalogue.open_bundles()
        options = _options(self.settings, catalogue, bundles) if bundles else {}
        for name, bundle in bundles.items():
            try:
                loaded = self._load(catalogue.specs[name], bundle, options[name])
            except Exception as error:  # noqa: BLE001  # whatever it is, the others are served
                errors[name] = error
            else:
                yield loaded
                del loaded  # the caller may want one at a time in memory
        catalogue.check_any(errors)
        for name, failure in errors.items():
            _logger.error("model %s was not loaded, it is not served: %s", name, failure)

    def _open_bundles(self, catalogue: Catalogue) -> tuple[dict[str, Bundle], dict[str, Bundle]]:
        """Return the bundles that open, and the loaded bundles of models that do not."""
        bundles, errors = catalogue.open_bundles()
        for name, error in errors.items():
            self._reject(name, error)
        kept = {name: self._loaded[name].bundle for name in errors if name in self._loaded}
        return bundles, kept

    async def _replace(self, spec: ModelSpec, bundle: Bundle, options: RuntimeOptions) -> None:
        before = self._loaded.get(spec.name)
        if before is not None and before.is_same(spec, options, bundle):
            return
        del before
        try:
            loaded = await asyncio.to_thread(self._load, spec, bundle, options)
        except Exception as error:  # noqa: BLE001  # whatever it is, the service goes on
            self._reject(spec.name, error)
            return
        former = self._hosted.get(spec.name)
        self._loaded[spec.name], self._hosted[spec.name] = loaded, self._serve(loaded)
        self._num_changes += 1
        self._metrics.count_reload(spec.name, "loaded")
        _logger.warning("model %s is now revision %s", spec.name, bundle.manifest.revision)
        if former is not None:
            self._close_later(former)

    def _remove(self, name: str) -> None:
        if len(self._hosted) == 1:
            return  # no model of the new catalogue could be opened
        _logger.warning("model %s is no longer served", name)
        self._metrics.remove_model(name)
        self._num_changes += 1
        self._metrics.count_reload(name, "removed")
        del self._loaded[name]
        self._close_later(self._hosted.pop(name))

    def _reject(self, name: str, error: Exception) -> None:
        kept = "the one before goes on" if name in self._hosted else "it is not served"
        _logger.error("model %s was not loaded, %s: %s", name, kept, error)
        self._metrics.count_reload(name, "rejected")

    def _load(self, spec: ModelSpec, bundle: Bundle, options: RuntimeOptions) -> _Loaded:
        # The engine's threads have the priority of the thread that opens it.
        with ThreadPoolExecutor(1, initializer=lower_priority) as opener:
            engine = opener.submit(self._open_engine, bundle, options).result()
        tasks = load_tasks(bundle, self._tokenizer(bundle), device=engine.device)
        return _Loaded(
            spec=spec,
            options=options,
            bundle=bundle,
            engine=engine,
            tasks=tasks,
            card=read_card(bundle),
        )

    def _open_engine(self, bundle: Bundle, options: RuntimeOptions) -> Engine:
        engine = Engine.open(bundle, options, self._pool)
        if self.settings.max_batch_tokens is not None:
            engine.max_batch_tokens = self.settings.max_batch_tokens
        engine.warm_up()
        return engine

    def _tokenizer(self, bundle: Bundle) -> AlbertTokenizer:
        """Return the bundle's tokenizer, shared between bundles with the same file."""
        key = bundle.manifest.files[TOKENIZER_FILE].sha256
        tokenizer = self._tokenizers.get(key)
        if tokenizer is None:
            tokenizer = self._tokenizers[key] = AlbertTokenizer.from_file(bundle.tokenizer_file)
        return tokenizer

    def _serve(self, loaded: _Loaded) -> HostedModel:
        name, bundle = loaded.spec.name, loaded.bundle
        return HostedModel(
            name=name,
            settings=self.settings,
            bundle=bundle,
            tasks=loaded.tasks,
            card=loaded.card,
            threads=self._threads,
            batcher=Batcher(
                loaded.engine,
                max_queue_tokens=self.settings.max_queue_tokens,
                # Admission control is stricter; this bounds requests that arrive at once.
                max_wait_s=self.settings.deadline_s / 2,
                call_cost_tokens=loaded.engine.call_cost_tokens,
                observer=self._metrics.observer(name, bundle.manifest.precision, loaded.tasks),
                # What drives a GPU does not take the event loop's processor.
                start_thread=lower_priority if loaded.engine.device == "cpu" else None,
            ),
        )

    def _close_later(self, hosted: HostedModel) -> None:
        closing = asyncio.get_running_loop().create_task(_close(hosted))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _close(hosted: HostedModel) -> None:
    await hosted.close()
    del hosted  # the last reference to its memory
    await asyncio.to_thread(return_free_memory)


def check_models(settings: Settings) -> str:
    """Check the configured bundles as workers do: each is opened, and answers something.

    The log says which fail; the others are served.

    Returns:
        The name of the default model.

    Raises:
        AlbertServeError: no bundle can be served, there is no model of the default's name, or CUDA
            is asked for by name and is not there.
    """
    if settings.device == "cuda" and (reason := no_cuda_reason()) is not None:
        raise cannot_be_used(reason)
    catalogue = read_catalogue(settings)
    preferred = settings.default_model
    if preferred not in (None, *catalogue.specs):
        raise ConfigError(
            f"{DEFAULT_VARIABLE} is {preferred!r}; there are {', '.join(catalogue.specs)}"
        )
    # On the CPU, because a process keeps what it ever took of a device.
    trial = Models(settings.model_copy(update={"device": "cpu"}), Metrics(CollectorRegistry()))
    names = []
    for loaded in trial._load_each(catalogue):
        names.append(loaded.spec.name)
        if not loaded.bundle.manifest.tasks:
            _logger.warning("%s has no head, so it answers embeddings alone", loaded.spec.name)
        del loaded
    return_free_memory()
    default = catalogue.default_among(names)
    if default != catalogue.default:
        _logger.error("the default model is %s, because %s fails", default, catalogue.default)
    return default


def _options(
    settings: Settings, catalogue: Catalogue, bundles: Mapping[str, Bundle]
) -> dict[str, RuntimeOptions]:
    """Return the runtime options of each model.

    Raises:
        ConfigError: there is no bundle.
    """
    if not bundles:
        raise ConfigError("no model can be opened")
    encoders = {bundle.manifest.files[WEIGHTS_FILE].sha256 for bundle in bundles.values()}
    changes: dict[str, Any] = {}
    if settings.spinning == "auto" and len(encoders) > 1:
        changes["spinning"] = False  # docs/decisions.md
    runtime = replace(settings.runtime, **changes)
    return {
        name: replace(runtime, num_threads=catalogue.specs[name].num_threads or runtime.threads)
        for name in bundles
    }
