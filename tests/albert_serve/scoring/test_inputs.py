"""The files of a job: which are read, their formats and rows, and what ends the job."""

from __future__ import annotations

import csv
import gzip
import io
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import dataset, parquet

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answers import SCORED_TASKS, answer_columns
from albert_serve.scoring.inputs import RowBatch
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.rows import RowReader
from tests.albert_serve.scoring.jobs import (
    SUFFIXES,
    HashScorer,
    labels_of,
    read_any,
    read_jsonl,
    read_table,
    score,
    texts,
    write_csv,
    write_dataset,
    write_jsonl,
)


def test_parts_of_parquet_are_bounded_by_what_is_kept(tmp_path: Path) -> None:
    """In one row group, so that neither the group nor 1,024 rows are held at once."""
    bodies = [random.Random(number).randbytes(100_000) for number in range(300)]
    table = pyarrow.table({"text": [f"{i}" for i in range(300)], "body": bodies})
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    # Pages are read as a whole, and end at multiples of so many rows.
    parquet.write_table(table, source, use_dictionary=False, write_batch_size=10)
    assert parquet.ParquetFile(source).num_row_groups == 1
    before = pyarrow.total_allocated_bytes()
    most = 0

    def held() -> bool:
        nonlocal most
        most = max(most, pyarrow.total_allocated_bytes() - before)
        return False

    summary = score_files(HashScorer(), [source], output, is_stopped=held)
    assert summary.num_parts == 8
    assert most < 15_000_000
    assert parquet.read_table(output).column("body").to_pylist() == bodies


def test_files_globs_and_folders_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deeper").mkdir(parents=True)
    for number, name in enumerate(["b.csv", "a.csv", "deeper/c.csv", "_x.csv", ".y.csv"]):
        write_csv(folder / name, [{"id": str(number), "text": "x"}])
    (folder / "readme.txt").write_text("text")
    ids = {}
    asked: dict[str, list[Path | str]] = {
        "folder": [folder],
        "glob": [f"{folder}/?.csv"],
        "files": [folder / "b.csv", f"{folder}/a*.csv"],
    }
    for name, inputs in asked.items():
        score(inputs, tmp_path / f"{name}.csv")
        ids[name] = [row["id"] for row in read_table(tmp_path / f"{name}.csv")]
    assert ids == {"folder": ["1", "0", "2"], "glob": ["1", "0"], "files": ["0", "1"]}
    for shard, expected in (((0, 2), ["1", "2"]), ((2, 3), ["2"])):
        score([folder], tmp_path / "shard.csv", shard=shard)
        assert [row["id"] for row in read_table(tmp_path / "shard.csv")] == expected
    with pytest.raises(InvalidInputError, match="No file matches"):
        score([f"{folder}/*.parquet"], tmp_path / "none.csv")
    with pytest.raises(InvalidInputError, match="3 input files cannot be split into 4 shards"):
        score([folder], tmp_path / "none.csv", shard=(0, 4))
    with pytest.raises(InvalidInputError, match=r"The input names \S+/b\.csv 2 times"):
        score([folder, f"{folder}/deeper/../b.csv"], tmp_path / "none.csv")
    with pytest.raises(InvalidInputError, match=r"none\.csv does not exist\.$"):
        score([folder / "none.csv"], tmp_path / "none.csv")
    with pytest.raises(InvalidInputError, match="also an input"):
        score(folder / "b.csv", folder / "b.csv")


def test_an_address_is_refused(tmp_path: Path) -> None:
    source, address = write_jsonl(tmp_path / "in.jsonl", texts(1)), "s3://bucket/a.csv"
    with pytest.raises(InvalidInputError, match="is an address, but jobs read and write local"):
        score([address], tmp_path / "out.csv")
    with pytest.raises(InvalidInputError, match="is an address, but jobs read and write local"):
        score(source, address)


def test_folders_of_hive_are_columns_as_pyarrow_reads_them(tmp_path: Path) -> None:
    for part in ("n=1/lang=en%20x", "n=-02/lang=__HIVE_DEFAULT_PARTITION__", "n=10/lang=7"):
        (tmp_path / "in" / part).mkdir(parents=True)
        table = pyarrow.table({"text": [part]})
        parquet.write_table(table, tmp_path / "in" / part / "0.parquet")
    names = ["text", "n", "lang"]
    expected = dataset.dataset(tmp_path / "in", partitioning="hive").to_table().select(names)
    for source in (tmp_path / "in", f"{tmp_path}/in/n=*/*/*"):
        score([source], tmp_path / "out.parquet", keep=names)
        scored = parquet.read_table(tmp_path / "out.parquet").select(names)
        assert scored.schema.types == [pyarrow.string(), pyarrow.int32(), pyarrow.string()]
        assert scored.sort_by("text").to_pylist() == expected.sort_by("text").to_pylist()


def test_binary_text_is_read_as_text(tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    films = ["A film.", "Ein schöner Film."]
    column = pyarrow.array([text.encode() for text in films])
    parquet.write_table(pyarrow.table({"text": column, "raw": [b"\xff", b""]}), source)
    score(source, output)
    assert [row["output"] for row in read_jsonl(output)] == [labels_of(text) for text in films]
    parquet.write_table(pyarrow.table({"text": [b"ok", b"\xff"]}), source)
    with pytest.raises(InvalidInputError, match="The binary column 'text' is not UTF-8"):
        score(source, output)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"id,review\n1,a\n", {}, r"has no column 'text'; it has id, review.*--column text=COLUMN"),
        (b"id,text\n1,a\n", {"columns": {"text": "review"}}, "has no column 'review'"),
        (b"id,text\n1,a\n", {"keep": ["ID"]}, "has no column 'ID'"),
        (b'text\n"a"b\n', {}, r"line 2: .*--no-quotes"),
        (b'text\n"a\nb\n', {}, r"line 2: In line 3, unexpected end of data"),
        (b"text\na\n", {"parameters": {"topk": 1}}, "Unknown field 'topk'"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    content: bytes, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        score(tmp_path / "in.csv", tmp_path / "out.csv", **options)
    assert [file.name for file in tmp_path.iterdir()] == ["in.csv"]


QUOTED = 'Café; "so"\nand so'
CELLS = [("id", "Sentence"), ("1", QUOTED), ("2", "b\tc, d")]


def csv_of(delimiter: str, end: str) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows(CELLS)
    return text.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        csv_of(";", "\r\n").encode("utf-8-sig"),
        csv_of("\t", "\r\n").encode("utf-16"),  # Excel's "Unicode text"
    ],
    ids=["semicolon", "utf-16"],
)
def test_a_csv_is_read_whichever_program_wrote_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    scorer = HashScorer()
    score_files(scorer, [tmp_path / "in.csv"], tmp_path / "out.jsonl", ScoreOptions(keep=["id"]))
    assert scorer.texts == [QUOTED, "b\tc, d"]
    assert [row["id"] for row in read_jsonl(tmp_path / "out.jsonl")] == ["1", "2"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_columns_with_names_of_the_answer_are_kept_beside_it(suffix: str, tmp_path: Path) -> None:
    """Also those of an output that is scored again."""
    row = {"text": "a", "label": "gold", "score": "5", "output": "x", "input_label": "old"}
    source, output = write_csv(tmp_path / "in.csv", [row]), tmp_path / f"out{suffix}"
    score(source, output)
    [scored] = read_any(output)
    if suffix == ".jsonl":
        assert scored == {**row, "input_output": "x", "output": labels_of("a")}
        return
    assert {name: scored[name] for name in ("input_score", "input_input_label", "input_label")} == {
        "input_score": "5",
        "input_input_label": "gold",
        "input_label": "old",
    }
    assert scored["label"] == labels_of("a")[0]["label"]
    assert "labels" not in scored


def test_columns_are_those_that_training_knows(tmp_path: Path) -> None:
    rows = [{"Sentence1": "a", "sentence2": "c"}, {"Sentence1": "b", "sentence2": ""}]
    scorer = HashScorer()
    score_files(scorer, [write_csv(tmp_path / "in.csv", rows)], tmp_path / "out.jsonl")
    items = [request.inputs for request in scorer.requests]
    assert [(item.text, item.text_pair) for item in items] == [("a", "c"), ("b", None)]


def test_json_arrays_and_folders_of_datasets_are_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "saved", pyarrow.table({"text": ["a", "b", "c"]}))
    (tmp_path / "in.json").write_text('[{"text": "d"}, 5,\n {"text": "e"}]')
    scorer = HashScorer()
    inputs = [tmp_path / "saved", tmp_path / "in.json"]
    summary = score_files(scorer, inputs, tmp_path / "out.jsonl", ScoreOptions(part_rows=2))
    assert scorer.texts == list("abcde")
    assert summary.first_error == f"{tmp_path}/in.json, record 2 is not a JSON object."


def test_rows_of_a_csv_with_other_fields_are_errors(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes(b"\xef\xbb\xbfid,text\n1,a\n2\n3,b,c\n\n4,\xff\n")
    score(source, tmp_path / "out.jsonl")
    first, *rows, last = read_jsonl(tmp_path / "out.jsonl")
    assert "error" not in first
    assert [row["id"] for row in (first, *rows, last)] == ["1", "2", "3", "4"]
    for row, start in zip(rows, ("line 3 has 1 fields", "line 4 has 3 fields"), strict=True):
        assert row["error"].startswith(f"{start}, but the header has 2. If ',' is not")
    assert last["text"] == "\N{REPLACEMENT CHARACTER}"
    assert last["error"].startswith("line 6: The column 'text' is not UTF-8. Convert the file")


def test_damage_ends_the_job_and_keeps_the_parts_before(tmp_path: Path) -> None:
    # Enough for several blocks of the compression.
    words = [random.Random(number).randbytes(150).hex() for number in range(6_000)]
    content = gzip.compress(b"".join(f'{{"text": "{word}"}}\n'.encode() for word in words))
    source, output = tmp_path / "in.jsonl.gz", tmp_path / "out.csv"
    output.write_text("the last job's\n")
    source.write_bytes(content[:-6])
    with pytest.raises(InvalidInputError, match="is damaged or incomplete"):
        score(source, output, part_rows=300)
    assert output.read_text() == "the last job's\n"
    assert len(list((tmp_path / "out.csv.parts").glob("part-*"))) > 3
    source.write_bytes(content)
    assert score(source, output, part_rows=300, restart=True).num_rows == 6_000


def test_columns_of_jsonl_in_a_table_are_those_of_the_first_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": i, "text": "x"} for i in range(1023)]
    known = {"text": "y", "more": 1}
    for suffix in ("csv", "parquet"):
        source = write_jsonl(tmp_path / "in.jsonl", [*rows, known, known])
        assert score(source, tmp_path / f"out.{suffix}").num_errors == 0
        source = write_jsonl(tmp_path / "in.jsonl", [*rows, rows[0], known])
        with pytest.raises(InvalidInputError, match=r"line 1025 has a column 'more'.*--keep"):
            score(source, tmp_path / f"out.{suffix}")
    source = write_jsonl(tmp_path / "types.jsonl", [*rows, *rows[:9], {"text": "y", "id": "a17"}])
    first_error = score(source, tmp_path / "types.parquet").first_error
    assert str(first_error).startswith("line 1033: The column 'id' has a value that is not int64")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
# A name with a tab or a line break is not read back from TSV.
NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\t\n"), min_size=1, max_size=8
)


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


ANSWER = {"answer": "a", "score": 0.5, "start": 0, "end": 1}
FILLED = {"score": 0.5, "token": 3, "token_str": "a", "sequence": "a b"}


@pytest.mark.parametrize(
    ("task", "output", "columns"),
    [
        (
            "fill-mask",
            [FILLED],
            {"token_str": "a", "score": 0.5, "sequence": "a b", "predictions": [[FILLED]]},
        ),
        ("fill-mask", [[FILLED], [FILLED]], {"predictions": [[FILLED], [FILLED]]}),
        ("question-answering", [ANSWER, {}], {**ANSWER, "answers": [ANSWER, {}]}),
        ("sentence-order", {"in_order": 0.5}, {"in_order": 0.5}),
        ("token-classification", [{"word": "a"}], {"entities": [{"word": "a"}]}),
        ("feature-extraction", [0.5, 1.0], {"embedding": [0.5, 1.0]}),
        ("feature-extraction", [[[0.5], [1.0]]], {"token_embeddings": [[0.5], [1.0]]}),
    ],
)
def test_answers_have_columns(task: str, output: Any, columns: dict[str, Any]) -> None:
    assert SCORED_TASKS[task].to_columns(output) == columns
    assert set(columns) <= set(SCORED_TASKS[task].columns)


def test_times_of_parquet_are_iso_8601_elsewhere(tmp_path: Path) -> None:
    times = [
        (pyarrow.timestamp("ns", "Europe/Berlin"), 1, "1970-01-01T01:00:00.000000001+01:00"),
        (pyarrow.time64("ns"), 86_399 * 10**9 + 1, "23:59:59.000000001"),
        (pyarrow.duration("ns"), 90_000 * 10**9, "P1DT1H"),
        (pyarrow.timestamp("s"), 1, "1970-01-01T00:00:01"),
    ]
    columns = {str(kind): pyarrow.array([value, None], kind) for kind, value, _ in times}
    table = pyarrow.table({"text": ["a", "b"], **columns})
    parquet.write_table(table, tmp_path / "in.parquet", version="2.6", store_schema=True)
    for suffix, empty in ((".jsonl", None), (".csv", "")):
        score(tmp_path / "in.parquet", tmp_path / f"out{suffix}")
        first, second = read_any(tmp_path / f"out{suffix}")
        assert [first[str(kind)] for kind, _, _ in times] == [text for *_, text in times]
        assert [second[str(kind)] for kind, _, _ in times] == [empty] * len(times)


def test_lists_of_a_csv_are_json() -> None:
    reader = RowReader("sentence-order", ScoreOptions(), in_table=False)
    cells = ['["It rained.", "We stayed in."]', "It rained."]
    batch = RowBatch(values=[{"sentences": cell} for cell in cells], is_text=True)
    sentences: Any = reader.request(batch, 0).inputs
    assert sentences.sentences == ["It rained.", "We stayed in."]
    with pytest.raises(InvalidInputError, match=r'is not a JSON list such as \["a", "b"\]: '):
        reader.request(batch, 1)
