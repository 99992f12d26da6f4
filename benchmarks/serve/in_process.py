"""The engine without a service, in a process of its own.

A service may run beside it; it is asked one request at a time, in turns with the engine.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import TASKS, Work, prepare_request
from albert_serve.tasks.load import load_tasks
from benchmarks.harness.process import BenchmarkError
from benchmarks.harness.service import HOST
from benchmarks.serve.stream import Call

_NUM_PASSES: Final = 2
# Requests of one side before it is the other's turn.
_TURN: Final = 5
# Requests to an idle service do not come one upon another.
_PAUSE_S: Final = 0.005
# Threads that wait for work actively give up within this time.
_SETTLE_S: Final = 0.05
_TIMEOUT_S: Final = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The requests to run in process and over HTTP.

    Attributes:
        port: of a service of the same bundle.
        calls: the stream in the service's format.
        idle: requests of each length, sent one at a time to both.
    """

    bundle: Path
    num_threads: int
    port: int
    calls: Sequence[Call]
    idle: Mapping[int, Sequence[Call]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """The engine's times without a service.

    Attributes:
        engine_s: for all inputs of the stream, which it knows from the start; the faster of two
            passes, since the first allocates.
        stream_s: of that pass with tokenisation before and answers after it.
        idle: of each length, seconds of each request over HTTP, and of tokeniser and engine.
    """

    engine_s: float
    stream_s: float
    idle: dict[int, tuple[list[float], list[float]]]


class _InProcess:
    """The engine as a worker of the service opens it, and the tasks before it."""

    def __init__(self, bundle: Path, num_threads: int) -> None:
        opened = Bundle.open(bundle)
        options = RuntimeOptions(device="cpu", num_threads=num_threads, prepack="memory")
        self._engine = Engine.open(opened, options)
        self._engine.warm_up()
        self._tasks = load_tasks(opened)

    def prepare(self, calls: Sequence[Call]) -> Work:
        """The requests' inputs."""
        rounds = []
        for path, body in calls:
            name = path.removeprefix("/")
            request = TASKS[name].request.model_validate(body)
            rounds += prepare_request(self._tasks[name], request)
        return Work(rounds)

    def ask(self, call: Call) -> None:
        """Run one request."""
        self._engine.run(self.prepare([call]).inputs)

    def stream(self, calls: Sequence[Call]) -> tuple[float, float]:
        """Seconds of the engine for all requests together, and of everything."""
        began = time.perf_counter()
        work = self.prepare(calls)
        began_engine = time.perf_counter()
        logits = self._engine.run(work.inputs)
        engine_s = time.perf_counter() - began_engine
        work.take(logits)
        return engine_s, time.perf_counter() - began


def _ask_service(connection: http.client.HTTPConnection, call: Call) -> None:
    path, body = call
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body).encode(), headers)
    reply = connection.getresponse()
    content = reply.read()
    if reply.status != 200:
        raise BenchmarkError(f"{path}: {reply.status} {content[:200]!r}")


def _timed(ask: Callable[[Call], None], calls: Sequence[Call]) -> list[float]:
    """Seconds of each call, with pauses; the first is made once more before, untimed."""
    ask(calls[0])
    seconds = []
    for call in calls:
        time.sleep(_PAUSE_S)
        began = time.perf_counter()
        ask(call)
        seconds.append(time.perf_counter() - began)
    time.sleep(_SETTLE_S)
    return seconds


def _idle(engine: _InProcess, port: int, calls: Sequence[Call]) -> tuple[list[float], list[float]]:
    over_http, alone = [], []
    for start in range(0, len(calls), _TURN):
        turn = calls[start : start + _TURN]
        # A connection of its own for each turn: the service closes what is idle for seconds.
        with closing(http.client.HTTPConnection(HOST, port, timeout=_TIMEOUT_S)) as connection:
            over_http += _timed(partial(_ask_service, connection), turn)
        alone += _timed(engine.ask, turn)
    return over_http, alone


def measure_alone(comparison: Comparison) -> Alone:
    """Measure the engine; to be called in a process of its own.

    Raises:
        BenchmarkError: a request failed.
    """
    engine, port = _InProcess(comparison.bundle, comparison.num_threads), comparison.port
    engine_s, stream_s = min(engine.stream(comparison.calls) for _ in range(_NUM_PASSES))
    idle = {length: _idle(engine, port, calls) for length, calls in comparison.idle.items()}
    return Alone(engine_s=engine_s, stream_s=stream_s, idle=idle)
