"""Jobs: columns, formats, errors, and parts that a later run goes on from."""

from __future__ import annotations

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
from albert_serve.scoring.errors import (
    ChangedJobError,
    OutputError,
    StoppedError,
    TooManyErrorsError,
)
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
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
    write_jsonl,
)

pytestmark = pytest.mark.process


class Stopping:
    """Asks a job to stop after so many parts."""

    def __init__(self, num_parts: int) -> None:
        self.num_left = num_parts

    def __call__(self) -> bool:
        self.num_left -= 1
        return self.num_left <= 0


def stop(source: Path, output: Path | str, num_parts: int, **options: Any) -> None:
    with pytest.raises(StoppedError, match="Repeat the command to resume"):
        score_files(
            HashScorer(), [source], output, ScoreOptions(**options), is_stopped=Stopping(num_parts)
        )


def test_a_csv_has_the_columns_of_the_answer_beside_its_own(tmp_path: Path) -> None:
    rows = [{"id": "1", "review": 'a "fine", long\nfilm', "parameters": "5"}]
    rows.append({"id": "2", "review": "", "parameters": ""})
    source = write_csv(tmp_path / "in.csv", rows)
    score(source, tmp_path / "out.csv", columns={"text": "review"}, parameters={"top_k": None})
    fine, empty = read_table(tmp_path / "out.csv")
    labels = labels_of(rows[0]["review"])
    assert list(fine)[:6] == ["id", "review", "parameters", "label", "score", "labels"]
    assert {name: fine[name] for name in rows[0]} == rows[0]
    assert (fine["label"], float(fine["score"])) == (labels[0]["label"], labels[0]["score"])
    assert json.loads(fine["labels"]) == labels
    assert (fine["error"], empty["label"]) == ("", "")
    assert (empty["error"], empty["error_type"]) == ("the text is empty", "invalid_input")


def test_answers_in_parquet_are_typed(tmp_path: Path) -> None:
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
    for name in table.column_names:
        assert written.schema.field(name).type == table.schema.field(name).type
    assert written.column("when").cast(pyarrow.int64()).to_pylist() == [1, 2]
    for name in ("text", "kind", "tags"):
        assert written.column(name).to_pylist() == table.column(name).to_pylist()
    assert written.schema.field("score").type == pyarrow.float64()
    assert written.column("labels").to_pylist() == [labels_of("one"), labels_of("two")]
    assert written.schema.field("error").type == pyarrow.string()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_stopped_job_goes_on_and_has_each_row_once_in_order(suffix: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts(100))
    whole, output = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    expected = score(source, whole, part_rows=9)
    for _ in range(3):
        stop(source, output, 3, part_rows=9)
    assert not output.exists()
    summary = score(source, output, part_rows=9)
    assert read_any(output) == read_any(whole)
    assert (summary.num_rows, summary.num_resumed_rows, summary.num_parts) == (100, 81, 12)
    for name in ("num_errors", "num_tokens", "errors_by_type", "first_error", "num_parts"):
        assert getattr(summary, name) == getattr(expected, name)
    assert summary.rows_per_s == 19 / summary.duration_s
    assert summary.tokens_per_s == 36 / summary.duration_s  # two of each row that has no error
    if suffix == ".parquet":
        assert parquet.ParquetFile(output).num_row_groups == 1
    assert {file.name for file in tmp_path.iterdir()} == {"in.jsonl", whole.name, output.name}


def test_a_job_of_several_files_goes_on_in_the_file_that_it_was_at(tmp_path: Path) -> None:
    rows, first = texts(60), tmp_path / "0.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows[:25]), first)
    second = write_csv(tmp_path / "1.csv", rows[25:40])
    third = write_jsonl(tmp_path / "2.jsonl", rows[40:])
    sources: list[Path | str] = [first, second, third]
    output, options = tmp_path / "out.jsonl", ScoreOptions(part_rows=10)
    for _ in range(3):
        with pytest.raises(StoppedError):
            score_files(HashScorer(), sources, output, options, is_stopped=Stopping(2))
    scorer = HashScorer()
    # A part has rows of one file.
    assert score_files(scorer, sources, output, options).num_resumed_rows == 20 + 15 + 15
    assert len(scorer.texts) == 10  # and nothing is computed again
    assert [int(row["id"]) for row in read_jsonl(output)] == list(range(60))


def test_what_a_killed_job_left_of_a_part_is_written_again(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts(100))
    score(source, tmp_path / "whole.csv", part_rows=10)
    damages: tuple[Callable[[Path], object], ...] = (
        lambda folder: (folder / "_parts.jsonl").write_bytes(b'{"num_ro'),
        lambda folder: (folder / "part-000003.csv").write_bytes(b"half a pa"),
    )
    for damage in damages:
        stop(source, tmp_path / "out.csv", 3, part_rows=10)
        damage(tmp_path / "out.csv.parts")
        stop(source, tmp_path / "out.csv", 2, part_rows=10)
        score(source, tmp_path / "out.csv", part_rows=10)
        assert read_any(tmp_path / "out.csv") == read_any(tmp_path / "whole.csv")


def test_a_folder_holds_the_parts(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "in.csv", texts(25))
    options: dict[str, Any] = {"part_rows": 10, "output_format": "parquet"}
    stop(source, f"{tmp_path}/out/", 1, **options)
    assert not (tmp_path / "out/_SUCCESS").exists()
    summary = score(source, f"{tmp_path}/out/", **options)
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    parts = [f"part-{number:06}.parquet" for number in range(3)]
    assert names == ["_SUCCESS", "_manifest.json", "_parts.jsonl", *parts]
    read = dataset.dataset(tmp_path / "out").to_table()
    assert [int(number) for number in read.column("id").to_pylist()] == list(range(25))
    assert summary.num_parts == 3
    again = score(source, f"{tmp_path}/out/", **options)
    assert again.num_resumed_rows == 25


@pytest.mark.parametrize(
    ("change", "revision", "what"),
    [
        ({"parameters": {"top_k": 1}}, "1", "parameters"),
        ({"keep": ["id"], "columns": {"text": "id"}}, "1", "columns and keep"),
        ({}, "2", "The model"),
    ],
)
def test_a_changed_job_is_refused_unless_it_is_restarted(
    change: dict[str, Any], revision: str, what: str, tmp_path: Path
) -> None:
    source, output = write_jsonl(tmp_path / "in.jsonl", texts(40)), tmp_path / "out.csv"
    stop(source, output, 2, part_rows=10)
    scorer, options = HashScorer(revision), {"part_rows": 10, **change}
    with pytest.raises(ChangedJobError, match=f"^{what} changed since the parts in .* --restart"):
        score_files(scorer, [source], output, ScoreOptions(**options))
    assert len(list((tmp_path / "out.csv.parts").glob("part-*"))) == 2
    summary = score_files(scorer, [source], output, ScoreOptions(restart=True, **options))
    assert (summary.num_rows, summary.num_resumed_rows) == (40, 0)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("_parts.jsonl", lambda file: file.write_text("{}\n")),
        ("part-000000.csv", Path.unlink),
        ("part-000001.csv", lambda file: os.truncate(file, 40)),
        ("part-000001.csv", lambda file: file.write_text(file.read_text().replace("t 1", "t 2"))),
        ("_manifest.json", lambda file: file.write_text(file.read_text().replace(": 5,", ": 4,"))),
    ],
)
def test_damaged_parts_are_refused(
    file: str, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    source, output = write_jsonl(tmp_path / "in.jsonl", texts(40)), tmp_path / "out.csv"
    stop(source, output, 2, part_rows=10)
    damage(tmp_path / "out.csv.parts" / file)
    message = r"(was damaged: .*|has another version\. )Use --restart"
    with pytest.raises(ChangedJobError, match=message):
        score(source, output, part_rows=10)
    assert score(source, output, part_rows=10, restart=True).num_resumed_rows == 0


def test_an_input_that_changes_during_the_job_ends_it(tmp_path: Path) -> None:
    source, output = write_csv(tmp_path / "in.csv", texts(40)), tmp_path / "out.csv"

    def changing() -> bool:
        with source.open("ab") as stream:
            stream.write(b"50,more\n")
        return False

    options = ScoreOptions(part_rows=10)
    with pytest.raises(ChangedJobError, match=r"in\.csv changed while it was read"):
        score_files(HashScorer(), [source], output, options, is_stopped=changing)
    assert not output.exists()
    with pytest.raises(ChangedJobError, match="The input changed since the parts in"):
        score(source, output, part_rows=10)
    write_csv(source, texts(41))
    assert score(source, output, part_rows=10, restart=True).num_rows == 41


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts(4))
    precious = tmp_path / "out.csv.parts/precious"
    precious.parent.mkdir()
    precious.write_text("precious")
    with pytest.raises(InvalidInputError, match="is not the folder of a job's parts"):
        score(source, tmp_path / "out.csv")
    assert precious.read_text() == "precious"


def test_errors_end_the_job_where_they_may_not_be(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("a", "", "b", "broken", "")]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(TooManyErrorsError, match=r"1 of 2 rows failed\. The first error: the"):
        score(source, output, errors="fail", part_rows=2)
    with pytest.raises(TooManyErrorsError, match="2 of 4 rows failed, but only 1 may fail"):
        score(source, output, max_errors=1, part_rows=2)
    assert not output.exists()
    summary = score(source, output, max_errors=3, part_rows=2)
    assert summary.num_resumed_rows == 2
    assert summary.errors_by_type == {"invalid_input": 3}
    assert summary.first_error == "the text is empty"


def test_an_empty_table_has_its_columns(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("id,text\n")
    for suffix in (".csv", ".parquet", ".jsonl"):
        score(source, tmp_path / f"out{suffix}")
    assert parquet.read_schema(tmp_path / "out.parquet").names[:3] == ["id", "text", "label"]
    assert (tmp_path / "out.csv").read_text().startswith("id,text,label")
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_part_has_up_to_4_mib(tmp_path: Path) -> None:
    rows = [{"text": "a" * ((1 << 20) - 1)}, *[{"text": "a" * (1 << 20)}] * 9]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    score(source, f"{tmp_path}/parts/", keep=[], output_format="jsonl")
    log = (tmp_path / "parts/_parts.jsonl").read_text().splitlines()
    assert [json.loads(line)["num_rows"] for line in log] == [5, 4, 1]


@pytest.mark.parametrize("suffix", [".csv.gz", ".parquet"])
def test_a_full_disk_ends_the_job_and_loses_nothing(suffix: str, tmp_path: Path) -> None:
    rows = [{"text": f"{i} " * 40} for i in range(300)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    whole, output = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    options = {"part_rows": 20}
    score(source, whole, **options)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = whole.stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot be written: (File too large|disk)"):
            score(source, output, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not output.exists()
    assert score(source, output, **options).num_resumed_rows > 0
    assert read_any(output) == read_any(whole)


def test_a_value_that_parquet_cannot_hold_is_the_error_of_its_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "a", "n": 2**63 - 1}, {"text": "b", "n": 2**63}]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    assert score(source, output).num_errors == 1
    right, wrong = read_table(output)
    assert (right["n"], wrong["n"]) == (2**63 - 1, None)
    assert "line 2: The column 'n' has a value that is not int64" in wrong["error"]


def test_pipes_are_read_and_written_to(tmp_path: Path) -> None:
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    arrived: list[str] = []
    for file in (source, pipe):
        os.mkfifo(file)
    others = [
        threading.Thread(target=write_jsonl, args=(source, texts(30)), daemon=True),
        threading.Thread(target=lambda: arrived.append(pipe.read_text()), daemon=True),
    ]
    for thread in others:
        thread.start()
    summary = score(source, pipe, part_rows=10)
    for thread in others:
        thread.join(timeout=10)
    rows = [json.loads(line) for line in arrived[0].splitlines()]
    assert [row["id"] for row in rows] == list(range(30))
    assert summary.num_parts == 3
