"""The scorer in Spark, where it and Java are installed."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from albert_serve.scoring import AlbertScorer
from albert_serve.settings import CACHE_VARIABLE
from tests.albert_serve.support import ROOT

pyspark = pytest.importorskip("pyspark", reason="needs pyspark: pip install --group spark")
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
        )
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        session = (
            SparkSession.builder.master("local[1]")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "1")
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .getOrCreate()
        )
        yield session
        session.stop()


@pytest.fixture(scope="module")
def source(sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = pyarrow.table({"id": range(9), "review": ["too long " * 300, *sentences[:8]]})
    file = tmp_path_factory.mktemp("reviews") / "in.parquet"
    parquet.write_table(table, file)
    return file


def scored_here(bundle_dir: Path, source: Path) -> list[dict[str, Any]]:
    scorer = AlbertScorer(bundle_dir, "text-classification", columns={"text": "review"})
    rows: list[dict[str, Any]] = scorer(parquet.read_table(source)).to_pylist()
    return rows


def test_the_example_of_spark(spark: Any, source: Path, bundle_dir: Path, tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "examples/spark_pipeline.py"))["main"]
    output = tmp_path / "scored"
    main(["--bundle", str(bundle_dir), "--column", "review", str(source), str(output)])
    scored = parquet.read_table(output).to_pylist()
    assert sorted(scored, key=lambda row: row["id"]) == scored_here(bundle_dir, source)


def test_frames_of_pandas_in_spark(spark: Any, source: Path, bundle_dir: Path) -> None:
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    frame = spark.read.parquet(str(source))
    scorer = AlbertScorer(bundle_dir, "text-classification", columns={"text": "review"})
    schema = from_arrow_schema(scorer.schema(to_arrow_schema(frame.schema)))
    rows = frame.mapInPandas(scorer.map, schema).collect()
    scored = [row.asDict(recursive=True) for row in rows]
    assert scored == scored_here(bundle_dir, source)
