"""Jobs on Ray: their bytes are those of the engine in process, whatever becomes of the actors."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow
import pytest
from pyarrow import parquet

from albert_serve.api.schemas import TextClassificationRequest
from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from albert_serve.errors import AlbertServeError, BundleMissingError, ConfigError, NotFoundError
from albert_serve.scoring import AlbertScorer
from albert_serve.scoring.distributed.model import WorkerModel
from albert_serve.scoring.distributed.ray_workers import (
    RayScorer,
    count_workers,
    keeping_sigterm,
)
from albert_serve.scoring.errors import ChangedJobError, ServiceUnavailableError, StoppedError
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from tests.albert_serve.scoring.distributed.jobs_on_ray import (
    set_environment,
    start_job,
    wait_for_parts,
)
from tests.albert_serve.scoring.jobs import write_jsonl
from tests.albert_serve.support import ROOT, copy_with

ray = pytest.importorskip("ray", reason="needs ray: pip install 'albert-serve[ray]'")
pytestmark = pytest.mark.filterwarnings("default")  # of Ray
NUM_PARTS: Final = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray of two CPUs, which this process is connected to."""
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, tmp_path_factory.mktemp("ray-cache"))
        context = ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()


Open = Callable[..., RayScorer]


@pytest.fixture
def opened(cluster: str, bundle_dir: Path) -> Iterator[Open]:
    """Opens a scorer of a task on two actors, and closes it."""
    scorers: list[RayScorer] = []

    def open_scorer(
        task: str = "text-classification", folder: Path = bundle_dir, **options: Any
    ) -> RayScorer:
        model = WorkerModel(bundle=str(folder), task=task)
        chosen = {"num_workers": 2, "num_threads": 1, **options}
        scorers.append(RayScorer(Bundle.open(bundle_dir), model, **chosen))
        return scorers[-1]

    yield open_scorer
    for scorer in scorers:
        scorer.close()


def rows_of(task: str, sentences: list[str]) -> list[dict[str, Any]]:
    """Rows of several parts, some of them alike and some of them wrong."""
    texts = [sentences[i % 29 % len(sentences)] for i in range(16 * NUM_PARTS)]
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        wrong = number % 31 == 5
        if task == "question-answering":
            rows.append({"id": number, "question": "Who?", "context": "" if wrong else text})
        elif task == "fill-mask":
            rows.append({"id": number, "text": text if wrong else f"{text} [MASK]"})
        else:
            rows.append({"id": number, "text": "too long " * 300 if wrong else text})
    return rows


def parts_of(folder: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name[0] != "." and file.name != "_lock"
    }


def scored_locally(bundle_dir: Path, task: str, source: Path, output: str, **options: Any) -> None:
    local = WorkerModel(bundle=str(bundle_dir), task=task).open()
    score_files(local, [source], output, ScoreOptions(part_rows=16, **options))


@pytest.mark.parametrize(
    ("task", "suffix", "parameters"),
    [
        ("text-classification", "parquet", {"top_k": 1}),
        pytest.param("fill-mask", "jsonl", {"top_k": 3}, marks=pytest.mark.extended),
        pytest.param("question-answering", "csv", {}, marks=pytest.mark.extended),
        ("feature-extraction", "parquet", {"pooling": "none", "truncation": True}),
    ],
)
def test_the_output_is_that_of_the_engine_in_process(
    task: str,
    suffix: Any,
    parameters: dict[str, Any],
    opened: Open,
    sentences: list[str],
    bundle_dir: Path,
    tmp_path: Path,
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", rows_of(task, sentences))
    chosen: dict[str, Any] = {"parameters": parameters, "output_format": suffix}
    scored_locally(bundle_dir, task, source, f"{tmp_path}/local/", **chosen)
    options = ScoreOptions(part_rows=16, **chosen)
    summary = score_files(opened(task), [source], f"{tmp_path}/ray/", options)
    assert summary.num_parts == NUM_PARTS
    # With the manifest, so that one could go on with the other's parts.
    assert parts_of(tmp_path / "ray") == parts_of(tmp_path / "local")


class Accident:
    """Happens once, after a job's second part."""

    def __init__(self, happen: Callable[[], object]) -> None:
        self.happen = happen
        self.num_parts = 0

    def __call__(self) -> bool:
        self.num_parts += 1
        if self.num_parts == 2:
            self.happen()
        return False


def actors() -> list[psutil.Process]:
    """The processes of actors."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("ray::_Worker" in text for text in process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("accident", ["killed", "frozen"])
def test_an_actor_that_fails_costs_only_time(
    accident: str, opened: Open, sentences: list[str], bundle_dir: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", rows_of("text-classification", sentences))
    scored_locally(bundle_dir, "text-classification", source, f"{tmp_path}/local.csv")
    scorer = opened(patience_s=1.0)
    victim = actors()[0]

    def happen() -> None:
        # Frozen, it is like one whose machine is gone and is not replaced.
        victim.send_signal(signal.SIGKILL if accident == "killed" else signal.SIGSTOP)

    try:
        job = Accident(happen)
        output = tmp_path / "ray.csv"
        score_files(scorer, [source], output, ScoreOptions(part_rows=16), is_stopped=job)
    finally:
        if accident == "frozen":
            victim.kill()
    assert job.num_parts == NUM_PARTS
    # Not learnt from the parts of the frozen one, so that the next accident costs no more.
    assert scorer._pool.patience_s == 1.0
    assert output.read_bytes() == (tmp_path / "local.csv").read_bytes()


def test_all_parts_of_a_frozen_actor_are_given_to_another(
    opened: Open, sentences: list[str]
) -> None:
    scorer = opened(patience_s=0.5)
    victim = actors()[0]
    request = TextClassificationRequest(inputs=sentences[0])
    victim.send_signal(signal.SIGSTOP)
    try:
        waits = [scorer.start([scorer.prepare(request)]) for _ in range(4)]  # two for each
        first, *others = [wait() for wait in waits]
    finally:
        victim.kill()
    assert all(result.values == first[0].values for (result,) in others)


def test_a_slow_part_stays_with_an_only_worker(
    opened: Open, sentences: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    scorer = opened(num_workers=1, patience_s=1e-6)
    request = TextClassificationRequest(inputs=sentences[0])
    waits = [scorer.start([scorer.prepare(request)] * 64) for _ in range(4)]
    assert [len(wait()) for wait in waits] == [64] * 4
    assert "another worker" not in caplog.text
    assert scorer._pool.patience_s > 1e-6


def test_parts_that_nobody_waits_for_are_not_sent(
    opened: Open, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = opened(num_workers=1)
    send, sent = scorer._pool._send, []

    def noted(member: Any, call: Any) -> None:
        sent.append(call.number)
        send(member, call)

    monkeypatch.setattr(scorer._pool, "_send", noted)
    request = TextClassificationRequest(inputs=sentences[0])
    waits = [scorer.start([scorer.prepare(request)]) for _ in range(5)]
    last = waits.pop()
    del waits
    assert len(last()) == 1
    assert sent == [0, 1, 4]


@pytest.mark.extended
def test_a_worker_that_starts_later_takes_part(
    opened: Open, sentences: list[str], bundle_dir: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", rows_of("text-classification", sentences))
    scored_locally(bundle_dir, "text-classification", source, f"{tmp_path}/local.csv")
    other = opened(num_workers=1)
    scorer = opened(num_workers=2)
    assert len(scorer._opening) == 1

    def leave_room() -> None:
        other.close()
        ray.wait(list(scorer._opening), timeout=300)

    output = tmp_path / "ray.csv"
    options = ScoreOptions(part_rows=16)
    score_files(scorer, [source], output, options, is_stopped=Accident(leave_room))
    assert not scorer._opening
    assert output.read_bytes() == (tmp_path / "local.csv").read_bytes()


def test_a_node_with_another_model_or_none_is_named(
    opened: Open, bundle_dir: Path, tmp_path: Path
) -> None:
    other = copy_with(bundle_dir, tmp_path / "other", "tokenizer_config.json", b"{}")
    refused: dict[Path, type[AlbertServeError]] = {
        other: ChangedJobError,
        tmp_path / "nowhere": BundleMissingError,
    }
    for folder, error in refused.items():
        with pytest.raises(error, match=rf"^on \S+: .*{folder.name}"):
            opened(folder=folder)


def test_wrong_options_are_refused(cluster: str, bundle_dir: Path) -> None:
    bundle = Bundle.open(bundle_dir)
    model = WorkerModel(bundle=str(bundle_dir), task="text-classification")
    with pytest.raises(ConfigError, match="workers is 0; it must be 1 or more"):
        RayScorer(bundle, model, num_workers=0)
    with pytest.raises(ConfigError, match="no node of the Ray cluster has 64 CPUs"):
        RayScorer(bundle, model, num_threads=64)
    with pytest.raises(ConfigError, match=r"has 1 CPUs, .*, and a GPU \(--device cuda\)"):
        RayScorer(bundle, replace(model, device="cuda"), num_threads=1)
    with pytest.raises(NotFoundError, match="has no multiple-choice"):
        RayScorer(bundle, WorkerModel(bundle=str(bundle_dir), task="multiple-choice"))


def test_workers_have_their_cpus_and_gpu_on_one_node() -> None:
    nodes = [{"CPU": 16.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 8.0}]
    assert count_workers(nodes, 2, device="cpu") == 14
    assert count_workers(nodes, 2, device="cuda") == 3


def test_sigterm_while_ray_starts_stops_the_job() -> None:
    before = signal.getsignal(signal.SIGTERM)

    @keeping_sigterm()
    def start() -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError) as error:
        start()
    assert error.value.exit_status == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, bundle_dir: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    model = WorkerModel(bundle=str(bundle_dir), task="text-classification")
    with pytest.raises(ConfigError, match=r"--engine ray needs ray: .*'\.\[ray\]'"):
        RayScorer(Bundle.open(bundle_dir), model)


def test_the_command(
    cluster: str,
    sentences: list[str],
    bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", rows_of("text-classification", sentences))
    command = ["score", "--task", "text-classification", "--bundle", str(bundle_dir)]
    output = tmp_path / "out.csv"
    ray_options = ["--engine", "ray", "--workers", "1", "--threads", "1", "--part-rows", "16"]
    assert main([*command, *ray_options, str(source), str(output)]) == 0
    assert "128 rows, 4 with errors" in capsys.readouterr().out
    scored_locally(bundle_dir, "text-classification", source, f"{tmp_path}/local.csv")
    assert output.read_bytes() == (tmp_path / "local.csv").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2"], "--ray-address and --workers are for --engine ray"),
        (["--engine", "ray", "--server", "http://a"], "--server and --engine ray are given"),
    ],
)
def test_options_that_contradict(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    command = ["score", "--task", "fill-mask", *options, str(source), str(tmp_path / "out.csv")]
    assert main(command) == 1
    assert message in capsys.readouterr().err


def test_the_scorer_in_ray_data(
    cluster: str, sentences: list[str], bundle_dir: Path, tmp_path: Path
) -> None:
    table = pyarrow.table({"id": range(40), "review": (sentences * 40)[:40]})
    (tmp_path / "in").mkdir()
    parquet.write_table(table, tmp_path / "in/reviews.parquet")
    run = runpy.run_path(str(ROOT / "examples/ray_pipeline.py"))["main"]
    files = [str(tmp_path / "in"), str(tmp_path / "out")]
    run(["--bundle", str(bundle_dir), "--column", "review", *files])
    scored = parquet.read_table(tmp_path / "out").sort_by("id")
    scorer = AlbertScorer(bundle_dir, "text-classification", columns={"text": "review"})
    assert scored.equals(scorer(table))


@pytest.mark.slow
def test_a_job_that_was_killed_goes_on(
    cluster: str, sentences: list[str], bundle_dir: Path, tmp_path: Path
) -> None:
    rows = [{"id": i, "text": f"{i} {sentences[i % len(sentences)]}"} for i in range(1600)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    scored_locally(bundle_dir, "text-classification", source, f"{tmp_path}/local.csv", dedupe=False)
    output = tmp_path / "out.csv"
    with start_job(cluster, bundle_dir, source, output, "--no-dedupe") as process:
        wait_for_parts(process, output)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with start_job(cluster, bundle_dir, source, output, "--no-dedupe") as process:
        stdout, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "from an earlier run" in stdout
    assert output.read_bytes() == (tmp_path / "local.csv").read_bytes()


def test_a_cluster_out_of_reach(bundle_dir: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    with start_job("127.0.0.1:9", bundle_dir, source, tmp_path / "out.csv") as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == ServiceUnavailableError.exit_status
    assert "the Ray 127.0.0.1:9 cannot be reached: Connection refused" in errors.splitlines()[-1]
