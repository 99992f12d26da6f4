"""The service for comparison: pipelines of `transformers` in a BentoML service.

Written as https://docs.bentoml.com/en/latest/get-started/adaptive-batching.html does it: a service
class that makes its pipelines, and batchable APIs that take lists and give them to a pipeline.
`stream.py` starts it and says in the environment with which settings.
"""

from __future__ import annotations

import os
from typing import Any

import bentoml
from transformers import pipeline

_CHECKPOINT = os.environ["PEER_CHECKPOINT"]
_TASKS = os.environ["PEER_TASKS"].split(",")
_MAX_BATCH_SIZE = int(os.environ["PEER_MAX_BATCH_SIZE"])
_PIPELINE_BATCH_SIZE = int(os.environ["PEER_PIPELINE_BATCH_SIZE"])
_WORKERS = int(os.environ["PEER_WORKERS"])
# Longer than anything waits here: past the first, BentoML answers 503 instead of waiting.
_MAX_LATENCY_MS = 300_000
_TIMEOUT_S = 600


@bentoml.service(workers=_WORKERS, traffic={"timeout": _TIMEOUT_S})
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
        run = self.pipelines["text-classification"]
        return list(run(texts, batch_size=_PIPELINE_BATCH_SIZE))

    @bentoml.api(  # type: ignore[untyped-decorator]
        batchable=True, max_batch_size=_MAX_BATCH_SIZE, max_latency_ms=_MAX_LATENCY_MS
    )
    def fill_mask(self, texts: list[str]) -> list[list[dict[str, Any]]]:
        """The best tokens for the mask of each text."""
        predictions = self.pipelines["fill-mask"](texts, batch_size=_PIPELINE_BATCH_SIZE)
        # Of a list of one text the pipeline gives that text's answer alone.
        return [predictions] if len(texts) == 1 else list(predictions)
