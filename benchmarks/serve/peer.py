"""The peer: `transformers` pipelines in a BentoML service.

It follows https://docs.bentoml.com/en/latest/get-started/adaptive-batching.html: batchable APIs
that pass lists to a pipeline. `services.py` starts the service and sets the environment variable of
the checkpoint. We tried these settings, of which the first were the fastest:

| `max_batch_size` | `batch_size` of the pipeline | processes | requests/s |
| --- | --- | --- | --- |
| 32 | 1 (default) | 1 | 7.2 |
| 32 | 1 (default) | 2 | 6.7 |
| 32 | 32 | 1 | 3.6 |
| 8 | 8 | 1 | 3.4 |
"""

from __future__ import annotations

import os
from typing import Any

import bentoml
from transformers import pipeline

_CHECKPOINT = os.environ["PEER_CHECKPOINT"]
_TASKS = ("text-classification", "fill-mask")
_MAX_BATCH_SIZE = 32
# Longer than any request waits. After this latency, BentoML answers with status 503.
_MAX_LATENCY_MS = 300_000
_TIMEOUT_S = 600


@bentoml.service(workers=1, traffic={"timeout": _TIMEOUT_S})
class Pipelines:
    """Text classification and fill-mask."""

    def __init__(self) -> None:
        make: Any = pipeline
        self.pipelines = {task: make(task, model=_CHECKPOINT) for task in _TASKS}

    @bentoml.api(  # type: ignore[untyped-decorator]
        batchable=True, max_batch_size=_MAX_BATCH_SIZE, max_latency_ms=_MAX_LATENCY_MS
    )
    def classify(self, texts: list[str]) -> list[dict[str, Any]]:
        """Return the best label of each text."""
        return list(self.pipelines["text-classification"](texts))

    @bentoml.api(  # type: ignore[untyped-decorator]
        batchable=True, max_batch_size=_MAX_BATCH_SIZE, max_latency_ms=_MAX_LATENCY_MS
    )
    def fill_mask(self, texts: list[str]) -> list[list[dict[str, Any]]]:
        """Return the best tokens for the mask of each text."""
        predictions = self.pipelines["fill-mask"](texts)
        # For a list of one text, the pipeline returns only that text's answer.
        return [predictions] if len(texts) == 1 else list(predictions)
