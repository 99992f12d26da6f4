"""Formats of rows: what is written is read again, whatever the values are."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answers import SCORED_TASKS, answer_columns
from albert_serve.scoring.inputs import RowBatch
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.rows import RowReader
from tests.albert_serve.scoring.jobs import SUFFIXES, HashScorer, read_any, read_jsonl, write_jsonl

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
# A name with a tab or a line break is not read back from TSV.
NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\t\n"), min_size=1, max_size=8
)
TIMES = pyarrow.timestamp("ns")


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, str]]:
    reserved = {"inputs", "parameters", *answer_columns("text-classification", {}), "output"}
    names = draw(st.lists(NAMES.filter(lambda name: name not in reserved), max_size=3, unique=True))
    columns = list(dict.fromkeys(["text", *names]))
    row = st.fixed_dictionaries(dict.fromkeys(columns, TEXTS))
    return draw(st.lists(row, min_size=1, max_size=5))


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40, deadline=None)
@given(rows=tables())
def test_rows_are_read_as_they_were_written(suffix: str, rows: list[dict[str, str]]) -> None:
    options = ScoreOptions(keep=list(rows[0]))
    with tempfile.TemporaryDirectory() as folder:
        source = write_jsonl(Path(folder) / "in.jsonl", rows)
        table, again = Path(folder) / f"rows{suffix}", Path(folder) / "again.jsonl"
        score_files(HashScorer(), [source], table, options)
        score_files(HashScorer(), [table], again, options)
        scored = read_jsonl(again)
    assert [{name: values[name] for name in rows[0]} for values in scored] == rows


@pytest.mark.parametrize(
    ("task", "output", "columns"),
    [
        (
            "fill-mask",
            [{"score": 0.5, "token": 3, "token_str": "a", "sequence": "a b"}],
            {"token_str": "a", "score": 0.5, "sequence": "a b"},
        ),
        ("fill-mask", [[{"score": 0.5}], [{"score": 0.1}]], {}),
        (
            "fill-mask",
            [{"score": 0.2, "tokens": [3], "token_strs": ["a"], "sequence": "a b"}],
            {"score": 0.2, "sequence": "a b", "token_str": None},
        ),
        (
            "question-answering",
            [{"answer": "a", "score": 0.5, "start": 0, "end": 1}] * 2,
            {"answer": "a", "score": 0.5, "start": 0, "end": 1},
        ),
        ("sentence-order", {"in_order": 0.5}, {"in_order": 0.5}),
        ("feature-extraction", [0.5, 1.0], {"embedding": [0.5, 1.0]}),
        ("feature-extraction", [[[0.5], [1.0]]], {"token_embeddings": [[0.5], [1.0]]}),
    ],
)
def test_answers_have_columns(task: str, output: Any, columns: dict[str, Any]) -> None:
    values = SCORED_TASKS[task].to_columns(output)
    assert set(values) <= set(SCORED_TASKS[task].columns)
    assert {name: values.get(name) for name in columns} == columns


@pytest.mark.parametrize(
    ("kind", "values", "texts"),
    [
        (
            TIMES,
            [1000, -1, None],
            ["1970-01-01T00:00:00.000001000", "1969-12-31T23:59:59.999999999", None],
        ),
        (pyarrow.timestamp("ns", "UTC"), [1], ["1970-01-01T00:00:00.000000001Z"]),
        (
            pyarrow.timestamp("ns", "Europe/Berlin"),
            [1],
            ["1970-01-01T01:00:00.000000001+01:00"],
        ),
        (
            pyarrow.time64("ns"),
            [0, 86_399 * 10**9 + 1],
            ["00:00:00.000000000", "23:59:59.000000001"],
        ),
        (pyarrow.duration("ns"), [90_000 * 10**9], ["P1DT1H"]),
        (pyarrow.timestamp("s"), [1], ["1970-01-01T00:00:01"]),
    ],
)
def test_times_of_parquet_are_iso_8601_elsewhere(
    kind: Any, values: list[int | None], texts: list[str | None], tmp_path: Path
) -> None:
    table = pyarrow.table({"text": ["a"] * len(values), "when": pyarrow.array(values, kind)})
    parquet.write_table(table, tmp_path / "in.parquet", version="2.6", store_schema=True)
    for suffix, empty in ((".jsonl", None), (".csv", "")):
        score_files(HashScorer(), [tmp_path / "in.parquet"], tmp_path / f"out{suffix}")
        rows = read_any(tmp_path / f"out{suffix}")
        assert [row["when"] for row in rows] == [text or empty for text in texts]


def test_lists_of_a_csv_are_json() -> None:
    reader = RowReader("sentence-order", ScoreOptions(), in_table=False)
    cells = ['["It rained.", "We stayed in."]', "It rained."]
    batch = RowBatch(values=[{"sentences": cell} for cell in cells], is_text=True)
    sentences: Any = reader.request(batch, 0).inputs
    assert sentences.sentences == ["It rained.", "We stayed in."]
    with pytest.raises(InvalidInputError, match=r'is not a JSON list such as \["a", "b"\]: '):
        reader.request(batch, 1)
