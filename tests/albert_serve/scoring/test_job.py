"""Jobs: columns, formats, errors, and the parts that a later run reuses."""

from __future__ import annotations

import itertools
import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import dataset, parquet

from albert_serve.errors import InvalidInputError
from albert_serve.scoring import errors
from tests.albert_serve.scoring import jobs
from tests.albert_serve.scoring.jobs import HashScorer, read_rows, score, texts, write_jsonl

pytestmark = pytest.mark.process


def stop_after(num_parts: int, source: Any, output: Path | str, **options: Any) -> None:
    """Start a job and stop it after this many new parts."""
    calls = itertools.count(1)
    with pytest.raises(errors.StoppedError, match="Repeat the command to resume"):
        score(source, output, is_stopped=lambda: next(calls) >= num_parts, **options)


def test_a_csv_has_the_columns_of_the_answer_after_its_own_columns(tmp_path: Path) -> None:
    rows = [{"id": "1", "review": 'a "fine", long\nfilm', "parameters": "5"}]
    rows.append({"id": "2", "review": "", "parameters": ""})
    source = jobs.write_csv(tmp_path / "in.csv", rows)
    score(source, tmp_path / "out.csv", columns={"text": "review"}, parameters={"top_k": None})
    answered, failed = read_rows(tmp_path / "out.csv")
    labels = jobs.labels_of(rows[0]["review"])
    assert list(answered)[:6] == ["id", "review", "parameters", "label", "score", "labels"]
    assert {name: answered[name] for name in rows[0]} == rows[0]
    assert answered["label"] == labels[0]["label"]
    assert float(answered["score"]) == labels[0]["score"]
    assert json.loads(answered["labels"]) == labels
    assert (answered["error"], failed["label"]) == ("", "")
    assert (failed["error"], failed["error_type"]) == ("the text is empty", "invalid_input")


def test_parquet_keeps_the_types_of_its_columns_and_has_typed_answers(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "text": ["one", "two"],
            "when": pyarrow.array([1, 2], pyarrow.timestamp("ns")),
            "kind": pyarrow.array(["x", "y"]).dictionary_encode(),
            "tags": [["a"], None],
        }
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    options: dict[str, Any] = {"part_rows": 1, "parameters": {"top_k": None}}
    score(tmp_path / "in.parquet", tmp_path / "out.parquet", **options)
    written = parquet.read_table(tmp_path / "out.parquet")
    assert written.schema.types[: table.num_columns] == table.schema.types
    assert written.select(table.column_names).to_pylist() == table.to_pylist()
    assert written.schema.field("score").type == pyarrow.float64()
    assert written.column("labels").to_pylist() == [jobs.labels_of("one"), jobs.labels_of("two")]
    assert written.schema.field("error").type == pyarrow.string()


@pytest.mark.parametrize("suffix", jobs.SUFFIXES)
def test_a_stopped_job_resumes_and_writes_rows_once_in_order(suffix: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts(100))
    uninterrupted, output = tmp_path / f"uninterrupted{suffix}", tmp_path / f"out{suffix}"
    expected = score(source, uninterrupted, part_rows=9)
    for _ in range(3):
        stop_after(3, source, output, part_rows=9)
    assert not output.exists()
    summary = score(source, output, part_rows=9)
    assert read_rows(output) == read_rows(uninterrupted)
    assert (summary.num_rows, summary.num_resumed_rows, summary.num_parts) == (100, 81, 12)
    for name in ("num_errors", "num_tokens", "errors_by_type", "first_error", "num_parts"):
        assert getattr(summary, name) == getattr(expected, name)
    assert summary.rows_per_s == 19 / summary.duration_s
    assert summary.tokens_per_s == 36 / summary.duration_s  # 18 rows without error have 2 each
    if suffix == ".parquet":
        assert parquet.ParquetFile(output).num_row_groups == 1
    assert {*tmp_path.iterdir()} == {source, uninterrupted, output}


def test_a_job_of_several_files_resumes_in_the_file_where_it_stopped(tmp_path: Path) -> None:
    rows, first = texts(60), tmp_path / "0.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows[:25]), first)
    second = jobs.write_csv(tmp_path / "1.csv", rows[25:40])
    sources = [first, second, write_jsonl(tmp_path / "2.jsonl", rows[40:])]
    output, scorer = tmp_path / "out.jsonl", HashScorer()
    for _ in range(3):
        stop_after(2, sources, output, part_rows=10)
    summary = score(sources, output, scorer, part_rows=10)
    assert summary.num_resumed_rows == 20 + 15 + 15  # a part has rows of one file
    assert len(scorer.texts) == 10  # no row is computed again
    assert [int(row["id"]) for row in read_rows(output)] == list(range(60))


@pytest.mark.parametrize(
    ("file", "content"), [("_parts.jsonl", b'{"num_ro'), ("part-000003.csv", b"half a pa")]
)
def test_an_incomplete_part_is_written_again(file: str, content: bytes, tmp_path: Path) -> None:
    source, output = write_jsonl(tmp_path / "in.jsonl", texts(100)), tmp_path / "out.csv"
    score(source, tmp_path / "uninterrupted.csv", part_rows=10)
    stop_after(3, source, output, part_rows=10)
    (tmp_path / "out.csv.parts" / file).write_bytes(content)
    stop_after(2, source, output, part_rows=10)
    score(source, output, part_rows=10)
    assert read_rows(output) == read_rows(tmp_path / "uninterrupted.csv")


def test_an_output_folder_has_the_parts_and_a_marker_of_success(tmp_path: Path) -> None:
    source = jobs.write_csv(tmp_path / "in.csv", texts(25))
    options: dict[str, Any] = {"part_rows": 10, "output_format": "parquet"}
    stop_after(1, source, f"{tmp_path}/out/", **options)
    assert not (tmp_path / "out/_SUCCESS").exists()
    assert score(source, f"{tmp_path}/out/", **options).num_parts == 3
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    parts = [f"part-{number:06}.parquet" for number in range(3)]
    assert names == ["_SUCCESS", "_manifest.json", "_parts.jsonl", *parts]
    ids = dataset.dataset(tmp_path / "out").to_table().column("id").to_pylist()
    assert [int(number) for number in ids] == list(range(25))
    assert score(source, f"{tmp_path}/out/", **options).num_resumed_rows == 25


@pytest.mark.parametrize(
    ("change", "revision", "subject"),
    [
        ({"parameters": {"top_k": 1}}, "1", "parameters"),
        ({"keep": ["id"], "columns": {"text": "id"}}, "1", "columns and keep"),
        ({}, "2", "The model"),
    ],
)
def test_a_changed_job_is_an_error_unless_it_is_restarted(
    change: dict[str, Any], revision: str, subject: str, tmp_path: Path
) -> None:
    source, output = write_jsonl(tmp_path / "in.jsonl", texts(40)), tmp_path / "out.csv"
    stop_after(2, source, output, part_rows=10)
    job = source, output, HashScorer(revision)
    message = f"^{subject} changed since the parts in .* --restart"
    with pytest.raises(errors.ChangedJobError, match=message):
        score(*job, part_rows=10, **change)
    assert len(list(output.with_name("out.csv.parts").glob("part-*"))) == 2
    summary = score(*job, part_rows=10, restart=True, **change)
    assert (summary.num_rows, summary.num_resumed_rows) == (40, 0)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("_parts.jsonl", lambda file: file.write_text(file.read_text().replace("rows", "row"))),
        ("part-000000.csv", Path.unlink),
        ("part-000001.csv", lambda file: os.truncate(file, 40)),
        ("part-000001.csv", lambda file: file.write_text(file.read_text().replace("t 1", "t 2"))),
        ("_manifest.json", lambda file: file.write_text(file.read_text().replace(": 5,", ": 4,"))),
    ],
)
def test_damaged_parts_are_an_error_until_the_job_is_restarted(
    file: str, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    source, output = write_jsonl(tmp_path / "in.jsonl", texts(40)), tmp_path / "out.csv"
    stop_after(2, source, output, part_rows=10)
    damage(tmp_path / "out.csv.parts" / file)
    message = (
        r"(_parts\.jsonl was damaged: line 1 .*|\.csv was damaged: it.*|has another version\. )"
        "Use --restart"
    )
    with pytest.raises(errors.ChangedJobError, match=message):
        score(source, output, part_rows=10)
    assert score(source, output, part_rows=10, restart=True).num_resumed_rows == 0


def test_an_input_that_changes_during_the_job_is_an_error(tmp_path: Path) -> None:
    source, output = jobs.write_csv(tmp_path / "in.csv", texts(40)), tmp_path / "out.csv"

    def append_row() -> bool:
        with source.open("ab") as stream:
            stream.write(b"50,more\n")
        return False

    with pytest.raises(errors.ChangedJobError, match=r"in\.csv changed while it was read"):
        score(source, output, is_stopped=append_row, part_rows=10)
    assert not output.exists()
    with pytest.raises(errors.ChangedJobError, match="The input changed since the parts in"):
        score(source, output, part_rows=10)
    jobs.write_csv(source, texts(41))
    assert score(source, output, part_rows=10, restart=True).num_rows == 41


def test_a_folder_that_no_job_wrote_is_not_changed(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts(4))
    other_file = tmp_path / "out.csv.parts/other"
    other_file.parent.mkdir()
    other_file.write_text("other")
    with pytest.raises(InvalidInputError, match="is not the folder of a job's parts"):
        score(source, tmp_path / "out.csv")
    assert other_file.read_text() == "other"


def test_more_errors_than_allowed_end_the_job(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("a", "", "b", "broken", "")]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(
        errors.TooManyErrorsError, match=r"1 of 2 rows failed\. The first error: the"
    ):
        score(source, output, errors="fail", part_rows=2)
    with pytest.raises(errors.TooManyErrorsError, match="2 of 4 rows failed, but only 1 may fail"):
        score(source, output, max_errors=1, part_rows=2)
    assert not output.exists()
    summary = score(source, output, max_errors=3, part_rows=2)
    assert summary.num_resumed_rows == 2
    assert summary.errors_by_type == {"invalid_input": 3}
    assert summary.first_error == "the text is empty"


def test_the_output_of_an_empty_table_has_all_columns(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("id,text\n")
    for suffix in (".csv", ".parquet", ".jsonl"):
        score(source, tmp_path / f"out{suffix}")
    assert parquet.read_schema(tmp_path / "out.parquet").names[:3] == ["id", "text", "label"]
    assert (tmp_path / "out.csv").read_text().startswith("id,text,label")
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_part_ends_as_soon_as_it_has_4_mib(tmp_path: Path) -> None:
    rows = [{"text": "a" * ((1 << 20) - 1)}, *[{"text": "a" * (1 << 20)}] * 9]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    score(source, f"{tmp_path}/parts/", keep=[], output_format="jsonl")
    log = (tmp_path / "parts/_parts.jsonl").read_text().splitlines()
    assert [json.loads(line)["num_rows"] for line in log] == [5, 4, 1]


@pytest.mark.parametrize("suffix", [".csv.gz", ".parquet"])
def test_a_full_disk_ends_the_job_and_loses_nothing(suffix: str, tmp_path: Path) -> None:
    rows = [{"text": f"{i} " * 40} for i in range(300)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    uninterrupted, output = tmp_path / f"uninterrupted{suffix}", tmp_path / f"out{suffix}"
    score(source, uninterrupted, part_rows=20)
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = uninterrupted.stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old_limits[1]))
    try:
        with pytest.raises(errors.OutputError, match=r"cannot be written: (File too large|disk)"):
            score(source, output, part_rows=20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
    assert not output.exists()
    assert score(source, output, part_rows=20).num_resumed_rows > 0
    assert read_rows(output) == read_rows(uninterrupted)


def test_input_and_output_can_be_pipes(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "pipe"
    for pipe in (source, output):
        os.mkfifo(pipe)
    contents: list[str] = []
    writer = threading.Thread(target=write_jsonl, args=(source, texts(30)), daemon=True)
    reader = threading.Thread(target=lambda: contents.append(output.read_text()), daemon=True)
    writer.start()
    reader.start()
    assert score(source, output, part_rows=10).num_parts == 3
    reader.join(timeout=10)
    rows = [json.loads(line) for line in contents[0].splitlines()]
    assert [row["id"] for row in rows] == list(range(30))


def test_rows_on_standard_output_follow_the_content_of_its_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.write(1, b"first line\n")
    score(write_jsonl(tmp_path / "in.jsonl", texts(1)), "-")
    assert capfd.readouterr().out.startswith('first line\n{"id": 0')
