"""Jobs whose answers follow from the texts alone, without a model."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from albert_serve.api.schemas import TaskRequest
from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answers import OUTPUT, RowResult
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions, ScoreSummary

SUFFIXES = [".jsonl", ".csv", ".tsv", ".tsv.gz", ".jsonl.bz2", ".csv.xz", ".jsonl.zst", ".parquet"]


class HashScorer:
    """Classifies texts by their hashes; refuses those that are empty, and fails at "broken"."""

    task = "text-classification"
    heads: Sequence[str] = ("default",)

    def __init__(self, revision: str = "1") -> None:
        self.identity = {"revision": revision}
        self.texts: list[str] = []
        self.requests: list[Any] = []

    def text_length(self, parameters: Mapping[str, Any]) -> int:
        return 128

    def run(self, requests: Sequence[TaskRequest]) -> list[RowResult]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: TaskRequest) -> RowResult:
        text = text_of(request)
        if not text:
            return RowResult.of_error(InvalidInputError("the text is empty"))
        self.texts.append(text)
        self.requests.append(request)
        if text == "broken":
            return RowResult.of_error(InvalidInputError("it is broken"))
        return RowResult(values={OUTPUT: labels_of(text)}, num_tokens=len(text.split()))


def score(source: Path | list[Path | str], output: Path | str, **options: Any) -> ScoreSummary:
    """Score files by hashes."""
    inputs = source if isinstance(source, list) else [source]
    return score_files(HashScorer(), inputs, output, ScoreOptions(**options))


def text_of(request: TaskRequest) -> str:
    inputs: Any = request.inputs
    return inputs if isinstance(inputs, str) else inputs.text


def labels_of(text: str) -> list[dict[str, Any]]:
    score = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:6]) / (1 << 48)
    labels = [{"label": "good", "score": score}, {"label": "bad", "score": 1 - score}]
    return sorted(labels, key=lambda label: -float(str(label["score"])))


def write_csv(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_jsonl(file: Path, rows: Sequence[object]) -> Path:
    """Rows, of which texts are lines as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def write_dataset(folder: Path, table: Any) -> None:
    """Write what `save_to_disk` of `datasets` does, and a cache that it may leave beside it."""
    folder.mkdir(parents=True)
    for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text('{"_data_files": []}')


def read_table(file: Path) -> list[dict[str, Any]]:
    """The rows of CSV, TSV or Parquet."""
    if file.suffix == ".parquet":
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        return rows
    stream = io.StringIO(_content(file), newline="")
    return list(csv.DictReader(stream, delimiter="\t" if ".tsv" in file.suffixes else ","))


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _content(file).removesuffix("\n").split("\n") if line]


def read_any(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of any format and compression."""
    return read_jsonl(file) if ".jsonl" in file.suffixes else read_table(file)


def _content(file: Path) -> str:
    """The text of a file; pyarrow knows the other compressions by the name."""
    if file.suffix == ".xz":
        return lzma.decompress(file.read_bytes()).decode()
    with pyarrow.input_stream(str(file)) as stream:
        return str(stream.read(), "utf-8")


def texts(count: int) -> list[dict[str, Any]]:
    """Rows of which some cannot be answered."""
    return [
        {"id": number, "text": "" if number % 29 == 7 else f"text {number}"}
        for number in range(count)
    ]
