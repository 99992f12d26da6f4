"""Answers by actors of Ray: each has an engine, and takes a part of the job at a time.

Ray places the actors, restarts those that die and sends their parts again. A part whose actor does
not come back is given to another as well, once that is idle: it has the same answer, whoever
computes it.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from albert_serve import __version__
from albert_serve.api.schemas import TaskRequest
from albert_serve.bundle.manifest import Bundle
from albert_serve.errors import AlbertServeError, ConfigError
from albert_serve.scoring.answers import Result
from albert_serve.scoring.distributed.calls import Call, CallPool
from albert_serve.scoring.distributed.model import WorkerModel
from albert_serve.scoring.errors import ServiceUnavailableError, StoppedError
from albert_serve.scoring.formats import optional_module
from albert_serve.scoring.local import Tokenising, read_setup
from albert_serve.settings import Device, ray_address
from albert_serve.tasks.load import on_device

PATIENCE_S: Final = 30.0
# More threads hardly make a worker faster: it tokenises with one.
_MAX_THREADS: Final = 4
# How often a part is sent again because its actor died.
_MAX_RETRIES: Final = 3
_PARTS_A_WORKER: Final = 3
# How long the first worker waits for the others to start.
_GRACE_S: Final = 5.0
_CONNECT_S: Final = 10.0
# How often workers that start later are looked for, and parts that are overdue.
_LOOK_S: Final = 1.0

_LOG: Final = logging.getLogger(__name__)


class _Worker:
    """The actor."""

    def __init__(self, model: WorkerModel) -> None:
        self._model = model

    def open(self) -> None:
        """Open the engine."""
        self._model.open()

    def answer(self, requests: Sequence[TaskRequest]) -> tuple[list[Result], float]:
        """Return the results, and the seconds that they took."""
        scorer = self._model.open()
        started_s = time.monotonic()
        results = scorer.run([scorer.prepare(request) for request in requests])
        return results, time.monotonic() - started_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A request, and the approximate memory of its answer."""

    request: TaskRequest
    num_bytes: int


class RayScorer:
    """Answers with actors of Ray, several parts at once; for `with`.

    Args:
        bundle: the model, whose tokenizer this process needs.
        model: how the workers open it; its threads, revision and version are set here.
        num_workers: the number of actors; None: as many as the cluster has CPUs for, and GPUs if
            they run on them.
        num_threads: threads, and CPUs, of an actor; None: up to 4.
        address: the cluster's; None: `RAY_ADDRESS`, else the Ray that runs on this machine, else
            one that is started here. Ignored where Ray is initialised already.
        patience_s: the least time with an actor after which a part is given to another one as well,
            if that has none; it grows to the longest that a part has taken.

    Raises:
        ConfigError: Ray is not installed, a number is wrong, or no node has the CPUs or the GPU.
        NotFoundError: the bundle has no such task.
        ServiceUnavailableError: the cluster cannot be reached.
        StoppedError: SIGTERM came while Ray started.
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
        setup = on_device(read_setup(bundle, model.task), model.device)
        self._tokenising = Tokenising(model.task, setup)
        self.heads = self._tokenising.heads
        self._patience_s = patience_s
        self._pool = CallPool(self._ray, patience_s)
        self._is_started = not self._ray.is_initialized()
        self._actors: list[Any] = []
        self._opening: dict[Any, Any] = {}
        if self._is_started:
            self._connect(address)
        try:
            self._open_actors(model, num_workers, num_threads)
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

    @property
    def num_ahead(self) -> int:
        """The limit of parts that are begun and not taken."""
        return _PARTS_A_WORKER * self._pool.num_actors

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
            ServiceUnavailableError: the cluster is gone, several actors died at the part, or it was
                sent ten times to actors out of reach.
            AlbertServeError: an actor cannot open the model.
        """
        call = self._pool.submit([work.request for work in works])
        return lambda: self._wait(call)

    def _wait(self, call: Call) -> list[Result]:
        while call.results is None:
            for actor in self._opened(len(self._opening), 0):  # later than the others
                self._pool.add(actor)
            self._get(self._pool.receive, _LOOK_S)
        return call.results

    def _get(self, get: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of Ray.

        Raises:
            AlbertServeError: the actor's.
            ServiceUnavailableError: Ray failed, or an actor did.
        """
        exceptions = self._ray.exceptions
        try:
            return get(*arguments)
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
            with keeping_sigterm():
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

    def _open_actors(
        self, model: WorkerModel, num_workers: int | None, num_threads: int | None
    ) -> None:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        smallest = min((cpus for node in nodes if (cpus := int(node.get("CPU", 0)))), default=1)
        num_threads = num_threads or min(_MAX_THREADS, smallest)
        num_workers = num_workers or count_workers(nodes, num_threads, device=model.device)
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
        for actor in ready:
            self._pool.add(actor)

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


def count_workers(nodes: Sequence[Mapping[str, float]], num_threads: int, *, device: Device) -> int:
    """Return how many workers the nodes have room for.

    Args:
        nodes: the resources of each, by Ray's names.

    Raises:
        ConfigError: none.
    """
    rooms = [int(node.get("CPU", 0)) // num_threads for node in nodes]
    needs = f"{num_threads} CPUs, the threads of a worker"
    if device == "cuda":
        gpus = [int(node.get("GPU", 0)) for node in nodes]
        rooms = [min(room) for room in zip(rooms, gpus, strict=True)]
        needs += ", and a GPU (--device cuda)"
    if not sum(rooms):
        raise ConfigError(
            f"no node of the Ray cluster has {needs}; "
            "choose fewer (--threads), or say how many workers are to come (--workers)"
        )
    return sum(rooms)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces by one that exits.

    Raises:
        StoppedError: SIGTERM came meanwhile.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise StoppedError("stopped while Ray started; the same command goes on") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


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
