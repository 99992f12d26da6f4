"""Jobs on Ray: their rows are those of the engine in process, whatever becomes of the actors."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow
import pytest
from pyarrow import parquet

from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from albert_serve.errors import AlbertServeError, BundleMissingError, ConfigError, NotFoundError
from albert_serve.scoring import AlbertScorer
from albert_serve.scoring.distributed.model import WorkerModel
from albert_serve.scoring.distributed.ray_scorer import RayScorer
from albert_serve.scoring.errors import ChangedJobError, ServiceUnavailableError
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from albert_serve.settings import CACHE_VARIABLE
from tests.albert_serve.scoring.jobs import read_table, write_jsonl
from tests.albert_serve.support import ROOT, copy_with

ray = pytest.importorskip("ray", reason="needs ray: pip install 'albert-serve[ray]'")
pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("default")]
TASK: Final = "text-classification"
NUM_PARTS: Final = 8
# Which of identical rows of several parts are computed depends on the actors' speed.
OPTIONS: Final = ScoreOptions(part_rows=16, dedupe=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray of two CPUs, which this process is connected to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else what runs beside it has all of the CPU
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("ray-cache")))
        patch.setenv("PYTHONPATH", str(ROOT))
        context = ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture
def source(sentences: list[str], tmp_path: Path) -> Path:
    """Rows of several parts, some of them alike and some of them wrong."""
    texts = [sentences[i % 29 % len(sentences)] for i in range(16 * NUM_PARTS)]
    rows = [
        {"id": number, "text": "too long " * 300 if number % 31 == 5 else text}
        for number, text in enumerate(texts)
    ]
    return write_jsonl(tmp_path / "in.jsonl", rows)


@pytest.fixture
def expected(bundle_dir: Path, source: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of the output of the engine in process."""
    local = WorkerModel(bundle=str(bundle_dir), task=TASK).open()
    score_files(local, [source], tmp_path / "local.csv", OPTIONS)
    return read_table(tmp_path / "local.csv")


def open_scorer(bundle_dir: Path, folder: Path | None = None, num_workers: int = 2) -> RayScorer:
    model = WorkerModel(bundle=str(folder or bundle_dir), task=TASK)
    return RayScorer(Bundle.open(bundle_dir), model, num_workers=num_workers, num_threads=1)


def test_the_command_gives_the_rows_of_the_engine_in_process(
    cluster: str,
    source: Path,
    expected: list[dict[str, Any]],
    bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["score", "--task", TASK, "--bundle", str(bundle_dir)]
    ray_options = ["--engine", "ray", "--workers", "2", "--threads", "1", "--part-rows", "16"]
    ray_options.append("--no-dedupe")
    output = tmp_path / "out.csv"
    assert main([*command, *ray_options, str(source), str(output)]) == 0
    assert "128 rows, 4 with errors" in capsys.readouterr().out
    assert read_table(output) == expected


def actors() -> list[psutil.Process]:
    """The processes of actors."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("ray::_Worker" in text for text in process.info["cmdline"] or [])
    ]


def test_an_actor_that_is_killed_costs_only_time(
    cluster: str, source: Path, expected: list[dict[str, Any]], bundle_dir: Path, tmp_path: Path
) -> None:
    parts: list[int] = []

    def kill() -> bool:
        parts.append(len(parts))
        if len(parts) == 2:
            actors()[0].kill()
        return False

    output = tmp_path / "ray.csv"
    with open_scorer(bundle_dir) as scorer:
        score_files(scorer, [source], output, OPTIONS, is_stopped=kill)
    assert len(parts) == NUM_PARTS
    assert read_table(output) == expected


def test_workers_that_start_later_are_not_waited_for(
    cluster: str, source: Path, expected: list[dict[str, Any]], bundle_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "ray.csv"
    with open_scorer(bundle_dir, num_workers=5) as scorer:  # on two CPUs
        score_files(scorer, [source], output, OPTIONS)
    assert read_table(output) == expected


def test_a_node_with_another_model_or_none_is_named(
    cluster: str, source: Path, bundle_dir: Path, tmp_path: Path
) -> None:
    other = copy_with(bundle_dir, tmp_path / "other", "tokenizer_config.json", b"{}")
    refused: dict[Path, type[AlbertServeError]] = {
        other: ChangedJobError,
        tmp_path / "nowhere": BundleMissingError,
    }
    for folder, error in refused.items():
        with (
            open_scorer(bundle_dir, folder, num_workers=1) as scorer,
            pytest.raises(error, match=rf"^on \S+: .*{folder.name}"),
        ):
            score_files(scorer, [source], tmp_path / "out.csv")


def test_wrong_options_are_refused(cluster: str, bundle_dir: Path) -> None:
    bundle = Bundle.open(bundle_dir)
    model = WorkerModel(bundle=str(bundle_dir), task=TASK)
    with pytest.raises(ConfigError, match="workers is 0; it must be 1 or more"):
        RayScorer(bundle, model, num_workers=0)
    with pytest.raises(ConfigError, match="the Ray cluster has not 64 CPUs"):
        RayScorer(bundle, model, num_threads=64)
    with pytest.raises(ConfigError, match=r"has not 1 CPUs, .*, and a GPU \(--device cuda\)"):
        RayScorer(bundle, replace(model, device="cuda"), num_threads=1)
    with pytest.raises(NotFoundError, match="has no multiple-choice"):
        RayScorer(bundle, replace(model, task="multiple-choice"))


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, bundle_dir: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    model = WorkerModel(bundle=str(bundle_dir), task=TASK)
    with pytest.raises(ConfigError, match=r"--engine ray needs ray: .*\[ray\]'"):
        RayScorer(Bundle.open(bundle_dir), model)


def test_the_scorer_in_ray_data(
    cluster: str, sentences: list[str], bundle_dir: Path, tmp_path: Path
) -> None:
    table = pyarrow.table({"id": range(40), "review": (sentences * 40)[:40]})
    (tmp_path / "in").mkdir()
    parquet.write_table(table, tmp_path / "in/reviews.parquet")
    run: Callable[[list[str]], None] = runpy.run_path(str(ROOT / "examples/ray_pipeline.py"))[
        "main"
    ]
    files = [str(tmp_path / "in"), str(tmp_path / "out")]
    run(["--bundle", str(bundle_dir), "--column", "review", *files])
    scored = parquet.read_table(tmp_path / "out").sort_by("id")
    scorer = AlbertScorer(bundle_dir, TASK, columns={"text": "review"})
    assert scored.equals(scorer(table))


def start_job(address: str, bundle_dir: Path, source: Path, output: Path) -> subprocess.Popen[str]:
    """Start the command on a cluster, with actors of one thread and parts of 16 rows."""
    command = [sys.executable, "-m", "albert_serve", "score", "--task", TASK, "--part-rows", "16"]
    command += ["--bundle", str(bundle_dir), "--engine", "ray", "--threads", "1", "--no-dedupe"]
    return subprocess.Popen(
        [*command, "--ray-address", address, str(source), str(output)],
        cwd=ROOT,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_job_that_was_killed_goes_on(
    cluster: str, sentences: list[str], bundle_dir: Path, tmp_path: Path
) -> None:
    rows = [{"id": i, "text": f"{i} {sentences[i % len(sentences)]}"} for i in range(1600)]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.csv"
    log = tmp_path / "out.csv.parts/_parts.jsonl"
    with start_job(cluster, bundle_dir, source, output) as process:
        while process.poll() is None and not (log.exists() and log.stat().st_size > 2000):
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with start_job(cluster, bundle_dir, source, output) as process:
        stdout, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "from an earlier run" in stdout
    scored = read_table(output)
    assert [(row["id"], row["text"]) for row in scored] == [(str(r["id"]), r["text"]) for r in rows]
    assert all(row["label"] for row in scored)


def test_a_cluster_out_of_reach(bundle_dir: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    with start_job("127.0.0.1:9", bundle_dir, source, tmp_path / "out.csv") as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == ServiceUnavailableError.exit_status
    assert "the Ray 127.0.0.1:9 cannot be reached: Connection refused" in errors.splitlines()[-1]
