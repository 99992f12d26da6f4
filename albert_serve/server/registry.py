"""The models of a service, by name: opened together, and each replaced while it is in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from albert_serve.api.schemas import MODELS_PATH
from albert_serve.batching.batcher import Batcher
from albert_serve.bundle.catalog import Catalogue, ModelSpec, read_catalogue
from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE, Bundle
from albert_serve.errors import AlbertServeError, ConfigError, NotFoundError
from albert_serve.runtime.encoder_pool import EncoderPool
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import return_free_memory
from albert_serve.server.hosted_model import ServedModel
from albert_serve.server.metrics import Metrics
from albert_serve.settings import DEFAULT_VARIABLE, RuntimeOptions, Settings
from albert_serve.tasks import AnyTask
from albert_serve.tasks.load import load_tasks
from albert_serve.tokenizer import AlbertTokenizer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """A model in memory that has run once."""

    spec: ModelSpec
    options: RuntimeOptions
    bundle: Bundle
    engine: Engine
    tasks: dict[str, AnyTask]

    def is_same(self, spec: ModelSpec, options: RuntimeOptions, bundle: Bundle) -> bool:
        """Whether to load it anew would change nothing."""
        same = (self.spec, self.options) == (spec, options)
        return same and self.bundle.manifest.revision == bundle.manifest.revision


class Models:
    """The models of a process. `Models.load` makes it, and `start` puts it on the event loop.

    Attributes:
        accepting: False from the moment that the process is told to end.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.accepting = True
        self._metrics = metrics
        self._pool = EncoderPool()
        self._tokenizers: WeakValueDictionary[str, AlbertTokenizer] = WeakValueDictionary()
        self._loaded: dict[str, _Loaded] = {}
        self._served: dict[str, ServedModel] = {}
        self._default = ""
        self._reload_turn = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    @classmethod
    def load(cls, settings: Settings, metrics: Metrics) -> Models:
        """Open every model that the settings name, and run each once.

        Raises:
            AlbertServeError: one cannot be opened or run.
        """
        models = cls(settings, metrics)
        catalogue = read_catalogue(settings)
        bundles = {name: spec.open_bundle() for name, spec in catalogue.specs.items()}
        options = _options(settings, catalogue, bundles)
        for name, spec in catalogue.specs.items():
            models._loaded[name] = models._load(spec, bundles[name], options[name])
        models._default = catalogue.default
        return models

    def start(self) -> None:
        """Take requests. On the event loop, like all that follows."""
        for name, loaded in self._loaded.items():
            self._served[name] = self._serve(loaded)

    @property
    def default(self) -> ServedModel:
        """Who answers where no model is named."""
        return self._served[self._default]

    @property
    def names(self) -> list[str]:
        """What can be asked for."""
        return list(self._served)

    def get(self, name: str | None) -> ServedModel:
        """A model by its name, or the default.

        Raises:
            NotFoundError: there is none.
        """
        served = self.default if name is None else self._served.get(name)
        if served is None:
            raise NotFoundError(f"there is no model {name!r}; there are {', '.join(self.names)}")
        return served

    def asked_by(self, path: str) -> tuple[str, str] | None:
        """The names of the model and of the task that a path asks; None for any other path."""
        prefix, _, task = path.rpartition("/")
        model = prefix.removeprefix(f"{MODELS_PATH}/") if prefix else self._default
        found = self._served.get(model)
        return (model, task) if found is not None and task in found.tasks else None

    def refused(self, model: str, task: str) -> None:
        """A request was not let in, for too many are being answered."""
        self._metrics.refused(model, task)

    async def reload(self) -> None:
        """Read again what is to be served, and replace what has changed, without a gap.

        What cannot be opened is left as it was, and the log and a metric say so. A model that was
        replaced or taken out goes on until its last request is answered.
        """
        async with self._reload_turn:
            try:
                catalogue = await asyncio.to_thread(read_catalogue, self.settings)
                bundles, kept = await asyncio.to_thread(self._open_bundles, catalogue)
                options = _options(self.settings, catalogue, bundles | kept)
            except Exception as error:  # noqa: BLE001  # whatever it is, the service goes on
                _logger.error("the models were not reloaded, those before go on: %s", error)
                for name in self._served:
                    self._metrics.reloaded(name, "rejected")
                return
            for name, bundle in bundles.items():
                await self._replace(catalogue.specs[name], bundle, options[name])
            for name in sorted(set(self._served) - set(catalogue.specs)):
                self._remove(name)
            # Without a choice it stays who it was: a new model may come first by name.
            if catalogue.chosen in self._served:
                self._default = catalogue.chosen
            elif self._default not in self._served:
                there = [name for name in catalogue.specs if name in self._served]
                self._default = (there or list(self._served))[0]

    async def close(self) -> None:
        """Finish what was accepted."""
        self.accepting = False
        await asyncio.gather(*(served.close() for served in self._served.values()), *self._closing)

    def _open_bundles(self, catalogue: Catalogue) -> tuple[dict[str, Bundle], dict[str, Bundle]]:
        """Those that can be opened; and of those that cannot, the ones that are in use."""
        bundles, kept = {}, {}
        for name, spec in catalogue.specs.items():
            try:
                bundles[name] = spec.open_bundle()
            except AlbertServeError as error:
                self._reject(name, error)
                if name in self._loaded:
                    kept[name] = self._loaded[name].bundle
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
        former = self._served.get(spec.name)
        self._loaded[spec.name], self._served[spec.name] = loaded, self._serve(loaded)
        self._metrics.reloaded(spec.name, "loaded")
        _logger.warning("model %s is now revision %s", spec.name, bundle.manifest.revision)
        if former is not None:
            self._close_later(former)

    def _remove(self, name: str) -> None:
        if len(self._served) == 1:
            return  # none of those that are asked for could be opened
        _logger.warning("model %s is no longer served", name)
        self._metrics.ended(name)
        self._metrics.reloaded(name, "removed")
        del self._loaded[name]
        self._close_later(self._served.pop(name))

    def _reject(self, name: str, error: Exception) -> None:
        kept = "the one before goes on" if name in self._served else "it is not served"
        _logger.error("model %s was not loaded, %s: %s", name, kept, error)
        self._metrics.reloaded(name, "rejected")

    def _load(self, spec: ModelSpec, bundle: Bundle, options: RuntimeOptions) -> _Loaded:
        engine = Engine.open(bundle, options, self._pool)
        if self.settings.max_batch_tokens is not None:
            engine.max_batch_tokens = self.settings.max_batch_tokens
        engine.warm_up()
        tasks = load_tasks(bundle, self._tokenizer(bundle))
        return _Loaded(spec=spec, options=options, bundle=bundle, engine=engine, tasks=tasks)

    def _tokenizer(self, bundle: Bundle) -> AlbertTokenizer:
        """The bundle's, or the one of another bundle that has the same."""
        key = bundle.manifest.files[TOKENIZER_FILE].sha256
        found = self._tokenizers.get(key)
        if found is None:
            found = self._tokenizers[key] = AlbertTokenizer.from_file(bundle.tokenizer_file)
        return found

    def _serve(self, loaded: _Loaded) -> ServedModel:
        name, bundle = loaded.spec.name, loaded.bundle
        return ServedModel(
            name=name,
            settings=self.settings,
            bundle=bundle,
            tasks=loaded.tasks,
            batcher=Batcher(
                loaded.engine,
                max_queue_tokens=self.settings.max_queue_tokens,
                # The door holds to less; this is for those that came in at one moment.
                max_wait_s=self.settings.deadline_s / 2,
                call_cost_tokens=loaded.engine.call_cost_tokens,
                observer=self._metrics.observer(name, bundle.manifest.precision, loaded.tasks),
            ),
        )

    def _close_later(self, served: ServedModel) -> None:
        closing = asyncio.get_running_loop().create_task(_close(served))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _close(served: ServedModel) -> None:
    await served.close()
    del served  # the last that holds its memory
    await asyncio.to_thread(return_free_memory)


def check_models(settings: Settings) -> str:
    """See that everything that is to be served is there, and whole.

    Returns:
        The name of the default.

    Raises:
        AlbertServeError: it is not.
    """
    catalogue = read_catalogue(settings)
    preferred = settings.default_model
    if preferred not in (None, *catalogue.specs):
        raise ConfigError(
            f"{DEFAULT_VARIABLE} is {preferred!r}; there are {', '.join(catalogue.specs)}"
        )
    for spec in catalogue.specs.values():
        spec.open_bundle()
    return catalogue.default


def _options(
    settings: Settings, catalogue: Catalogue, bundles: Mapping[str, Bundle]
) -> dict[str, RuntimeOptions]:
    """How each model is run.

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
