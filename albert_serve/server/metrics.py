"""Prometheus metrics of the queue and the models, which BentoML's `/metrics` also exposes.

Each worker writes to files of its own, and the `/metrics` of any worker adds them up. So every
metric here is additive.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, values

from albert_serve.batching.queue import BatchObserver, BatchReport

_PREFIX: Final = "albert_serve"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKENS: Final = tuple(2**power for power in range(4, 18))
_INPUTS: Final = tuple(2**power for power in range(11))
_MODEL: Final = ("model",)
_MODEL_TASK: Final = ("model", "task")
# Size of a process's file for each kind of metric that this package or BentoML uses.
_FILE_BYTES: Final = {
    "histogram": 1 << 20,
    **dict.fromkeys(("counter", "summary"), 1 << 18),
    **dict.fromkeys(
        (f"gauge_{mode}" for mode in ("all", "livemax", "livesum", "mostrecent")), 1 << 18
    ),
}
_logger = logging.getLogger(__name__)


def reserve_files(folder: Path) -> bool:
    """Reserve disk space for this process's metrics before the first metric is created.

    Metrics are written to memory that is mapped from files. If the disk were full, the first write
    would end the process by SIGBUS.

    Returns:
        Whether there was enough space. Otherwise `/metrics` lacks this process's metrics.
    """
    if sys.platform == "darwin":  # macOS has no posix_fallocate
        return True
    try:
        for kind, num_bytes in _FILE_BYTES.items():
            with (folder / f"{kind}_{os.getpid()}.db").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        for incomplete_file in folder.glob(f"*_{os.getpid()}.db"):
            incomplete_file.unlink()
        values.ValueClass = values.MutexValue
        _logger.error("This worker serves without metrics. %s: %s.", folder, error.strerror)
        return False
    return True


class Metrics:
    """The metrics of a process. A registry accepts them once, so create only one instance."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        args: dict[str, Any] = {"namespace": _PREFIX, "registry": registry}
        self.requests = Counter("requests", "Requests that entered the queue.", _MODEL_TASK, **args)
        self.request_tokens = Counter(
            "request_tokens",
            "Tokens that entered the queue, without padding.",
            _MODEL_TASK,
            **args,
        )
        self.given_up = Counter(
            "requests_given_up",
            "Requests that were shed because of load, expired, or cancelled by their caller.",
            (*_MODEL_TASK, "reason"),
            **args,
        )
        self.queue_delay_s = Histogram(
            "queue_delay_seconds",
            "Seconds that an input waited in the queue.",
            _MODEL_TASK,
            buckets=_SECONDS,
            **args,
        )
        self.engine_s = Histogram(
            "engine_seconds",
            "Seconds that the engine computed a batch.",
            _MODEL,
            buckets=_SECONDS,
            **args,
        )
        self.batch_tokens = Histogram(
            "batch_tokens",
            "Tokens of a batch, without padding.",
            _MODEL,
            buckets=_TOKENS,
            **args,
        )
        self.batch_inputs = Histogram(
            "batch_inputs", "Inputs of a batch.", _MODEL, buckets=_INPUTS, **args
        )
        self.padding_tokens = Counter(
            "padding_tokens",
            "Padding tokens that the engine computed.",
            _MODEL,
            **args,
        )
        self._models = Gauge(
            "model",
            "1 for each model of the service.",
            ("model", "precision"),
            multiprocess_mode="livemax",
            **args,
        )

    def observer(self, model: str, precision: str, tasks: Iterable[str]) -> _PrometheusObserver:
        """Return the batch observer of a new model.

        Args:
            tasks: tasks of the model. Their metrics are 0 before the first request.
        """
        self._models.labels(model, precision).set(1)
        return _PrometheusObserver(self, model, tasks)


class _TaskMetrics(NamedTuple):
    """The metrics of one task of a model."""

    requests: Counter
    request_tokens: Counter
    queue_delay_s: Histogram
    shed: Counter
    expired: Counter
    cancelled: Counter

    @classmethod
    def find(cls, metrics: Metrics, model: str, task: str) -> Self:
        """Return the metrics of a task, which are 0 if they are new."""
        return cls(
            requests=metrics.requests.labels(model, task),
            request_tokens=metrics.request_tokens.labels(model, task),
            queue_delay_s=metrics.queue_delay_s.labels(model, task),
            shed=metrics.given_up.labels(model, task, "shed"),
            expired=metrics.given_up.labels(model, task, "expired"),
            cancelled=metrics.given_up.labels(model, task, "cancelled"),
        )


class _PrometheusObserver(BatchObserver):
    """An observer that counts the events of a model's batcher."""

    def __init__(self, metrics: Metrics, model: str, tasks: Iterable[str]) -> None:
        self._engine_s = metrics.engine_s.labels(model)
        self._batch_tokens = metrics.batch_tokens.labels(model)
        self._batch_inputs = metrics.batch_inputs.labels(model)
        self._padding_tokens = metrics.padding_tokens.labels(model)
        # This is cached, because `labels` takes a lock, which would be slow for each request.
        self._task_metrics = cache(partial(_TaskMetrics.find, metrics, model))
        for task in tasks:
            self._task_metrics(task)

    def queued(self, task: str, num_tokens: int) -> None:
        """Count a queued request."""
        self._task_metrics(task).requests.inc()
        self._task_metrics(task).request_tokens.inc(num_tokens)

    def batch(self, report: BatchReport) -> None:
        """Count a batch."""
        self._engine_s.observe(report.engine_s)
        self._batch_tokens.observe(report.num_tokens)
        self._batch_inputs.observe(report.num_inputs)
        self._padding_tokens.inc(report.num_padded_tokens - report.num_tokens)
        for task, delays_s in report.queue_delays_s.items():
            for delay_s in delays_s:
                self._task_metrics(task).queue_delay_s.observe(delay_s)

    def shed(self, task: str) -> None:
        """Count a request that was rejected because of load."""
        self._task_metrics(task).shed.inc()

    def expired(self, task: str) -> None:
        """Count a request that missed its deadline."""
        self._task_metrics(task).expired.inc()

    def cancelled(self, task: str) -> None:
        """Count a request whose caller disconnected before its answer."""
        self._task_metrics(task).cancelled.inc()
