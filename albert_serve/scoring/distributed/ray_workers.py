"""Answers by actors of Ray: each has an engine, and takes a part of the job at a time.

Ray places the actors, restarts those that die and sends their parts again; `ActorPool` gives a part
to an actor that is idle. A part whose actor does not come back is given to another as well: it has
the same answer, whoever computes it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakValueDictionary

from albert_serve import __version__
from albert_serve.api.schemas import TaskRequest
from albert_serve.bundle.manifest import Bundle
from albert_serve.errors import AlbertServeError, ConfigError
from albert_serve.scoring.answers import Result
from albert_serve.scoring.distributed.model import WorkerModel
from albert_serve.scoring.errors import ServiceUnavailableError
from albert_serve.scoring.formats import optional_module
from albert_serve.scoring.local import Tokenising, read_setup
from albert_serve.settings import ray_address

PATIENCE_S: Final = 30.0
# More threads hardly make a worker faster: it tokenises with one.
_MAX_THREADS: Final = 4
# How often a part is sent again because its actor died.
_MAX_RETRIES: Final = 3
_PARTS_A_WORKER: Final = 3
# How long the first worker waits for the others to start.
_GRACE_S: Final = 5.0
_CONNECT_S: Final = 10.0

_LOG: Final = logging.getLogger(__name__)


class _Worker:
    """The actor."""

    def __init__(self, model: WorkerModel) -> None:
        self._model = model

    def open(self) -> None:
        """Open the engine."""
        self._model.open()

    def answer(self, number: int, requests: Sequence[TaskRequest]) -> tuple[int, list[Result]]:
        """Return the number and the results."""
        scorer = self._model.open()
        return number, scorer.run([scorer.prepare(request) for request in requests])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A request, and the approximate memory of its answer."""

    request: TaskRequest
    num_bytes: int


@dataclass(kw_only=True, slots=True, weakref_slot=True)
class _Call:
    """The requests of a part, and their results when they are there."""

    number: int
    requests: list[TaskRequest]
    sent_s: float = field(default_factory=time.monotonic)
    results: list[Result] = field(default_factory=list)
    is_done: bool = False


class RayScorer:
    """Answers with actors of Ray, several parts at once; for `with`.

    Args:
        bundle: the model, whose tokenizer this process needs.
        model: how the workers open it; its threads, revision and version are set here.
        num_workers: the number of actors; None: as many as the cluster has CPUs for.
        num_threads: threads, and CPUs, of an actor; None: up to 4.
        address: the cluster's; None: `RAY_ADDRESS`, else the Ray that runs on this machine, else
            one that is started here. Ignored where Ray is initialised already.
        patience_s: the least time without any result after which a part is given to another actor
            as well; it grows to the longest that a part has taken.

    Raises:
        ConfigError: Ray is not installed, or a number is wrong.
        NotFoundError: the bundle has no such task.
        ServiceUnavailableError: the cluster cannot be reached.
        AlbertServeError: an actor cannot open the model.
    """

    def __init__(
        self,
        bundle: Bundle,
        model: WorkerModel,
        *,
        num_workers: int | None = None,
        num_threads: int | None = None,
        address: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        for name, number in (("workers", num_workers), ("threads", num_threads)):
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}; it must be 1 or more")
        self._ray = optional_module("ray", "--engine ray", "ray")
        self.task = model.task
        self.identity = {"revision": bundle.manifest.revision}
        self._tokenising = Tokenising(model.task, read_setup(bundle, model.task))
        self._patience_s = patience_s
        self._calls: WeakValueDictionary[int, _Call] = WeakValueDictionary()
        self._num_calls = 0
        self._is_started = not self._ray.is_initialized()
        self._actors: list[Any] = []
        self._opening: dict[Any, Any] = {}
        if self._is_started:
            self._connect(address)
        try:
            self._pool = self._open_pool(model, num_workers, num_threads)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the actors; and Ray, or the connection to it, if it was not there before."""
        with suppress(self._ray.exceptions.RayError):
            for actor in self._actors:
                self._ray.kill(actor)
        self._actors = []
        if self._is_started:
            self._ray.shutdown()

    @property
    def num_ahead(self) -> int:
        """The limit of parts that are begun and not taken."""
        return _PARTS_A_WORKER * len(self._actors)

    def prepare(self, request: TaskRequest) -> _Work:
        """Tokenise a request, by which a part's rows are known.

        Raises:
            InvalidInputError: it cannot be answered.
        """
        num_bytes = self._tokenising.cost_bytes(self._tokenising.prepare(request))
        return _Work(request=request, num_bytes=num_bytes)

    def cost_bytes(self, work: _Work) -> int:
        """Return the approximate memory of an answer."""
        return work.num_bytes

    def run(self, works: Sequence[_Work]) -> list[Result]:
        """Return the results, in order; see `start`."""
        return self.start(works)()

    def start(self, works: Sequence[_Work]) -> Callable[[], list[Result]]:
        """Send the requests of a part to an actor; the function returned waits for the results.

        It raises:
            ServiceUnavailableError: the cluster is gone, or several actors died at the part.
            AlbertServeError: an actor cannot open the model.
        """
        requests = [work.request for work in works]
        call = _Call(number=self._num_calls, requests=requests)
        self._num_calls += 1
        self._calls[call.number] = call
        self._send(call)
        return lambda: self._wait(call)

    def _send(self, call: _Call) -> None:
        self._pool.submit(lambda actor, one: actor.answer.remote(one.number, one.requests), call)

    def _wait(self, call: _Call) -> list[Result]:
        while not call.is_done:
            for actor in self._opened(len(self._opening), 0):  # later than the others
                self._pool.push(actor)
            try:
                number, results = self._get(self._pool.get_next_unordered, self._patience_s)
            except TimeoutError:
                if self._pool.has_free():
                    _LOG.warning("a part is given to another worker as well")
                    self._send(call)
                continue
            # A part that has begun again is not waited for.
            if (done := self._calls.get(number)) is not None and not done.is_done:
                done.results, done.is_done = results, True
                self._patience_s = max(self._patience_s, time.monotonic() - done.sent_s)
        return call.results

    def _get(self, get: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of Ray.

        Raises:
            TimeoutError: it is over.
            AlbertServeError: the actor's.
            ServiceUnavailableError: Ray failed, or an actor did.
        """
        exceptions = self._ray.exceptions
        try:
            return get(*arguments)
        except TimeoutError:
            raise
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

    def _open_pool(
        self, model: WorkerModel, num_workers: int | None, num_threads: int | None
    ) -> Any:
        cpus = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        smallest = min((count for count in cpus if count), default=1)
        num_threads = num_threads or min(_MAX_THREADS, smallest)
        num_workers = num_workers or sum(count // num_threads for count in cpus)
        if not num_workers:
            raise ConfigError(
                f"no node of the Ray cluster has {num_threads} CPUs, the threads of a worker; "
                "choose fewer (--threads), or say how many workers are to come (--workers)"
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
        self._actors = [worker.remote(model) for _ in range(num_workers)]
        self._opening = {actor.open.remote(): actor for actor in self._actors}
        while not (ready := self._opened(1, self._patience_s)):
            resources = self._ray.available_resources()
            _LOG.warning(
                "no worker has started yet: %d of %d CPUs are asked for, and %d CPUs are free",
                num_workers,
                num_threads,
                resources.get("CPU", 0),
            )
        ready += self._opened(num_workers - 1, _GRACE_S)
        pool = optional_module("ray.util.actor_pool", "--engine ray", "ray")
        # Each twice, so that it has its next part when it is ready with one.
        return pool.ActorPool([*ready, *ready])

    def _opened(self, count: int, timeout_s: float) -> list[Any]:
        """Return up to so many actors that have opened the model since the last call."""
        if not self._opening or not count:
            return []
        done, _ = self._get(
            lambda: self._ray.wait(list(self._opening), num_returns=count, timeout=timeout_s)
        )
        for reference in done:
            self._get(self._ray.get, reference)
        return [self._opening.pop(reference) for reference in done]


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
