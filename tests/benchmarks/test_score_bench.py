"""That what is compared in batch scoring sees the same tokens, and that memory is watched."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from benchmarks import score, score_memory
from benchmarks.harness.subprocess_call import run_in_process
from benchmarks.score_memory import make_bundle, measure, rows_of, write_csv, write_parquet
from benchmarks.scoring.speeds import (
    Speed,
    Subject,
    measure_engine,
    measure_job,
    measure_peer,
)

TEXTS = ["An earned run.", "A fielding error.", "A long day at the game.", "An earned run."]


@pytest.mark.process
def test_the_job_the_engine_and_the_pipeline_count_the_same_tokens(
    tmp_path: Path,
) -> None:
    bundle = make_bundle(tmp_path)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def subject(name: str, model: Path) -> Subject:
        return Subject(name=name, model=model, texts=texts, num_threads=1)

    job = run_in_process(measure_job, subject("job fp32", bundle))
    engine = run_in_process(measure_engine, subject("engine fp32", bundle))
    pipeline = run_in_process(measure_peer, subject("pipeline fp32", tmp_path / "checkpoint"))
    assert job.num_texts == engine.num_texts == pipeline.num_texts == 4
    assert engine.num_tokens == pipeline.num_tokens > job.num_tokens > 0
    assert job.note == "1 like an earlier one"


@pytest.mark.process
def test_a_jobs_memory_is_sampled(bundle_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    write_csv(source, rows_of("duplicates", 100), 500_000)
    measured = measure(bundle_dir, source, "csv")
    assert measured.input_bytes == source.stat().st_size >= 500_000
    assert measured.num_rows == len(source.read_text().splitlines()) - 1
    assert measured.duplicate_share == pytest.approx(1 - 1000 / measured.num_rows, abs=0.01)
    assert 0 < measured.last_pss_bytes <= measured.peak_pss_bytes <= measured.peak_rss_bytes


@pytest.mark.slow
def test_the_memory_of_a_job_does_not_grow_with_its_input(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    write_parquet(source, rows_of("distinct", 100_000), 800_000_000)
    measured = measure(make_bundle(tmp_path), source, "parquet")
    assert measured.last_pss_bytes < measured.first_pss_bytes + 20_000_000


def test_inputs_have_distinct_rows_in_one_row_group(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", rows_of("distinct", 100), 500_000)
    file = parquet.ParquetFile(tmp_path / "in.parquet")
    assert file.num_row_groups == 1
    table = file.read()
    assert table.nbytes >= 500_000
    texts = [row.text for row in islice(rows_of("distinct", 100), table.num_rows)]
    assert table.column("text").to_pylist() == texts
    assert len(set(texts)) == table.num_rows
    assert table.schema.field("body").type == pyarrow.string()


def test_a_sample_is_spread_over_the_texts() -> None:
    texts = [str(number) for number in range(10)]
    assert score.spread(texts, 4) == ["0", "2", "5", "7"]
    assert score.spread(texts, 10) == score.spread(texts, 99) == texts


def test_the_report_compares_the_job_with_the_engine_and_with_peers() -> None:
    names = ["pipeline fp32", "bf16 autocast", "engine fp32", "job fp32", "engine int8", "job int8"]
    speeds = [
        Speed(name=name, num_texts=10, num_tokens=100 * number, duration_s=1.0, cpu_s=2.0)
        for number, name in enumerate(names, start=1)
    ]
    lines = score.report(speeds, ["a note"]).splitlines()
    assert lines[2] == "| pipeline fp32 | 10 | 100 | 1.00 | 0.50 | 50 | 1.00 | 0.50 |"
    assert lines[5] == "| job fp32 | 10 | 400 | 4.00 | 2.00 | 200 | 4.00 | 2.00 |"
    share = "the job has 133.3% of the engine's throughput, 133.3% by CPU time"
    assert f"- fp32: {share}" in lines
    assert lines[-1] == "- a note"


def test_the_tables_have_their_places_in_the_page() -> None:
    for command in (score, score_memory):
        page = command.PAGE.read_text()
        assert 0 < page.index(command.BEGIN) < page.index(command.END)
