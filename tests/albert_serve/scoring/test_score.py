"""Scoring with a model: results and errors of rows in files, tables, iterators and pipelines."""

from __future__ import annotations

import os
import pickle
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars
import pyarrow
import pytest
from pyarrow import dataset, parquet

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.manifest import read_manifest
from albert_serve.errors import BundleMissingError, EngineError, InvalidInputError, NotFoundError
from albert_serve.scoring import AlbertScorer
from albert_serve.scoring.dataset import score_dataset
from albert_serve.scoring.errors import TooManyErrorsError
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions
from albert_serve.settings import CACHE_VARIABLE, RuntimeOptions
from albert_serve.tasks import EncoderInput, Logits, TaskSetup, open_task
from albert_serve.tasks.base import Runner
from tests.albert_serve.scoring import jobs
from tests.albert_serve.scoring.jobs import HashScorer, labels_of, read_rows, write_jsonl
from tests.albert_serve.support import ROOT, TorchEngine

pytestmark = pytest.mark.process


Score = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def score(torch_engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path) -> Score:
    """A function that scores rows of a task and returns the results with the ids."""

    def run(
        task: str, rows: Sequence[object], runner: Runner = torch_engine, **parameters: Any
    ) -> list[dict[str, Any]]:
        source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        scorer = LocalScorer(runner, task, task_setup)
        jobs.score(source, output, scorer, parameters=parameters, keep=["id"])
        return read_rows(output)

    return run


@pytest.mark.parametrize(
    ("task", "item", "fields"),
    [
        ("fill-mask", {"text": "a [MASK]"}, {"score", "token", "token_str", "sequence"}),
        ("question-answering", {"question": "q", "context": "c"}, {"answer", "score"}),
        ("sentence-order", {"sentences": ["a", "b", "c"]}, {"pairs", "coherence"}),
    ],
)
def test_a_row_has_the_fields_of_an_item_or_inputs_as_in_a_request(
    task: str, item: dict[str, Any], fields: set[str], score: Score
) -> None:
    inputs: Any = item["text"] if list(item) == ["text"] else item
    rows = [item, {"inputs": None, **item}, {"inputs": inputs}, {"inputs": [inputs, inputs]}]
    with_fields, with_null_inputs, with_inputs, with_list = score(task, rows)
    assert with_fields == with_null_inputs == with_inputs
    output = with_inputs["output"]
    assert with_list["output"] == [output] * 2
    assert set(output[0] if isinstance(output, list) else output) >= fields


def training_of(task: str, length: int) -> dict[str, Any]:
    """Return the entry of a manifest about the training of a task."""
    settings = {"length": length, "embeddings": "True" if task == "feature-extraction" else None}
    return {"stages": [{"tasks": [task], "settings": settings}]}


LONG = "run " * 40


@pytest.mark.parametrize("task", ["text-classification", "feature-extraction"])
def test_long_texts_are_truncated_to_the_length_of_training_by_default(
    task: str, torch_engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    scorer = LocalScorer(torch_engine, task, task_setup, training=training_of(task, 16))
    option = "truncate" if task == "feature-extraction" else "truncation"
    rows: list[object] = [{"text": text} for text in ("run", LONG, "run " * 14, "run " * 15)]
    rows += [{"text": LONG, "parameters": {option: False}}]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    summary = jobs.score(source, output, scorer)
    assert [row.get("truncated_tokens") for row in read_rows(output)] == [None, 26, None, 1, None]
    truncated, omitted = summary.long_texts()
    assert truncated.startswith("2 of 5 texts were truncated to 16 tokens (--no-truncation ")
    assert omitted.startswith("1 of 5 texts were omitted, because they have more than 16 tokens (")
    strict = jobs.score(source, output, scorer, truncation=False)
    assert (strict.num_truncated, strict.errors_by_type) == (0, {"too_long": 3})
    assert read_rows(output)[1]["error_type"] == "too_long"
    # Token embeddings and tasks that were not trained use all positions.
    other = LocalScorer(torch_engine, task, task_setup, training=training_of("fill-mask", 16))
    lengths = [scorer.text_length({}), scorer.text_length({"pooling": "none"})]
    assert [*lengths, other.text_length({})] == [16, 128, 128]


def test_a_question_has_half_of_the_tokens_or_without_truncation_all_but_four(
    torch_engine: TorchEngine, task_setup: TaskSetup
) -> None:
    scorer = LocalScorer(torch_engine, "question-answering", task_setup)
    for parameters, length in (
        ({}, 64),
        ({"max_seq_len": 32}, 16),
        ({"max_seq_len": 32, "truncation": False}, 28),
        ({"max_seq_len": 32, "max_question_len": 9}, 9),
    ):
        assert scorer.text_length(parameters) == length


def test_parts_of_token_embeddings_have_at_most_128_rows(
    torch_engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    scorer = LocalScorer(torch_engine, "feature-extraction", task_setup)
    for pooling, num_rows, num_parts in (("mean", 129, 1), ("none", 128, 1), ("none", 129, 2)):
        source = write_jsonl(tmp_path / "in.jsonl", [{"text": "run " * 128}] * num_rows)
        parameters = {"pooling": pooling}
        output = tmp_path / f"{pooling}-{num_rows}.jsonl"
        summary = jobs.score(source, output, scorer, parameters=parameters, keep=[])
        assert summary.num_parts == num_parts


def test_errors_of_a_row_do_not_affect_other_rows(score: Score) -> None:
    rows: list[tuple[object, str]] = [
        ({"text": "a [MASK]"}, "no error"),
        ("{not json", "malformed"),
        ("", "empty line"),
        ("[1]", "malformed"),
        ("NaN", "malformed"),
        ('{"id": 1234567890.123456789e400, "text": "a [MASK]"}', "malformed"),
        ({"id": 7, "text": "no mask"}, "no_mask"),
        ({"id": None, "other": 1}, "invalid_input"),
        ({"text": 5}, "invalid_input"),
        ({"text": "a [MASK]", "parameters": {"top_k": 0}}, "invalid_input"),
        ({"text": "a [MASK]", "parameters": 5}, "invalid_input"),
        ({"inputs": ["a [MASK]", "none"]}, "no_mask"),
        ({"id": "\ud800", "text": "\ud800 [MASK]"}, "invalid_input"),
        ({"text": "[MASK] " + "a " * 300, "parameters": {"truncation": False}}, "too_long"),
        ({"text": ""}, "no_mask"),
        ({"text": "b [MASK]"}, "no error"),
    ]
    results = score("fill-mask", [row for row, _ in rows])
    expected = [error_type for _, error_type in rows if error_type != "empty line"]
    assert [row.get("error_type", "no error") for row in results] == expected
    assert results[1]["error"].startswith("line 2 is not JSON")
    assert results[2]["error"] == "line 4 is not a JSON object."
    assert "is not JSON: 1234567890.123456789 is not a JSON number" in results[4]["error"]
    assert results[5]["id"] == 7
    assert results[6]["error"] == "The row has neither inputs nor text."
    assert results[10]["error"].startswith("inputs[1]: ")
    assert results[11]["id"] == "\N{REPLACEMENT CHARACTER}"


def test_each_row_gets_its_own_answer_and_an_engine_error_affects_no_other_row(
    score: Score, torch_engine: TorchEngine, task_setup: TaskSetup, sentences: list[str]
) -> None:
    poison = task_setup.tokenizer.token_id("€")

    class PoisonedEngine(TorchEngine):
        def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
            if any(poison in item.ids for item in inputs):
                raise EngineError("poison")
            return super().run(inputs)

    texts = [*sentences[:5], "a €", *sentences[5:]]
    rows = [{"id": i, "text": text, "rating": 3} for i, text in enumerate(texts)]
    engine = PoisonedEngine(torch_engine.model)
    results = score("text-classification", rows, engine, top_k=None)
    task = open_task("text-classification", task_setup)
    for row, result in zip(rows, results, strict=True):
        prepared = task.prepare(row["text"], TextClassificationParameters())
        labels = prepared.finish(torch_engine.run(prepared.inputs))
        expected: dict[str, Any] = {"output": [label.model_dump() for label in labels]}
        if row["text"] == "a €":
            expected = {"error": "poison", "error_type": "engine"}
        assert result == {"id": row["id"], **expected}


def test_parameters_and_warnings_of_a_row_do_not_affect_other_rows(score: Score) -> None:
    rows = [
        {"text": "[MASK] " + "word " * 300, "parameters": {"truncation": True}},
        {"text": "a [MASK]", "parameters": {"targets": "supervolcanoes"}},
        {"text": "a [MASK]", "parameters": {"top_k": 3}},
    ]
    truncated, with_target, with_top_k = score("fill-mask", rows, top_k=2)
    assert [len(row["output"]) for row in (truncated, with_target, with_top_k)] == [2, 1, 3]
    assert truncated["truncated_tokens"] > 0
    assert "Its first piece" in with_target["warnings"][0]
    assert with_top_k.keys() == {"output"}


OPTIONS: Final[dict[str, Any]] = {
    "parameters": {"top_k": 1, "truncation": False},
    "columns": {"text": "review"},
    "keep": ["id"],
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def table(sentences: list[str]) -> pyarrow.Table:
    texts = ["too long " * 300, *sentences[:7], sentences[0]]
    return pyarrow.table({"id": range(9), "review": texts, "rating": [0.5] * 9})


@pytest.fixture
def scorer(bundle_dir: Path) -> AlbertScorer:
    return AlbertScorer(bundle_dir, "text-classification", **OPTIONS)


def test_a_batch_of_any_type_gets_the_columns_of_a_parquet_output(
    table: pyarrow.Table, scorer: AlbertScorer, bundle_dir: Path, tmp_path: Path
) -> None:
    parquet.write_table(table, tmp_path / "in.parquet")
    local = LocalScorer.open(bundle_dir, "text-classification", RuntimeOptions(num_threads=1))
    assert local.identity == {"revision": read_manifest(bundle_dir).revision}
    jobs.score(tmp_path / "in.parquet", tmp_path / "out.parquet", local, **OPTIONS)
    expected = parquet.read_table(tmp_path / "out.parquet")
    assert scorer.schema(table.schema) == expected.schema
    assert scorer(table).equals(expected)
    assert expected.column("error_type").to_pylist() == ["too_long", *[None] * 8]
    assert pyarrow.Table.from_batches([scorer(table.to_batches()[0])]).equals(expected)
    frame = scorer(table.to_pandas().set_index(np.arange(9, 18)))
    assert isinstance(frame, type(table.to_pandas()))
    assert list(frame.columns) == expected.column_names
    assert frame["label"].tolist()[1:] == expected.column("label").to_pylist()[1:]
    arrays = scorer({name: np.asarray(table.column(name)) for name in table.column_names})
    assert list(arrays) == expected.column_names
    assert arrays["id"].tolist() == list(range(9))
    assert arrays["labels"][1][0] == expected.column("labels").to_pylist()[1][0]


def test_map_reads_batches_as_answers_are_used(table: pyarrow.Table, scorer: AlbertScorer) -> None:
    empty_table = table.slice(0, 0)
    batches = iter([table.to_batches()[0], empty_table, empty_table.to_pandas()])
    scored = scorer.map(batches)
    assert next(scored).num_rows == 9
    empty = next(scored)
    assert (empty.num_rows, empty.schema) == (0, scorer.schema(table.schema))
    assert len(next(batches)) == 0  # `scored` has not read the last batch yet


def test_a_pickled_scorer_has_only_its_options(table: pyarrow.Table, scorer: AlbertScorer) -> None:
    num_bytes = len(pickle.dumps(scorer))
    expected = scorer(table)
    content = pickle.dumps(scorer)
    assert len(content) == num_bytes < 1000
    assert pickle.loads(content)(table).equals(expected)


def test_invalid_options_are_errors(table: pyarrow.Table, bundle_dir: Path, tmp_path: Path) -> None:
    task, columns = "text-classification", {"text": "review"}
    with pytest.raises(InvalidInputError, match="parameters: top_k"):
        AlbertScorer(bundle_dir, task, parameters={"top_k": 0})
    with pytest.raises(NotFoundError, match="Unknown task 'spelling'"):
        AlbertScorer(bundle_dir, "spelling")
    with pytest.raises(BundleMissingError, match=r"^on \S+: .*nowhere"):
        AlbertScorer(tmp_path / "nowhere", "fill-mask", columns=columns)(table)
    with pytest.raises(TooManyErrorsError, match=r"9 of 9 rows failed\. The first error: "):
        AlbertScorer(bundle_dir, "fill-mask", columns=columns, errors="fail")(table)


def test_rows_of_an_iterator_are_read_in_parts_as_answers_are_consumed() -> None:
    num_read = 0

    def rows() -> Iterator[object]:
        nonlocal num_read
        for num_read in range(1, 31):
            yield {"id": num_read, "text": f"text {num_read}"} if num_read > 1 else "a text"

    scored = score_dataset(rows(), HashScorer(), ScoreOptions(part_rows=10))
    assert num_read == 0
    assert next(scored) == {"text": "a text", "output": labels_of("a text")}
    assert num_read == 10
    assert next(scored) == {"id": 2, "text": "text 2", "output": labels_of("text 2")}
    assert len(list(scored)) == 28


def test_tables_of_all_libraries_are_scored_in_parts(tmp_path: Path) -> None:
    table = pyarrow.table({"id": range(50), "review": [f"text {i % 7}" for i in range(50)]})
    parquet.write_table(table, tmp_path / "one.parquet")
    scorer = HashScorer()
    options = ScoreOptions(
        columns={"text": "review"}, keep=["id"], part_rows=8, parameters={"top_k": None}
    )
    tables = (table, table.to_reader(), dataset.dataset(tmp_path), table.to_pandas())
    for data in (*tables, polars.from_arrow(table)):
        reader = score_dataset(data, scorer, options)
        assert reader.schema.names[:3] == ["id", "label", "score"]
        scored = reader.read_all()
        assert scored.column("id").num_chunks == 7  # parts of at most 8 rows
        assert scored.column("id").to_pylist() == list(range(50))
        expected = [labels_of(f"text {i % 7}") for i in range(50)]
        assert scored.column("labels").to_pylist() == expected
    assert len(scorer.texts) == 5 * 50


def test_parts_of_a_table_have_at_most_4_mib() -> None:
    table = pyarrow.table({"text": ["a"] * 9, "body": ["b" * (1 << 20)] * 9})
    options = [ScoreOptions(keep=["body"]), ScoreOptions(columns={"text": "body"}, keep=[])]
    for option in options:
        scored = score_dataset(table, HashScorer(), option).read_all()
        assert scored.column("label").num_chunks == 3


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local Ray cluster of two CPUs."""
    module = pytest.importorskip("ray", reason="needs ray: pip install 'ray[data]'")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # nice workers starve on a busy machine
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module.init(
        address="local",
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    module.shutdown()


@pytest.fixture
def spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local Spark session."""
    pytest.importorskip("pyspark", reason="needs pyspark: pip install --group spark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    from pyspark.sql import SparkSession

    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.warehouse.dir", str(tmp_path / "warehouse"))
        .getOrCreate()
    )
    yield
    session.stop()


@pytest.mark.extended
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("framework", ["ray", "spark"])
def test_the_examples_score_a_folder_with_ray_and_spark(
    framework: str, bundle_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(framework)
    source, output = tmp_path / "reviews", tmp_path / "scored"
    source.mkdir()
    table = pyarrow.table({"id": range(9), "review": ["", *(f"a run of {i}" for i in range(8))]})
    parquet.write_table(table, source / "reviews.parquet")
    main = runpy.run_path(str(ROOT / f"examples/{framework}_pipeline.py"))["main"]
    main(["--bundle", str(bundle_dir), "--column", "review", str(source), str(output)])
    scored = parquet.read_table(output).to_pylist()
    scorer = AlbertScorer(bundle_dir, "text-classification", columns={"text": "review"})
    expected: list[dict[str, Any]] = scorer(table).to_pylist()
    assert [row["error_type"] for row in expected] == ["invalid_input", *[None] * 8]
    assert sorted(scored, key=lambda row: row["id"]) == expected
