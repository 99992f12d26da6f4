"""The contestant that runs the graph of `torch.onnx.export` in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnxruntime as ort

from benchmarks.engine.contestants import ModelJob
from benchmarks.engine.player import Batch, Floats, PaddedClassifier, Player, plain_encoder

GRAPH_FILE: Final = "model.onnx"


def open_player(job: ModelJob) -> Player:
    """Open a session over the exported graph."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = job.num_threads
    session = ort.InferenceSession(
        str(job.model / GRAPH_FILE), options, providers=["CPUExecutionProvider"]
    )

    def run(batches: Sequence[Batch]) -> list[Floats]:
        return [session.run(None, batch)[0] for batch in batches]

    return PaddedClassifier(encode=plain_encoder(job.tokenizer, job.max_tokens), run=run)
