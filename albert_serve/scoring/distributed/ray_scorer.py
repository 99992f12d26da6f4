"""Answers by actors of Ray: each has an engine, and takes a part of the job at a time.

Ray places the actors, restarts those that die, on another node if theirs is gone, and calls them
again. So a part is computed once or more, and its answer is taken once.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, Self

from albert_serve import __version__
from albert_serve.api.schemas import TaskRequest
from albert_serve.bundle.manifest import Bundle
from albert_serve.errors import AlbertServeError, ConfigError, how_to_install
from albert_serve.scoring.answers import RowResult
from albert_serve.scoring.distributed.model import WorkerModel
from albert_serve.scoring.errors import ServiceUnavailableError
from albert_serve.scoring.local import head_names, read_setup
from albert_serve.settings import ray_address

# More threads hardly make a worker faster: it tokenises with one.
_MAX_THREADS: Final = 4
# A part is sent again so often if its actor dies.
_MAX_RETRIES: Final = 3
# So that an actor has its next call when it is ready with one.
_CALLS_AN_ACTOR: Final = 2
# Read for each actor: those that it has, and one that waits for an earlier one.
_PARTS_AN_ACTOR: Final = 3
_CONNECT_S: Final = 10.0
_WARN_EVERY_S: Final = 30.0

_LOG: Final = logging.getLogger(__name__)


class _Worker:
    """The actor: the scorer of its process."""

    def __init__(self, model: WorkerModel) -> None:
        self._model = model

    def open(self) -> None:
        self._model.open()

    def run(self, requests: Sequence[TaskRequest]) -> list[RowResult]:
        return self._model.open().run(requests)


class RayScorer:
    """Answers with actors of Ray, several parts at once; for `with`.

    Args:
        bundle: the model, for its task and revision.
        model: how the workers open it; its threads, revision and version are set here.
        num_workers: the number of actors; None: as many as the cluster has CPUs for, and GPUs if
            they run on them.
        num_threads: threads, and CPUs, of an actor; None: up to 4.
        address: the cluster's; None: `RAY_ADDRESS`, else the Ray that runs on this machine, else
            one that is started here. Ignored where Ray is initialised already.

    Raises:
        ConfigError: Ray is not installed, a number is wrong, or no node has the CPUs or the GPU.
        NotFoundError: the bundle has no such task.
        ServiceUnavailableError: the cluster cannot be reached.
    """

    def __init__(
        self,
        bundle: Bundle,
        model: WorkerModel,
        *,
        num_workers: int | None = None,
        num_threads: int | None = None,
        address: str | None = None,
    ) -> None:
        for name, number in (("workers", num_workers), ("threads", num_threads)):
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}; it must be 1 or more")
        self._ray = _import_ray()
        self.task = model.task
        self.identity = {"revision": bundle.manifest.revision}
        self.heads: Sequence[str] = head_names(model.task, read_setup(bundle, model.task))
        self._actors: list[Any] = []
        self._is_started = not self._ray.is_initialized()
        if self._is_started:
            self._connect(address)
        try:
            self._start_actors(model, num_workers, num_threads)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the actors; and Ray, or the connection to it, if it was not there before."""
        with suppress(self._ray.exceptions.RayError):
            for actor in self._actors:
                self._ray.kill(actor)
        self._actors = []
        if self._is_started:
            self._ray.shutdown()

    def answer(self, parts: Iterable[Sequence[TaskRequest]]) -> Iterator[list[RowResult]]:
        """Yield the results of each part's requests, in order, from whichever actor is free.

        Raises:
            ServiceUnavailableError: the cluster is gone, or several actors died at a part.
            AlbertServeError: an actor cannot open the model.
        """
        # An actor's first call opens the model; one that starts later takes part from then on.
        running = {actor.open.remote(): actor for actor in self._actors}
        free: deque[Any] = deque()
        order: deque[Any] = deque()
        done: dict[Any, list[RowResult]] = {}
        for requests in parts:
            while not free or len(order) >= _PARTS_AN_ACTOR * len(self._actors):
                self._wait(running, free, done)
                while order and order[0] in done:
                    yield done.pop(order.popleft())
            actor = free.popleft()
            order.append(actor.run.remote(requests))
            running[order[-1]] = actor
        while order:
            while order[0] not in done:
                self._wait(running, free, done)
            yield done.pop(order.popleft())

    def _wait(
        self, running: dict[Any, Any], free: deque[Any], done: dict[Any, list[RowResult]]
    ) -> None:
        """Wait for calls that run to end, and take their results."""
        with self._ray_errors():
            ended, _ = self._ray.wait(list(running), timeout=_WARN_EVERY_S)
            for reference in ended:
                results = self._ray.get(reference)
                actor = running.pop(reference)
                if results is None:  # the model is open
                    free.extend([actor] * _CALLS_AN_ACTOR)
                else:
                    done[reference] = results
                    free.append(actor)
        if not ended and not free and not done:
            cpus = self._ray.available_resources().get("CPU", 0)
            _LOG.warning("waiting for %d calls of workers; %d CPUs are free", len(running), cpus)

    @contextmanager
    def _ray_errors(self) -> Iterator[None]:
        """Raise an actor's own errors, and others of Ray as ServiceUnavailableError."""
        exceptions = self._ray.exceptions
        try:
            yield
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, AlbertServeError):
                raise error.cause from None
            raise ServiceUnavailableError(f"a worker failed: {error.cause!r}") from error
        except exceptions.RayError as error:
            raise ServiceUnavailableError(f"Ray failed: {_gist(error)}") from error

    def _connect(self, address: str | None) -> None:
        address = address or ray_address()
        _check_reachable(address or "")
        try:
            self._ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ServiceUnavailableError(
                f"the Ray {address or 'of this machine'} cannot be reached: {_gist(error)}"
            ) from error

    def _start_actors(
        self, model: WorkerModel, num_workers: int | None, num_threads: int | None
    ) -> None:
        resources = self._ray.cluster_resources()
        nodes = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes()]
        num_threads = num_threads or min([_MAX_THREADS, *filter(None, nodes)])
        room = int(resources.get("CPU", 0)) // num_threads
        needs = f"{num_threads} CPUs, the threads of a worker"
        if model.device == "cuda":
            room = min(room, int(resources.get("GPU", 0)))
            needs += ", and a GPU (--device cuda)"
        if num_workers is None and not room:
            raise ConfigError(
                f"the Ray cluster has not {needs}; choose fewer (--threads), or say how many "
                "workers are to come (--workers)"
            )
        worker = self._ray.remote(_Worker).options(
            num_cpus=num_threads,
            num_gpus=1 if model.device == "cuda" else 0,
            max_restarts=-1,
            max_task_retries=_MAX_RETRIES,
            scheduling_strategy="SPREAD",
        )
        revision = self.identity["revision"]
        model = replace(model, num_threads=num_threads, revision=revision, version=__version__)
        self._actors = [worker.remote(model) for _ in range(num_workers or room)]


def _import_ray() -> Any:
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--engine ray needs ray: {how_to_install('ray')}") from error


def _check_reachable(address: str) -> None:
    """Connect to a cluster's port, because Ray tries for minutes.

    Raises:
        ServiceUnavailableError: nothing answers there.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():  # "auto", or the port of Ray's client by default
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or error
        raise ServiceUnavailableError(f"the Ray {address} cannot be reached: {reason}") from error


def _gist(error: Exception) -> str:
    """Return the first line, and the last, which has the cause where there is a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__
