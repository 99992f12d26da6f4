"""That both services are asked the same and answer alike, and that the tables tell of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from albert_serve.config import AlbertConfig
from albert_serve.default_bundle import shipped_bundle
from benchmarks import serve
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.replies import LoadResult, Reply
from benchmarks.serving.contest import Contest, Result, Tried
from benchmarks.serving.figures import best_within, failed, largest_difference, saturation
from benchmarks.serving.services import (
    PeerSettings,
    Service,
    our_call,
    our_service,
    peer_service,
    running,
)
from benchmarks.serving.stream import TASKS, Stream, make_stream
from benchmarks.serving.tables import Report, markdown, to_dict, write_tables
from export.write import export_bundle
from tests.training.support import WIKI
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks

MAX_TOKENS = 130
LEVELS = [1, 4]
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=12000,
        embedding_size=16,
        hidden_size=32,
        num_layers=3,
        num_heads=2,
        ffn_size=64,
        max_positions=MAX_TOKENS,
        initializer_range=0.2,
    )
    model = AlbertForTasks(config, {"fill-mask": 12000, "text-classification": 2})
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(model, folder, tokenizer_from=shipped_bundle())
    return folder


@pytest.fixture(scope="module")
def stream(checkpoint: Path) -> Stream:
    return make_stream(checkpoint, [WIKI], NUM_REQUESTS, 3)


@pytest.fixture(scope="module")
def report(checkpoint: Path, stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Both sides with settings of the peer that nobody had to try, and few requests."""
    folder = tmp_path_factory.mktemp("serving")
    bundle = export_bundle(checkpoint, folder / "bundle").bundle.folder
    settings = PeerSettings(max_batch_size=4, pipeline_batch_size=4)
    bar: tqdm[Any]
    with tqdm(disable=True) as bar:
        contest = Contest(
            stream=stream,
            levels=LEVELS,
            rounds=1,
            least_s=0.2,
            num_threads=1,
            folder=folder,
            bar=bar,
        )
        peer = peer_service(checkpoint, TASKS, settings, 1)
        results = contest.run([peer, our_service("ours fp32", bundle, 1)], 50.0)
    return Report(
        machine=["a machine"],
        model="tiny",
        stream=stream,
        results=results,
        tried=[Tried(settings=settings, per_s=1.0)],
        rate_per_s=50.0,
    )


def test_requests_have_the_requested_lengths(checkpoint: Path, stream: Stream) -> None:
    assert [item.task for item in stream.items[:2]] == ["text-classification", "fill-mask"]
    assert len(stream.items) == NUM_REQUESTS
    assert all(item.num_tokens <= MAX_TOKENS for item in stream.items)
    assert all(("[MASK]" in each.text) == (each.task == "fill-mask") for each in stream.items)
    assert {length: len(items) for length, items in stream.idle.items()} == {8: 3, 128: 3}
    for length, items in stream.idle.items():
        assert all(abs(item.num_tokens - length) <= 1 for item in items)
    assert make_stream(checkpoint, [WIKI], NUM_REQUESTS, 3) == stream


def test_a_checkpoint_without_the_tasks_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    config = AlbertConfig.from_hf(json.loads((tmp_path / "config.json").read_bytes()))
    save_checkpoint(AlbertForTasks(config, {"question-answering": 2}), tmp_path)
    with pytest.raises(BenchmarkError, match="no head for text-classification or fill-mask"):
        make_stream(tmp_path, [WIKI], NUM_REQUESTS, 3)


@pytest.mark.slow
def test_both_services_answer_everything_alike(report: Report) -> None:
    for result in report.results:
        assert failed(result)[0] == 0
        assert failed(result)[1] >= NUM_REQUESTS * (len(LEVELS) + 1)
        assert sorted(result.levels) == LEVELS
        for run in result.runs():
            assert sorted(run.bodies) == list(range(NUM_REQUESTS))
            assert len(run.replies) % NUM_REQUESTS == 0  # whole passes
            assert all(0 < each < 60 for each in run.latencies_s())
            assert 0 < run.cpu_s < run.seconds
    assert largest_difference(report.peer, report.ours[0]) < 1e-5


@pytest.mark.slow
def test_the_engine_alone_is_compared_with_ours_only(report: Report) -> None:
    assert not report.peer.alone
    (alone,) = report.ours[0].alone
    assert 0 < alone.engine_s < alone.stream_s
    assert set(alone.idle) == {"8", "128"}
    for over_http, in_process in alone.idle.values():
        assert len(over_http) == len(in_process) == 3
        assert min(*over_http, *in_process) > 0


@pytest.mark.slow
def test_tables_have_a_row_for_everything(report: Report, tmp_path: Path) -> None:
    tables = markdown(report)
    lines = tables.splitlines()
    assert "nan" not in tables
    for level in LEVELS:
        assert any(line.startswith(f"| {level} | ") for line in lines)
    for name in ("| BentoML over pipelines |", "| **ours fp32** |", "| ours fp32, 128 tokens |"):
        assert any(line.startswith(name) for line in lines)
    assert json.loads(json.dumps(to_dict(report)))["services"][1]["name"] == "ours fp32"
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- written by make bench-serve: begin -->\nold\n")
    with pytest.raises(BenchmarkError, match="tables go between them"):
        write_tables(page, tables)
    page.write_text(page.read_text() + "<!-- written by make bench-serve: end -->\nafter\n")
    for _ in range(2):
        write_tables(page, tables)
        content = page.read_text()
        assert content.count(tables) == 1
        assert "old" not in content
        assert content.startswith("before\n")
        assert content.endswith("\nafter\n")


def make_outcome(rate: float, latency_s: float) -> LoadResult:
    reply = Reply(due_s=0.0, latency_s=latency_s, status=200)
    return LoadResult(seconds=100 / rate, replies=[reply] * 100)


def make_result(rows: dict[int, tuple[float, float]]) -> Result:
    service = Service(name="any", target="a:B", environment={}, call=our_call)
    levels = {level: [make_outcome(*row)] for level, row in rows.items()}
    return Result(service=service, levels=levels)


def test_the_peer_counts_where_more_connections_only_wait() -> None:
    result = make_result({1: (5.0, 0.2), 4: (9.7, 0.4), 8: (9.9, 0.8), 64: (10.0, 6.4)})
    level, best = saturation(result)
    assert (level, round(best, 6)) == (4, 10.0)


def test_ours_counts_with_the_best_level_that_is_no_slower() -> None:
    result = make_result({1: (8.0, 0.1), 4: (20.0, 0.2), 8: (30.0, 0.3)})
    level = best_within(result, 0.25)
    assert level is not None
    assert (level[0], round(level[1], 6)) == (4, 20.0)
    assert best_within(result, 0.05) is None
    nothing = make_result({1: (8.0, math.nan)})
    assert best_within(nothing, 10.0) is None


def test_a_service_that_does_not_start_says_of_what(tmp_path: Path) -> None:
    service = our_service("ours", tmp_path / "nowhere", 1)
    with pytest.raises(BenchmarkError, match="nowhere"), running(service, tmp_path / "run"):
        pass


def test_impossible_options_are_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert serve.main(["--quick", "--checkpoint", missing, "--output", str(tmp_path)]) == 1
    assert "missing" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_command_measures_all_and_writes_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "all.json"
    what = ["--checkpoint", str(checkpoint), "--num-requests", "12", "--levels", "2", "--quick"]
    assert serve.main([*what, "--json", str(file), "--output", str(tmp_path / "out")]) == 0
    content = json.loads(file.read_text())
    assert [one["name"] for one in content["services"][1:]] == ["ours fp32", "ours int8"]
    assert content["tried"][0]["per_s"] > 0
    for one in content["services"]:
        runs = [*one["levels"]["2"], *one["arrivals"], *one["saturated"]]
        assert all(run["num_failed"] == 0 and run["latencies_s"] for run in runs)
    assert "**ours int8**" in capsys.readouterr().out
