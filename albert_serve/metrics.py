"""What the queue does, as Prometheus metrics; BentoML's `/metrics` gives them out with its own.

With several workers each writes to files that `/metrics` of any of them adds up; so every metric
here is one that can be added up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from albert_serve.observer import BatchReport

_PREFIX: Final = "albert_serve"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKENS: Final = tuple(2**power for power in range(4, 18))
_INPUTS: Final = tuple(2**power for power in range(11))
_MODEL: Final = ("model",)
_MODEL_TASK: Final = ("model", "task")


class PrometheusObserver:
    """Counts what the batcher tells. Make one a process: a registry takes each metric once.

    Args:
        model: the name of what is served.
        tasks: those that it has; their metrics are there, at 0, before the first request.
    """

    def __init__(
        self,
        model: str,
        precision: str,
        tasks: Iterable[str],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._model = model
        self._requests = Counter(
            "requests",
            "Requests that entered the queue.",
            _MODEL_TASK,
            namespace=_PREFIX,
            registry=registry,
        )
        self._request_tokens = Counter(
            "request_tokens",
            "Tokens that entered the queue, without padding.",
            _MODEL_TASK,
            namespace=_PREFIX,
            registry=registry,
        )
        self._given_up = Counter(
            "requests_given_up",
            "Requests not answered: shed for want of room, expired, or cancelled by their caller.",
            (*_MODEL_TASK, "reason"),
            namespace=_PREFIX,
            registry=registry,
        )
        self._queue_delay_s = Histogram(
            "queue_delay_seconds",
            "Seconds that an input waited until it was run.",
            _MODEL_TASK,
            namespace=_PREFIX,
            registry=registry,
            buckets=_SECONDS,
        )
        self._add_batch_metrics(registry)
        info = Gauge(
            "model",
            "1 for the model that is served.",
            ("model", "precision"),
            namespace=_PREFIX,
            registry=registry,
            multiprocess_mode="livemax",
        )
        info.labels(model, precision).set(1)
        for task in tasks:
            self._start(task)

    def _add_batch_metrics(self, registry: CollectorRegistry) -> None:
        self._engine_s = Histogram(
            "engine_seconds",
            "Seconds that the engine took for a batch.",
            _MODEL,
            namespace=_PREFIX,
            registry=registry,
            buckets=_SECONDS,
        ).labels(self._model)
        self._batch_tokens = Histogram(
            "batch_tokens",
            "Tokens of a batch, without padding.",
            _MODEL,
            namespace=_PREFIX,
            registry=registry,
            buckets=_TOKENS,
        ).labels(self._model)
        self._batch_inputs = Histogram(
            "batch_inputs",
            "Inputs that ran together.",
            _MODEL,
            namespace=_PREFIX,
            registry=registry,
            buckets=_INPUTS,
        ).labels(self._model)
        self._padding_tokens = Counter(
            "padding_tokens",
            "Tokens that the engine ran for nothing but to fill up a batch.",
            _MODEL,
            namespace=_PREFIX,
            registry=registry,
        ).labels(self._model)

    def _start(self, task: str) -> None:
        for metric in (self._requests, self._request_tokens, self._queue_delay_s):
            metric.labels(self._model, task)
        for reason in ("shed", "expired", "cancelled"):
            self._given_up.labels(self._model, task, reason)

    def queued(self, task: str, num_tokens: int) -> None:
        """A request has entered the queue."""
        self._requests.labels(self._model, task).inc()
        self._request_tokens.labels(self._model, task).inc(num_tokens)

    def batch(self, report: BatchReport) -> None:
        """A batch has been run."""
        self._engine_s.observe(report.engine_s)
        self._batch_tokens.observe(report.num_tokens)
        self._batch_inputs.observe(report.num_inputs)
        self._padding_tokens.inc(report.num_padded_tokens - report.num_tokens)
        for task, delays_s in report.queue_delays_s.items():
            metric = self._queue_delay_s.labels(self._model, task)
            for delay_s in delays_s:
                metric.observe(delay_s)

    def shed(self, task: str) -> None:
        """A request was refused, for the queue was full."""
        self._given_up.labels(self._model, task, "shed").inc()

    def expired(self, task: str) -> None:
        """A request was given up, for it was late or would have been."""
        self._given_up.labels(self._model, task, "expired").inc()

    def cancelled(self, task: str) -> None:
        """A request's caller has gone before it was answered."""
        self._given_up.labels(self._model, task, "cancelled").inc()
