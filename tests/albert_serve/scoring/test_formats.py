"""Formats of rows: what is written is read again, whatever the values are."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.scoring.answers import SCORED_TASKS, RowResult, answer_columns
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.output.layout import Layout, make_layout
from albert_serve.scoring.output.writers import open_writer
from albert_serve.scoring.records import InputFile, Record, read_records
from albert_serve.scoring.rows import RowReader
from albert_serve.tables import TableType, type_by_name
from albert_serve.tasks import TASKS

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SUFFIXES = [".jsonl", ".csv", ".tsv", ".parquet", ".csv.gz", ".jsonl.xz", ".tsv.bz2", ".csv.zst"]


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, str]]:
    reserved = {"inputs", "parameters", *answer_columns("text-classification"), "output"}
    names = draw(st.lists(NAMES.filter(lambda name: name not in reserved), max_size=3, unique=True))
    columns = list(dict.fromkeys(["text", *names]))
    row = st.fixed_dictionaries(dict.fromkeys(columns, TEXTS))
    return draw(st.lists(row, min_size=1, max_size=5))


def write(rows: list[dict[str, str]], kind: TableType, file: Path) -> None:
    reader = RowReader("text-classification", ScoreOptions(), in_table=kind.has_columns)
    records = [Record(place=f"row {i}", values=dict(row)) for i, row in enumerate(rows)]
    source = InputFile(path=file, type=TableType(format="jsonl"), columns=None)
    layout = make_layout(kind, reader, [source], None, records)
    result = RowResult(values={"output": [{"label": "x", "score": 0.5}]})
    with file.open("wb") as stream, open_writer(stream, layout, has_header=True) as writer:
        writer.write([reader.read(record) for record in records], [result] * len(rows))


def read(file: Path, num_skipped: int) -> list[dict[str, Any]]:
    source = InputFile.open(file)
    names = list(source.columns or ())
    return [record.values for record in read_records([source], names, None, num_skipped)]


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40, deadline=None)
@given(rows=tables(), num_skipped=st.integers(0, 6))
def test_rows_are_read_as_they_were_written(
    suffix: str, rows: list[dict[str, str]], num_skipped: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"rows{suffix}"
        write(rows, type_by_name(file.name), file)
        found = read(file, num_skipped)
    kept = [{name: values[name] for name in rows[0]} for values in found]
    assert kept == rows[num_skipped:]


def test_every_task_is_scored() -> None:
    assert list(SCORED_TASKS) == list(TASKS)
    for task, scored in SCORED_TASKS.items():
        assert {field for some in scored.required for field in some} <= set(scored.fields)
        reader = RowReader(task, ScoreOptions(), in_table=True)
        layout = Layout(type=TableType(format="parquet"), reader=reader, kept={})
        assert layout.schema().names == [*scored.columns, *list(answer_columns(task))[-5:]]


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


def test_a_frame_of_zstandard_that_is_cut_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.zst"
    write([{"text": "a" * 1000}], type_by_name(file.name), file)
    whole = file.read_bytes()
    file.write_bytes(whole * 2)
    assert len(read(file, 0)) == 2
    file.write_bytes(whole + whole[:-3])
    with pytest.raises(ValueError, match="is damaged or incomplete: Truncated"):
        read(file, 0)
