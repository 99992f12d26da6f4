"""Scoring of tables and iterators in memory, and the scorer for the user's own pipelines."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow
import pytest
from pyarrow import dataset, parquet

from albert_serve.errors import BundleMissingError, InvalidInputError, NotFoundError
from albert_serve.scoring import AlbertScorer
from albert_serve.scoring.dataset import score_dataset
from albert_serve.scoring.errors import TooManyErrorsError
from albert_serve.scoring.job import score_files
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions
from albert_serve.settings import CACHE_VARIABLE, RuntimeOptions
from tests.albert_serve.scoring.jobs import HashScorer, labels_of

pytestmark = pytest.mark.process
PARAMETERS: Final = {"top_k": 1, "truncation": False}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def table(sentences: list[str]) -> pyarrow.Table:
    texts = ["too long " * 300, *sentences[:7], sentences[0]]
    return pyarrow.table({"id": range(9), "review": texts, "rating": [0.5] * 9})


@pytest.fixture
def scorer(bundle_dir: Path) -> AlbertScorer:
    return AlbertScorer(
        bundle_dir,
        "text-classification",
        parameters=PARAMETERS,
        columns={"text": "review"},
        keep=["id"],
    )


def test_its_columns_are_those_of_parquet(
    table: pyarrow.Table, scorer: AlbertScorer, bundle_dir: Path, tmp_path: Path
) -> None:
    parquet.write_table(table, tmp_path / "in.parquet")
    options = ScoreOptions(parameters=PARAMETERS, columns={"text": "review"}, keep=["id"])
    output = tmp_path / "out.parquet"
    engine = LocalScorer.open(bundle_dir, "text-classification", RuntimeOptions(num_threads=1))
    score_files(engine, [tmp_path / "in.parquet"], output, options)
    expected = parquet.read_table(output)
    scored = scorer(table)
    assert scored.equals(expected)
    assert scorer.schema(table.schema) == expected.schema
    assert scored.column("error_type").to_pylist() == ["too_long", *[None] * 8]


def test_a_batch_of_each_kind(table: pyarrow.Table, scorer: AlbertScorer) -> None:
    expected = scorer(table)
    batch = table.to_batches()[0]
    assert pyarrow.Table.from_batches([scorer(batch)]).equals(expected)
    frame = scorer(table.to_pandas())
    assert isinstance(frame, type(table.to_pandas()))
    assert list(frame.columns) == expected.column_names
    assert frame["label"].tolist()[1:] == expected.column("label").to_pylist()[1:]
    arrays = scorer({name: np.asarray(table.column(name)) for name in table.column_names})
    assert list(arrays) == expected.column_names
    assert arrays["id"].tolist() == list(range(9))
    assert arrays["labels"][1][0] == expected.column("labels").to_pylist()[1][0]


def test_batches_without_rows(table: pyarrow.Table, scorer: AlbertScorer) -> None:
    none = scorer(table.slice(0, 0))
    assert none.num_rows == 0
    assert none.schema == scorer.schema(table.schema)
    assert scorer(table.slice(0, 0).to_pandas()).empty
    assert scorer(table.to_batches()[0].slice(0, 0)).num_rows == 0


def test_batches_are_read_as_their_answers_are(table: pyarrow.Table, scorer: AlbertScorer) -> None:
    read = []

    def batches() -> Iterator[Any]:
        for number in range(3):
            read.append(number)
            yield table.to_batches()[0]

    scored = scorer.map(batches())
    assert next(scored).num_rows == 9
    assert read == [0]
    assert len(list(scored)) == 2


def test_only_its_configuration_is_pickled(table: pyarrow.Table, scorer: AlbertScorer) -> None:
    size = len(pickle.dumps(scorer))
    expected = scorer(table)
    content = pickle.dumps(scorer)
    assert len(content) == size < 1000
    again = pickle.loads(content)
    assert again(table).equals(expected)


def test_wrong_arguments_are_refused_before_a_worker_has_them(bundle_dir: Path) -> None:
    with pytest.raises(NotFoundError, match="no task 'spelling'"):
        AlbertScorer(bundle_dir, "spelling")
    with pytest.raises(InvalidInputError, match="parameters: top_k"):
        AlbertScorer(bundle_dir, "text-classification", parameters={"top_k": 0})
    with pytest.raises(InvalidInputError, match="no field 'review'"):
        AlbertScorer(bundle_dir, "text-classification", columns={"review": "text"})
    scorer = AlbertScorer(bundle_dir, "text-classification")
    with pytest.raises(InvalidInputError, match="has no column 'text'"):
        scorer.schema(pyarrow.schema([("review", pyarrow.string())]))


def test_errors_of_a_worker_name_the_machine(
    table: pyarrow.Table, bundle_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(BundleMissingError, match=r"^on \S+: .*nowhere"):
        AlbertScorer(tmp_path / "nowhere", "fill-mask", columns={"text": "review"})(table)
    with pytest.raises(NotFoundError, match=r"^on \S+: .* has no token-classification"):
        AlbertScorer(bundle_dir, "token-classification", columns={"text": "review"})(table)


def test_rows_with_errors_raise_on_request(table: pyarrow.Table, bundle_dir: Path) -> None:
    scorer = AlbertScorer(
        bundle_dir,
        "text-classification",
        parameters=PARAMETERS,
        columns={"text": "review"},
        errors="fail",
    )
    with pytest.raises(TooManyErrorsError, match="1 rows are in error; the first: "):
        scorer(table)


def test_an_iterator_is_read_as_its_answers_are() -> None:
    read = []

    def rows() -> Iterator[object]:
        for number in range(30):
            read.append(number)
            yield {"id": number, "text": f"text {number}"} if number else "a text"

    scored = score_dataset(rows(), HashScorer(), ScoreOptions(part_rows=10))
    assert read == []
    assert next(scored) == {"text": "a text", "output": labels_of("a text")}
    assert len(read) == 10
    assert next(scored) == {"id": 1, "text": "text 1", "output": labels_of("text 1")}
    assert len(list(scored)) == 28


ALL: Final = {"top_k": None}


def test_a_table_is_read_as_its_answers_are(tmp_path: Path) -> None:
    table = pyarrow.table({"id": range(50), "review": [f"text {i % 7}" for i in range(50)]})
    parquet.write_table(table, tmp_path / "one.parquet")
    scorer = HashScorer()
    options = ScoreOptions(columns={"text": "review"}, keep=["id"], part_rows=8, parameters=ALL)
    for data in (table, table.to_reader(), dataset.dataset(tmp_path)):
        reader = score_dataset(data, scorer, options)
        assert reader.schema.names[:3] == ["id", "label", "score"]
        scored = reader.read_all()
        assert scored.column("id").num_chunks == 7
        assert scored.column("id").to_pylist() == list(range(50))
        expected = [labels_of(f"text {i % 7}") for i in range(50)]
        assert scored.column("labels").to_pylist() == expected
    assert len(scorer.texts) == 3 * 50


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_frames_are_scored(kind: str) -> None:
    module = importlib.import_module(kind)
    frame = module.DataFrame({"text": ["one", "two"]})
    scored = score_dataset(frame, HashScorer(), ScoreOptions(parameters=ALL)).read_all()
    assert scored.column("labels").to_pylist() == [labels_of("one"), labels_of("two")]


def test_what_is_no_table_is_refused() -> None:
    class Frame:
        columns = ("text",)

    for data in (Frame(), {"text": "a"}, "a"):
        with pytest.raises(InvalidInputError, match="is neither rows nor a table"):
            score_dataset(data, HashScorer())
    with pytest.raises(InvalidInputError, match="the table has no column 'text'"):
        score_dataset(pyarrow.table({"review": ["a"]}), HashScorer())


def test_rows_with_errors_are_kept_or_end_the_job() -> None:
    rows = [{"text": "a"}, {"text": ""}, {"review": "b"}]
    scored = list(score_dataset(rows, HashScorer()))
    assert [row.get("error") for row in scored] == [
        None,
        "the text is empty",
        "the row has neither inputs nor text or text_pair",
    ]
    with pytest.raises(
        TooManyErrorsError, match="2 rows are in error; 1 are allowed; the first: the"
    ):
        list(score_dataset(rows, HashScorer(), ScoreOptions(max_errors=1)))
