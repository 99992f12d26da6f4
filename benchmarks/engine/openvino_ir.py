"""The OpenVINO contestants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import openvino

from benchmarks.engine.contestants import ModelJob
from benchmarks.engine.player import (
    Batch,
    Floats,
    PaddedClassifier,
    Player,
    RunBatches,
    plain_encoder,
)

GRAPH_FILE: Final = "model.xml"


def open_player(job: ModelJob) -> Player:
    """Compile the graph, with the contestant's hint and precision."""
    settings = job.contestant.settings
    options: dict[str, Any] = {
        "PERFORMANCE_HINT": settings["hint"].upper(),
        "INFERENCE_NUM_THREADS": job.num_threads,
    }
    if settings["precision"]:
        options["INFERENCE_PRECISION_HINT"] = settings["precision"]
    compiled = openvino.Core().compile_model(str(job.model / GRAPH_FILE), "CPU", options)
    encode = plain_encoder(job.tokenizer, job.max_tokens)
    run = _one_by_one(compiled) if settings["hint"] == "latency" else _concurrently(compiled)
    return PaddedClassifier(encode=encode, run=run)


def _one_by_one(compiled: Any) -> RunBatches:
    request = compiled.create_infer_request()

    def run(batches: Sequence[Batch]) -> list[Floats]:
        # Each output is copied, because the next batch overwrites the request's memory.
        return [request.infer(batch)[0].copy() for batch in batches]

    return run


def _concurrently(compiled: Any) -> RunBatches:
    queue = openvino.AsyncInferQueue(compiled, 0)  # 0: as many requests as the hint selects

    def run(batches: Sequence[Batch]) -> list[Floats]:
        logits: list[Floats] = [np.empty((0, 0), np.float32)] * len(batches)

        def store(finished: Any, index: int) -> None:
            logits[index] = finished.get_output_tensor().data.copy()

        queue.set_callback(store)
        for index, batch in enumerate(batches):
            queue.start_async(batch, index)
        queue.wait_all()
        return logits

    return run
