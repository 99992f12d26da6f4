"""What the queue does, as Prometheus metrics; BentoML's `/metrics` gives them out with its own.

With several workers each writes to files that `/metrics` of any of them adds up; so every metric
here is one that can be added up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from albert_serve.batching.events import BatchReport

_PREFIX: Final = "albert_serve"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKENS: Final = tuple(2**power for power in range(4, 18))
_INPUTS: Final = tuple(2**power for power in range(11))
_MODEL: Final = ("model",)
_MODEL_TASK: Final = ("model", "task")


class Metrics:
    """The metrics of a process. Make one: a registry takes each metric once."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        made: dict[str, Any] = {"namespace": _PREFIX, "registry": registry}
        self.requests = Counter("requests", "Requests that entered the queue.", _MODEL_TASK, **made)
        self.request_tokens = Counter(
            "request_tokens", "Tokens that entered the queue, without padding.", _MODEL_TASK, **made
        )
        self.given_up = Counter(
            "requests_given_up",
            "Requests not answered: shed for want of room, expired, or cancelled by their caller.",
            (*_MODEL_TASK, "reason"),
            **made,
        )
        self.queue_delay_s = Histogram(
            "queue_delay_seconds",
            "Seconds that an input waited until it was run.",
            _MODEL_TASK,
            buckets=_SECONDS,
            **made,
        )
        self.engine_s = Histogram(
            "engine_seconds",
            "Seconds that the engine took for a batch.",
            _MODEL,
            buckets=_SECONDS,
            **made,
        )
        self.batch_tokens = Histogram(
            "batch_tokens", "Tokens of a batch, without padding.", _MODEL, buckets=_TOKENS, **made
        )
        self.batch_inputs = Histogram(
            "batch_inputs", "Inputs that ran together.", _MODEL, buckets=_INPUTS, **made
        )
        self.padding_tokens = Counter(
            "padding_tokens",
            "Tokens that the engine ran for nothing but to fill up a batch.",
            _MODEL,
            **made,
        )
        self._reloads = Counter(
            "reloads",
            "Models that a reload has loaded, rejected or removed.",
            (*_MODEL, "outcome"),
            **made,
        )
        self._models = Gauge(
            "model",
            "1 for a model that is served, 0 for one that was.",
            ("model", "precision"),
            multiprocess_mode="livemax",
            **made,
        )
        self._precisions: dict[str, str] = {}

    def observer(self, model: str, precision: str, tasks: Iterable[str]) -> PrometheusObserver:
        """What counts for a model that is served from now on.

        Args:
            tasks: those that it has; their metrics are there, at 0, before the first request.
        """
        self.ended(model)
        self._precisions[model] = precision
        self._models.labels(model, precision).set(1)
        for outcome in ("loaded", "rejected", "removed"):
            self._reloads.labels(model, outcome)
        return PrometheusObserver(self, model, tasks)

    def reloaded(self, model: str, outcome: Literal["loaded", "rejected", "removed"]) -> None:
        """A reload has come to a model."""
        self._reloads.labels(model, outcome).inc()

    def refused(self, model: str, task: str) -> None:
        """A request was refused, at the door or by the queue."""
        self.given_up.labels(model, task, "shed").inc()

    def ended(self, model: str) -> None:
        """A model is served no longer."""
        if model in self._precisions:
            self._models.labels(model, self._precisions.pop(model)).set(0)


class PrometheusObserver:
    """Counts what a model's batcher tells."""

    def __init__(self, metrics: Metrics, model: str, tasks: Iterable[str]) -> None:
        self._metrics = metrics
        self._model = model
        self._engine_s = metrics.engine_s.labels(model)
        self._batch_tokens = metrics.batch_tokens.labels(model)
        self._batch_inputs = metrics.batch_inputs.labels(model)
        self._padding_tokens = metrics.padding_tokens.labels(model)
        for task in tasks:
            self._start(task)

    def _start(self, task: str) -> None:
        metrics = self._metrics
        for metric in (metrics.requests, metrics.request_tokens, metrics.queue_delay_s):
            metric.labels(self._model, task)
        for reason in ("shed", "expired", "cancelled"):
            metrics.given_up.labels(self._model, task, reason)

    def queued(self, task: str, num_tokens: int) -> None:
        """A request has entered the queue."""
        self._metrics.requests.labels(self._model, task).inc()
        self._metrics.request_tokens.labels(self._model, task).inc(num_tokens)

    def batch(self, report: BatchReport) -> None:
        """A batch has been run."""
        self._engine_s.observe(report.engine_s)
        self._batch_tokens.observe(report.num_tokens)
        self._batch_inputs.observe(report.num_inputs)
        self._padding_tokens.inc(report.num_padded_tokens - report.num_tokens)
        for task, delays_s in report.queue_delays_s.items():
            metric = self._metrics.queue_delay_s.labels(self._model, task)
            for delay_s in delays_s:
                metric.observe(delay_s)

    def shed(self, task: str) -> None:
        """A request was refused, for the queue was full."""
        self._metrics.refused(self._model, task)

    def expired(self, task: str) -> None:
        """A request was given up, for it was late or would have been."""
        self._metrics.given_up.labels(self._model, task, "expired").inc()

    def cancelled(self, task: str) -> None:
        """A request's caller has gone before it was answered."""
        self._metrics.given_up.labels(self._model, task, "cancelled").inc()
