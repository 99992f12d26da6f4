"""What is compared in batch scoring sees the same tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from albert_serve.config import PRESETS
from benchmarks.harness.checkpoint import make_checkpoint
from benchmarks.harness.process import run_in_process
from benchmarks.score import (
    SpeedJob,
    measure_engine,
    measure_peer,
    measure_score,
    speed_tables,
)
from export.bundle import export_bundle

TEXTS = ["An earned run.", "A fielding error.", "A long day at the game.", "An earned run."]


def test_the_job_the_engine_and_the_pipeline_count_the_same_tokens(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(PRESETS["small"], tmp_path / "checkpoint", "text-classification")
    bundle = export_bundle(checkpoint, tmp_path / "bundle").bundle.folder
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def job(name: str, model: Path) -> SpeedJob:
        return SpeedJob(name=name, model=model, texts=texts, num_threads=1)

    scored = run_in_process(measure_score, job("job fp32", bundle))
    engine = run_in_process(measure_engine, job("engine fp32", bundle))
    pipeline = run_in_process(measure_peer, job("pipeline fp32, batch 1", checkpoint))
    assert scored.num_texts == engine.num_texts == pipeline.num_texts == 4
    assert engine.num_tokens == pipeline.num_tokens > scored.num_tokens > 0
    named = [
        replace(speed, name=name)
        for speed, names in (
            (pipeline, ("pipeline fp32, batch 1", "bf16 autocast, batch 8")),
            (engine, ("engine fp32", "engine int8")),
            (scored, ("job fp32", "job int8")),
        )
        for name in names
    ]
    share = 100 * scored.tokens_per_s / engine.tokens_per_s
    assert f"fp32: the job has {share:.1f}% of the engine's throughput" in speed_tables(named, [])
