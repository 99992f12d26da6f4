"""The examples of Ray Data and Spark run with the real engines, where they are installed."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from albert_serve.scoring import AlbertScorer
from albert_serve.settings import CACHE_VARIABLE
from tests.albert_serve.support import ROOT

pytestmark = [
    pytest.mark.extended,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the workers of both engines import, and where they keep prepacked weights."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, path)]))
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def ray(_environment: None) -> Iterator[Any]:
    """Ray of two CPUs."""
    module = pytest.importorskip("ray", reason="needs ray: pip install 'ray[data]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else other processes have all of the CPU
        patch.setenv("OMP_NUM_THREADS", "1")
        module.init(
            address="local",
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
        )
        yield module
        module.shutdown()


@pytest.fixture(scope="module")
def spark(_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("pyspark", reason="needs pyspark: pip install --group spark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        session = (
            SparkSession.builder.master("local[1]")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "1")
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
        yield session
        session.stop()


@pytest.fixture(scope="module")
def source(sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of rows, of which one is in error."""
    table = pyarrow.table({"id": range(9), "review": ["", *sentences[:8]]})
    folder = tmp_path_factory.mktemp("reviews")
    parquet.write_table(table, folder / "reviews.parquet")
    return folder


@pytest.mark.parametrize("engine", ["ray", "spark"])
def test_an_example_scores_a_folder(
    engine: str,
    source: Path,
    bundle_dir: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue(engine)
    example = ROOT / f"examples/{engine}_pipeline.py"
    main: Callable[[list[str]], None] = runpy.run_path(str(example))["main"]
    output = tmp_path / "scored"
    main(["--bundle", str(bundle_dir), "--column", "review", str(source), str(output)])
    scored = parquet.read_table(output).to_pylist()
    scorer = AlbertScorer(bundle_dir, "text-classification", columns={"text": "review"})
    expected: list[dict[str, Any]] = scorer(parquet.read_table(source)).to_pylist()
    assert [row["error_type"] for row in expected] == ["invalid_input", *[None] * 8]
    assert sorted(scored, key=lambda row: row["id"]) == expected
