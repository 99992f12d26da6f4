"""The service for comparison: pipelines of `transformers` in a BentoML service.

Written as https://docs.bentoml.com/en/latest/get-started/adaptive-batching.html does it: a service
class that makes its pipelines, and batchable APIs that take lists and give them to a pipeline.
The settings were the fastest that we tried. In requests per second: `max_batch_size` 32 and the
pipeline's default `batch_size` of 1, in one process, 7.2; the same in two processes 6.7; 32 and 32
3.6; 8 and 8 3.4. `services.py` starts the service and names the checkpoint in the environment.
"""

from __future__ import annotations

import os
from typing import Any

import bentoml
from transformers import pipeline

_CHECKPOINT = os.environ["PEER_CHECKPOINT"]
_TASKS = ("text-classification", "fill-mask")
_MAX_BATCH_SIZE = 32
# Longer than anything waits here: past the first, BentoML answers 503 instead of waiting.
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
        """The best label of each text."""
        return list(self.pipelines["text-classification"](texts))

    @bentoml.api(  # type: ignore[untyped-decorator]
        batchable=True, max_batch_size=_MAX_BATCH_SIZE, max_latency_ms=_MAX_LATENCY_MS
    )
    def fill_mask(self, texts: list[str]) -> list[list[dict[str, Any]]]:
        """The best tokens for the mask of each text."""
        predictions = self.pipelines["fill-mask"](texts)
        # Of a list of one text the pipeline gives that text's answer alone.
        return [predictions] if len(texts) == 1 else list(predictions)
