"""A process that runs OpenVINO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import openvino

from benchmarks.engines.inputs import Batch, Floats, PaddedClassifier, plain_encoder
from benchmarks.engines.jobs import Job
from benchmarks.engines.turns import Player, serve

GRAPH_FILE: Final = "model.xml"


@dataclass(frozen=True, kw_only=True, slots=True)
class OneByOne:
    """A compiled model, called by one request."""

    request: Any

    def run(self, batches: Sequence[Batch]) -> list[Floats]:
        """Logits (B, K) of each batch."""
        return [self._logits(batch) for batch in batches]

    def _logits(self, batch: Batch) -> Floats:
        # The request's own memory is written again by the next batch.
        logits_BK: Floats = self.request.infer(batch.feed())[0].copy()
        return logits_BK


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """A compiled model, called by as many requests at once as it wants."""

    queue: Any

    def run(self, batches: Sequence[Batch]) -> list[Floats]:
        """Logits (B, K) of each batch."""
        logits: list[Floats] = [np.empty((0, 0), np.float32)] * len(batches)

        def keep(request: Any, index: int) -> None:
            logits[index] = request.get_output_tensor().data.copy()

        self.queue.set_callback(keep)
        for index, batch in enumerate(batches):
            self.queue.start_async(batch.feed(), index)
        self.queue.wait_all()
        return logits


def open_player(job: Job) -> Player:
    """The compiled graph, with the variant's hint and precision."""
    settings = job.variant.settings
    options: dict[str, Any] = {
        "PERFORMANCE_HINT": settings["hint"].upper(),
        "INFERENCE_NUM_THREADS": job.num_threads,
    }
    if settings["precision"]:
        options["INFERENCE_PRECISION_HINT"] = settings["precision"]
    compiled = openvino.Core().compile_model(str(job.model / GRAPH_FILE), "CPU", options)
    encode = plain_encoder(job.tokenizer, job.max_tokens)
    if settings["hint"] == "latency":
        one = OneByOne(request=compiled.create_infer_request())
        return PaddedClassifier(encode=encode, run=one.run)
    # 0: as many requests as the hint asks for.
    streams = Streams(queue=openvino.AsyncInferQueue(compiled, 0))
    return PaddedClassifier(encode=encode, run=streams.run)


if __name__ == "__main__":
    serve(open_player)
