"""Input files of a job: their order, formats, rows and columns, and errors that end the job."""

from __future__ import annotations

import csv
import gzip
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
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.rows import RowReader
from albert_serve.tables.columnar import read_columns
from albert_serve.tables.formats import detect_type
from tests.albert_serve.scoring import jobs
from tests.albert_serve.scoring.jobs import HashScorer, labels_of, read_rows, score, write_jsonl


def test_parts_of_parquet_are_smaller_if_the_stored_columns_are_large(tmp_path: Path) -> None:
    """The input has one row group. The job never has the group or 1,024 rows in memory.

    A row group of the output ends with the first part that makes it 64 MiB.
    """
    bodies = [bytes([number % 256]) * 100_000 for number in range(700)]
    table = pyarrow.table({"text": [f"{i}" for i in range(700)], "body": bodies})
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    # Parquet is read by pages. Each of these pages has 10 rows.
    parquet.write_table(table, source, use_dictionary=False, write_batch_size=10)
    assert parquet.ParquetFile(source).num_row_groups == 1
    old_bytes, peak_bytes = pyarrow.total_allocated_bytes(), 0

    def measure() -> bool:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, pyarrow.total_allocated_bytes() - old_bytes)
        return False

    assert score(source, output, is_stopped=measure).num_parts == 18
    assert peak_bytes < 15_000_000
    assert parquet.read_table(output).column("body").to_pylist() == bodies
    assert parquet.ParquetFile(output).num_row_groups == 2


def test_files_globs_and_folders_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    names = ["b.csv", "a.csv", "deeper/c.csv.gz", "_x.csv", ".y.csv", "old.csv.parts/z.csv"]
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        jobs.write_csv(folder / name, [{"id": str(number), "text": "x"}])
    (folder / "readme.txt").write_text("text")
    output, file = tmp_path / "out.csv", folder / "b.csv"
    cases: list[tuple[list[Path | str], tuple[int, int], str]] = [
        ([folder], (0, 1), "102"),
        ([f"{folder}/?.csv"], (0, 1), "10"),
        ([file, f"{folder}/a*.csv"], (0, 1), "01"),
        ([folder], (0, 2), "12"),
        ([folder], (2, 3), "2"),
    ]
    for inputs, shard, ids in cases:
        score(inputs, output, shard=shard)
        assert [row["id"] for row in read_rows(output)] == [*ids]
    with pytest.raises(InvalidInputError, match="3 input files cannot be split into 4 shards"):
        score(folder, output, shard=(0, 4))
    errors: list[tuple[list[Path | str], Path | str, str]] = [
        ([f"{folder}/*.parquet"], output, "No file matches"),
        ([folder, f"{folder}/deeper/../b.csv"], output, r"The input names \S+/b\.csv 2 times"),
        ([folder / "none.csv"], output, r"none\.csv does not exist\.$"),
        ([file], file, "also an input"),
        (["s3://bucket/a.csv"], output, "is an address, but jobs read and write local"),
        ([file], "s3://bucket/a.csv", "is an address, but jobs read and write local"),
    ]
    for inputs, target, message in errors:
        with pytest.raises(InvalidInputError, match=message):
            score(inputs, target)


def test_hive_folders_become_the_columns_that_pyarrow_reads(tmp_path: Path) -> None:
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


def test_a_binary_column_is_read_as_utf_8(tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    films = ["A film.", "Ein schöner Film."]
    column = pyarrow.array([text.encode() for text in films])
    table = pyarrow.table({"text": column.dictionary_encode(), "raw": [b"\xff", b""]})
    parquet.write_table(table, source)
    score(source, output)
    assert [row["output"] for row in read_rows(output)] == [labels_of(text) for text in films]
    parquet.write_table(pyarrow.table({"text": [b"ok", b"\xff"]}), source)
    with pytest.raises(InvalidInputError, match=r"^row 1 or a later row: The binary column"):
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
        (b"PK\x03\x04", {}, r"in\.csv is an Excel or Zip file"),
    ],
)
def test_a_file_without_the_expected_columns_or_format_is_an_error(
    content: bytes, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        score(tmp_path / "in.csv", tmp_path / "out.csv", **options)
    assert [file.name for file in tmp_path.iterdir()] == ["in.csv"]


def test_lines_of_a_csv_may_end_in_carriage_returns(tmp_path: Path) -> None:
    """Excel for Mac writes such files."""
    (tmp_path / "in.csv").write_bytes(b"id,text\r1,a\r2,b\r")
    scorer = HashScorer()
    score(tmp_path / "in.csv", tmp_path / "out.jsonl", scorer)
    assert scorer.texts == ["a", "b"]


# Excel writes the second combination as "Unicode text".
@pytest.mark.parametrize(("delimiter", "encoding"), [(";", "utf-8-sig"), ("\t", "utf-16")])
def test_a_csv_may_have_other_delimiters_and_encodings(
    delimiter: str, encoding: str, tmp_path: Path
) -> None:
    texts = ['Café; "two"\nlines', "b\tc, d"]
    with (tmp_path / "in.csv").open("w", newline="", encoding=encoding) as stream:
        rows = [("id", "Sentence"), *enumerate(texts, start=1)]
        csv.writer(stream, delimiter=delimiter).writerows(rows)
    scorer = HashScorer()
    score(tmp_path / "in.csv", tmp_path / "out.jsonl", scorer, keep=["id"])
    assert scorer.texts == texts
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == ["1", "2"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_input_columns_named_like_answer_columns_are_renamed(suffix: str, tmp_path: Path) -> None:
    """The names of an earlier output are among these names."""
    row = {"text": "a", "label": "gold", "score": "5", "output": "x", "input_label": "old"}
    source, output = jobs.write_csv(tmp_path / "in.csv", [row]), tmp_path / f"out{suffix}"
    score(source, output)
    [scored] = read_rows(output)
    if suffix == ".jsonl":
        assert scored == {**row, "input_output": "x", "output": labels_of("a")}
    else:
        renamed = {"input_score": "5", "input_input_label": "gold", "input_label": "old"}
        assert scored == {**scored, **renamed, "label": labels_of("a")[0]["label"]}
        assert "labels" not in scored


def test_json_arrays_of_limited_size_and_saved_datasets_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.write_dataset(tmp_path / "saved", pyarrow.table({"text": ["a", "b", "c"]}))
    content = '[{"text": "d"}, 5,\n {"text": "e"}]'
    monkeypatch.setattr("albert_serve.tables.jsonl._MAX_ARRAY_BYTES", len(content))
    (tmp_path / "in.json").write_text(content)
    (tmp_path / "long.json").write_text(content + "\n")
    scorer = HashScorer()
    inputs = [tmp_path / "saved", tmp_path / "in.json", tmp_path / "long.json"]
    summary = score(inputs, tmp_path / "out.jsonl", scorer, part_rows=2)
    assert (scorer.texts, summary.num_errors) == (list("abcde"), 2)
    assert summary.first_error == f"{tmp_path}/in.json, record 2 is not a JSON object."


@pytest.mark.parametrize(
    ("max_rows", "max_bytes", "num_skipped", "expected"),
    [
        (4, 80, 0, [(0, 0.4, 4), (4, 0.8, 4), (8, 1.0, 2)]),
        (10, 24, 5, [(5, 0.8, 3), (8, 1.0, 2)]),
    ],
)
def test_arrow_is_read_in_batches_of_limited_rows_and_bytes(
    tmp_path: Path, max_rows: int, max_bytes: int, num_skipped: int, expected: list[object]
) -> None:
    """A row has 8 bytes."""
    table, file = pyarrow.table({"number": range(10)}), tmp_path / "in.arrow"
    with pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    batches = read_columns(
        file,
        detect_type(file),
        max_rows=max_rows,
        max_bytes=max_bytes,
        num_skipped=num_skipped,
    )
    assert [(start, share, rows.num_rows) for start, share, rows in batches] == expected


def test_a_line_over_the_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts the line end."""
    monkeypatch.setattr("albert_serve.tables.formats.MAX_LINE_BYTES", 20)
    rows = [{"text": "x" * length} for length in (7, 8, 26, 27, 28, 50, 1)]
    scorer = HashScorer()
    summary = score(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", scorer)
    assert (scorer.texts, summary.num_rows, summary.num_errors) == (["x" * 7, "x"], 7, 5)


def test_csv_rows_with_missing_or_additional_fields_or_not_utf_8_are_errors(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes(b"\xef\xbb\xbfid,text\n1,a\n2\n3,b,c\n\n4,\xff\n")
    score(source, tmp_path / "out.jsonl")
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == ["1", "2", "3", "4"]
    valid, short, long, not_utf_8 = rows
    assert "error" not in valid
    assert short["error"].startswith("line 3 has 1 fields, but the header has 2. If ',' is not")
    assert long["error"].startswith("line 4 has 3 fields, but the header has 2. If ',' is not")
    assert not_utf_8["text"] == "\N{REPLACEMENT CHARACTER}"
    assert not_utf_8["error"].startswith("line 6: The column 'text' is not UTF-8. Convert the file")


def test_damaged_compression_ends_the_job_and_the_parts_before_it_stay(tmp_path: Path) -> None:
    # The content fills several blocks of the compression.
    words = [random.Random(number).randbytes(150).hex() for number in range(6_000)]
    content = gzip.compress(b"".join(f'{{"text": "{word}"}}\n'.encode() for word in words))
    source, output = tmp_path / "in.jsonl.gz", tmp_path / "out.csv"
    output.write_text("old output\n")
    source.write_bytes(content[:-6])
    with pytest.raises(InvalidInputError, match="is damaged or incomplete"):
        score(source, output, part_rows=300)
    assert output.read_text() == "old output\n"
    assert len(list((tmp_path / "out.csv.parts").glob("part-*"))) > 3
    source.write_bytes(content)
    assert score(source, output, part_rows=300, restart=True).num_rows == 6_000


def test_a_changed_byte_of_parquet_with_checksums_is_an_error(tmp_path: Path) -> None:
    source, table = tmp_path / "in.parquet", pyarrow.table({"text": ["good", "bad"]})
    parquet.write_table(table, source, use_dictionary=False, write_page_checksum=True)
    source.write_bytes(source.read_bytes().replace(b"good", b"gone"))
    with pytest.raises(InvalidInputError, match=r"in\.parquet is damaged or incomplete"):
        score(source, tmp_path / "out.csv")


def test_the_first_1024_rows_of_jsonl_decide_the_columns_of_a_table(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": i, "text": "x"} for i in range(1023)]
    wide_row = {"text": "y", "more": 1}
    for suffix in ("csv", "parquet"):
        source = write_jsonl(tmp_path / "in.jsonl", [*rows, wide_row, wide_row])
        assert score(source, tmp_path / f"out.{suffix}").num_errors == 0
        source = write_jsonl(tmp_path / "in.jsonl", [*rows, rows[0], wide_row])
        with pytest.raises(InvalidInputError, match=r"line 1025 has a column 'more'.*--keep"):
            score(source, tmp_path / f"out.{suffix}")
    late_rows = [{"text": "y", "id": value} for value in ("a17", 2**63 - 1, 2**63)]
    source = write_jsonl(tmp_path / "ids.jsonl", [*rows, rows[0], *late_rows])
    assert score(source, tmp_path / "ids.parquet").num_errors == 2
    first, largest, last = read_rows(tmp_path / "ids.parquet")[-3:]
    assert (first["id"], largest["id"], last["id"]) == (None, 2**63 - 1, None)
    for row, line in ((first, 1025), (last, 1027)):
        message = f"line {line}: The column 'id' has a value that is not int64"
        assert row["error"].startswith(message)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
# TSV cannot store names with tabs or line breaks.
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


@pytest.mark.parametrize("suffix", jobs.SUFFIXES)
@settings(max_examples=40, deadline=None)
@given(rows=tables())
def test_rows_stay_the_same_if_written_and_read(suffix: str, rows: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write_jsonl(Path(folder) / "in.jsonl", rows)
        table, output = Path(folder) / f"rows{suffix}", Path(folder) / "out.jsonl"
        score(source, table, keep=[*rows[0]])
        score(table, output, keep=[*rows[0]])
        scored = read_rows(output)
    assert [{name: row[name] for name in rows[0]} for row in scored] == rows


ANSWER = {"answer": "a", "score": 0.5, "start": 0, "end": 1}
BEST = {"score": 0.5, "token_str": "a", "sequence": "a b"}
FILLED = {**BEST, "token": 3}


@pytest.mark.parametrize(
    ("task", "output", "columns"),
    [
        ("fill-mask", [FILLED], {**BEST, "predictions": [[FILLED]]}),
        ("fill-mask", [[FILLED], [FILLED]], {"predictions": [[FILLED], [FILLED]]}),
        ("question-answering", [ANSWER, {}], {**ANSWER, "answers": [ANSWER, {}]}),
        ("sentence-order", {"in_order": 0.5}, {"in_order": 0.5}),
        ("token-classification", [{"word": "a"}], {"entities": [{"word": "a"}]}),
        ("feature-extraction", [0.5, 1.0], {"embedding": [0.5, 1.0]}),
        ("feature-extraction", [[[0.5], [1.0]]], {"token_embeddings": [[0.5], [1.0]]}),
    ],
)
def test_answers_are_split_into_columns_of_their_task(task: str, output: Any, columns: Any) -> None:
    assert SCORED_TASKS[task].to_columns(output) == columns
    assert set(columns) <= set(SCORED_TASKS[task].columns)


def test_times_of_parquet_become_iso_8601_in_jsonl_and_csv(tmp_path: Path) -> None:
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
        first, second = read_rows(tmp_path / f"out{suffix}")
        assert [first[str(kind)] for kind, _, _ in times] == [text for *_, text in times]
        assert [second[str(kind)] for kind, _, _ in times] == [empty] * len(times)


def test_cells_of_a_csv_are_pairs_whose_second_text_may_be_empty_or_lists_in_json() -> None:
    rows = [{"Sentence1": "a", "sentence2": second} for second in ("c", "")]
    rows += [{"sentences": cell} for cell in ('["It rained.", "We stayed in."]', "It rained.")]
    batch = RowBatch(values=[*rows], is_text=True)
    classifier = RowReader("text-classification", ScoreOptions(), in_table=False)
    pairs: list[Any] = [classifier.request(batch, index).inputs for index in (0, 1)]
    assert [(pair.text, pair.text_pair) for pair in pairs] == [("a", "c"), ("a", None)]
    orderer = RowReader("sentence-order", ScoreOptions(), in_table=False)
    sentences: Any = orderer.request(batch, 2).inputs
    assert sentences.sentences == ["It rained.", "We stayed in."]
    with pytest.raises(InvalidInputError, match=r'is not a JSON list such as \["a", "b"\]: '):
        orderer.request(batch, 3)
