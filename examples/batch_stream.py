"""Classify a JSONL file of any length as a stream, and print its rows with their labels.

A rejected row gets its error. For files, use `albert-serve score`: it resumes, and it reads and
writes other formats.
"""

from __future__ import annotations

import json
from itertools import tee
from pathlib import Path
from typing import Any

from connection import connect, example_parser

from albert_serve.api.schemas import LabelScore
from albert_serve.errors import RequestError

FILE = Path(__file__).parent / "reviews.jsonl"


def columns(answer: list[LabelScore] | RequestError) -> dict[str, Any]:
    """Return the new columns of a row: its best label, or its error."""
    if isinstance(answer, RequestError):
        return {"error": str(answer), "error_type": answer.error_type}
    return answer[0].model_dump()


def main() -> None:
    """Print each row with its label, in order, as soon as it is there."""
    parser = example_parser(str(__doc__))
    parser.add_argument(
        "file", nargs="?", type=Path, default=FILE, help='file of rows with a "text"'
    )
    parser.add_argument("--truncate", action="store_true", help="truncate texts that are too long")
    options = parser.parse_args()
    with options.file.open(encoding="utf-8") as lines, connect(options) as albert:
        rows, sent = tee(map(json.loads, lines))
        texts = (row["text"] for row in sent)
        answers = albert.stream("text-classification", texts, truncation=options.truncate)
        for row, answer in zip(rows, answers.with_errors(), strict=True):
            print(json.dumps({**row, **columns(answer)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
