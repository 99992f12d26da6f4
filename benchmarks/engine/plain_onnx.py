"""ONNX Runtime on the graph that `torch.onnx.export` makes, as it is or optimised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnxruntime as ort

from benchmarks.engine.contestants import ModelJob
from benchmarks.engine.player import Batch, Floats, PaddedClassifier, Player, plain_encoder
from benchmarks.harness.process import BenchmarkError

GRAPH_FILE: Final = "model.onnx"


def open_player(job: ModelJob) -> Player:
    """Open a session over the exported graph."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = job.num_threads
    if job.device == "cuda":
        ort.preload_dlls(directory="")  # from NVIDIA's pip packages, if they are installed
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[job.device]
    session = ort.InferenceSession(str(job.model / GRAPH_FILE), options, providers=[provider])
    if provider not in session.get_providers():  # it goes on with the CPU, unasked
        raise BenchmarkError(f"no session on {job.device}")

    def run(batches: Sequence[Batch]) -> list[Floats]:
        return [session.run(None, batch)[0].astype(np.float32) for batch in batches]

    return PaddedClassifier(encode=plain_encoder(job.tokenizer, job.max_tokens), run=run)
