"""Scoring jobs without a model: their answers are hashes of the texts."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from albert_serve.api.schemas import TaskRequest
from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answering import Scorer
from albert_serve.scoring.answers import OUTPUT, RowResult
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions, ScoreSummary

SUFFIXES = [".jsonl", ".csv", ".tsv", ".tsv.gz", ".jsonl.bz2", ".csv.xz", ".jsonl.zst", ".parquet"]


class HashScorer:
    """A classifier by hashes of texts. An empty text and the text "broken" are errors."""

    task = "text-classification"
    heads: Sequence[str] = ("default",)

    def __init__(self, revision: str = "1") -> None:
        self.identity = {"revision": revision}
        self.texts: list[str] = []

    def text_length(self, parameters: Mapping[str, Any]) -> int:
        return 128

    def run(self, requests: Sequence[TaskRequest]) -> list[RowResult]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: TaskRequest) -> RowResult:
        inputs: Any = request.inputs
        text = inputs if isinstance(inputs, str) else inputs.text
        if not text:
            return RowResult.of_error(InvalidInputError("the text is empty"))
        self.texts.append(text)
        if text == "broken":
            return RowResult.of_error(InvalidInputError("it is broken"))
        return RowResult(values={OUTPUT: labels_of(text)}, num_tokens=len(text.split()))


def score(
    source: Path | Sequence[Path | str],
    output: Path | str,
    scorer: Scorer | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    **options: Any,
) -> ScoreSummary:
    """Score files, by default with a `HashScorer`."""
    inputs = [source] if isinstance(source, Path) else source
    job = scorer or HashScorer(), inputs, output, ScoreOptions(**options)
    return score_files(*job, is_stopped=is_stopped)


def labels_of(text: str) -> list[dict[str, Any]]:
    """Return the answer of a `HashScorer` to a text."""
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
    """Write rows as JSON. A row that is a string becomes a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def write_dataset(folder: Path, table: Any) -> None:
    """Write the files of `save_to_disk` of `datasets`, and a cache file that it may leave."""
    folder.mkdir(parents=True)
    for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text('{"_data_files": []}')


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file of any format and compression."""
    if file.suffix == ".parquet":
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        return rows
    if file.suffix == ".xz":  # pyarrow detects the other compressions from the name
        content = lzma.decompress(file.read_bytes()).decode()
    else:
        with pyarrow.input_stream(str(file)) as stream:
            content = str(stream.read(), "utf-8")
    if ".jsonl" in file.suffixes:
        return [json.loads(line) for line in content.removesuffix("\n").split("\n") if line]
    delimiter = "\t" if ".tsv" in file.suffixes else ","
    return list(csv.DictReader(io.StringIO(content, newline=""), delimiter=delimiter))


def texts(count: int) -> list[dict[str, Any]]:
    """Return rows, of which some have empty texts."""
    return [{"id": i, "text": "" if i % 29 == 7 else f"text {i}"} for i in range(count)]
