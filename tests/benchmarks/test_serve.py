"""Both services are asked the same and answer alike, and the tables tell of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness.load import LoadResult, Reply
from benchmarks.serve.__main__ import main
from benchmarks.serve.contest import ServedResult
from benchmarks.serve.stream import our_service
from benchmarks.serve.tables import best_within, saturation


def test_both_services_are_measured_and_answer_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--preset", "small", "--num-requests", "12", "--levels", "2", "--quick"]
    where = ["--precisions", "fp32", "--output", str(tmp_path)]
    assert main([*what, *where, "--threads", "1"]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    peer, ours = content["services"]
    assert ours["name"] == "ours fp32"
    for one in (peer, ours):
        for run in (*one["levels"]["2"], *one["arrivals"], *one["saturated"]):
            assert run["num_failed"] == 0
            assert len(run["latencies_s"]) % 12 == 0  # whole passes
    assert not peer["alone"]
    (alone,) = ours["alone"]
    assert 0 < alone["engine_s"] < alone["stream_s"]
    assert set(alone["idle"]) == {"8", "128"}
    tables = capsys.readouterr().out
    assert "nan" not in tables
    for start in ("| 2 | ", "| BentoML over pipelines |", "| **ours fp32** |"):
        assert f"\n{start}" in tables
    difference = float(tables.partition("scores at most ")[2].split()[0])
    assert difference < 1e-5


def make_result(rows: dict[int, tuple[float, float]]) -> ServedResult:
    def run(rate: float, latency_s: float) -> LoadResult:
        reply = Reply(due_s=0.0, latency_s=latency_s, status=200)
        return LoadResult(seconds=100 / rate, replies=[reply] * 100)

    service = our_service("any", Path("any"), 1)
    return ServedResult(service=service, levels={level: [run(*row)] for level, row in rows.items()})


def test_the_peer_counts_where_more_connections_only_wait() -> None:
    result = make_result({1: (5.0, 0.2), 4: (9.7, 0.4), 8: (9.9, 0.8), 64: (10.0, 6.4)})
    assert saturation(result) == pytest.approx((4, 10.0))


def test_ours_counts_with_the_best_level_that_is_no_slower() -> None:
    result = make_result({1: (8.0, 0.1), 4: (20.0, 0.2), 8: (30.0, 0.3)})
    assert best_within(result, 0.25) == pytest.approx((4, 20.0))
    assert best_within(result, 0.05) is None


def test_texts_that_are_missing_are_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert (
        main(["--quick", "--preset", "small", "--texts", missing, "--output", str(tmp_path)]) == 1
    )
    assert "missing" in capsys.readouterr().err.splitlines()[-1]
