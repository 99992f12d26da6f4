"""Scoring of tables and iterators in memory."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow
import pytest
from pyarrow import dataset, parquet

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.dataset import score_dataset
from albert_serve.scoring.errors import TooManyErrorsError
from albert_serve.scoring.options import ScoreOptions
from tests.albert_serve.scoring.jobs import HashScorer, labels_of


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
    assert len(scorer.texts) == 3 * 7


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
