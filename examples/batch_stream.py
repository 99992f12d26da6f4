"""Classify a JSONL file of any length, a slice at a time, and write its rows with their labels.

`albert-serve score` does this for whole jobs: it resumes, keeps bad rows, and reads other formats.
"""

from __future__ import annotations

import json
import sys
from argparse import FileType
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from connection import connect, example_parser

FILE = Path(__file__).parent / "reviews.jsonl"
SLICE = 256


def slices(lines: Iterator[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file, some at a time."""
    while rows := [json.loads(line) for line in islice(lines, SLICE)]:
        yield rows


def main() -> None:
    """Write a row with its best label for each row."""
    parser = example_parser(str(__doc__))
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help='rows with a "text"')
    parser.add_argument("--output", type=FileType("w", encoding="utf-8"), default=sys.stdout)
    options = parser.parse_args()
    with options.file.open(encoding="utf-8") as lines, connect(options) as albert:
        for rows in slices(lines):
            texts = [row["text"] for row in rows]
            answers = albert.text_classification(texts, top_k=1, truncation=True)
            for row, [best] in zip(rows, answers, strict=True):
                print(json.dumps({**row, **best.model_dump()}), file=options.output)


if __name__ == "__main__":
    main()
