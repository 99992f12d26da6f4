"""A job on a Ray of two nodes, one of which is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from albert_serve.scoring.distributed.model import WorkerModel
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from tests.albert_serve.scoring.distributed.jobs_on_ray import (
    set_environment,
    start_job,
    wait_for_parts,
)
from tests.albert_serve.scoring.jobs import write_jsonl

cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="needs ray: pip install 'albert-serve[ray]'"
)
pytestmark = pytest.mark.filterwarnings("default")  # of Ray
TASK: Final = "text-classification"
NUM_ROWS: Final = 3200
_OF_A_NODE: Final[dict[str, Any]] = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray of one node."""
    set_environment(monkeypatch, tmp_path / "ray-cache")
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**_OF_A_NODE, "include_dashboard": False}
    )
    yield cluster
    cluster.shutdown()


def num_actors_below(pid: int) -> int:
    """The actors that a node runs, by the PID of its raylet."""
    children = psutil.Process(pid).children(recursive=True)
    return sum("ray::_Worker" in " ".join(child.cmdline()) for child in children)


def test_a_node_that_is_killed_costs_only_time(
    cluster: Any, sentences: list[str], bundle_dir: Path, tmp_path: Path
) -> None:
    rows = [{"id": i, "text": f"{i} {sentences[i % len(sentences)]}"} for i in range(NUM_ROWS)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ScoreOptions(part_rows=16)
    local = WorkerModel(bundle=str(bundle_dir), task=TASK).open()
    score_files(local, [source], f"{tmp_path}/local.csv", options)

    node = cluster.add_node(**_OF_A_NODE)
    cluster.wait_for_nodes()
    output = tmp_path / "out.csv"
    with start_job(cluster.address, bundle_dir, source, output) as job:
        wait_for_parts(job, output)
        assert num_actors_below(node.all_processes["raylet"][0].process.pid) == 1
        cluster.remove_node(node, allow_graceful=False)
        assert job.poll() is None
        stdout, errors = job.communicate(timeout=300)
    assert job.returncode == 0, errors
    assert f"{NUM_ROWS} rows, 0 with errors" in stdout
    assert output.read_bytes() == (tmp_path / "local.csv").read_bytes()
