"""Values of Arrow in JSONL and CSV: nanoseconds are written by the column's type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from albert_serve.scoring.arrow_values import plain_values
from albert_serve.scoring.job import score_files
from tests.albert_serve.scoring.jobs import HashScorer, read_jsonl, read_table

TIMES = pyarrow.timestamp("ns")
TIME_TEXTS = ["1970-01-01T00:00:00.000001000", "1970-01-01T00:00:00.000001001"]


def values_of(array: Any) -> list[Any]:
    batch = pyarrow.RecordBatch.from_arrays([array], names=["a"])
    return [plain_values(batch, index)["a"] for index in range(len(array))]


@pytest.mark.parametrize(
    ("kind", "values", "texts"),
    [
        (TIMES, [1000, 1001], TIME_TEXTS),
        (TIMES, [-1, None], ["1969-12-31T23:59:59.999999999", None]),
        (pyarrow.timestamp("ns", "UTC"), [1], ["1970-01-01T00:00:00.000000001Z"]),
        (
            pyarrow.timestamp("ns", "Europe/Berlin"),
            [1],
            ["1970-01-01T01:00:00.000000001+01:00"],
        ),
        (
            pyarrow.duration("ns"),
            [1000, 1001, -1, 90_000 * 10**9],
            ["PT0.000001000S", "PT0.000001001S", "-PT0.000000001S", "PT90000.000000000S"],
        ),
        (
            pyarrow.time64("ns"),
            [0, 86_399 * 10**9 + 1],
            ["00:00:00.000000000", "23:59:59.000000001"],
        ),
    ],
)
def test_nanoseconds_have_one_form_in_all_rows(
    kind: Any, values: list[int | None], texts: list[str | None]
) -> None:
    assert values_of(pyarrow.array(values, kind)) == texts


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pyarrow.list_(TIMES), [1000, None, 1001], [TIME_TEXTS[0], None, TIME_TEXTS[1]]),
        (
            pyarrow.struct({"when": TIMES, "what": pyarrow.string()}),
            {"when": 1000, "what": "x"},
            {"when": TIME_TEXTS[0], "what": "x"},
        ),
        (
            pyarrow.list_(pyarrow.struct({"when": TIMES})),
            [{"when": 1001}, None],
            [{"when": TIME_TEXTS[1]}, None],
        ),
        (pyarrow.map_(pyarrow.string(), TIMES), [("x", 1001)], [["x", TIME_TEXTS[1]]]),
        (pyarrow.dictionary(pyarrow.int8(), TIMES), 1001, TIME_TEXTS[1]),
    ],
)
def test_nanoseconds_in_lists_and_structures(kind: Any, value: Any, expected: Any) -> None:
    if pyarrow.types.is_dictionary(kind):
        array = pyarrow.array([value], kind.value_type).dictionary_encode()
    else:
        array = pyarrow.array([value], kind)
    assert values_of(array) == [expected]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_files_have_the_nanoseconds_of_all_rows(suffix: str, tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", "two"], "when": pyarrow.array([1000, 1001], TIMES)})
    parquet.write_table(table, tmp_path / "in.parquet")
    output = tmp_path / f"out{suffix}"
    score_files(HashScorer(), [tmp_path / "in.parquet"], output)
    rows = read_jsonl(output) if suffix == ".jsonl" else read_table(output)
    assert [row["when"] for row in rows] == TIME_TEXTS
