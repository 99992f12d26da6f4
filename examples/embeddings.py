"""Search texts by meaning: those whose embeddings are the nearest to a query's."""

from __future__ import annotations

import json
from operator import mul
from pathlib import Path

from connection import connect, example_parser

FILE = Path(__file__).parent / "reviews.jsonl"


def main() -> None:
    """Print the nearest texts with their cosine similarities."""
    parser = example_parser(str(__doc__))
    parser.add_argument("query", nargs="?", default="a comedy that made me laugh")
    parser.add_argument("--file", type=Path, default=FILE, help='JSONL with a field "text"')
    parser.add_argument(
        "--top-k", type=int, default=3, help="number of texts to show (default: %(default)s)"
    )
    options = parser.parse_args()
    lines = options.file.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    with connect(options) as albert:
        query, *vectors = albert.feature_extraction(
            [options.query, *texts], normalize=True, truncation=True
        )
    # The cosine of vectors of length 1.
    similarities = [sum(map(mul, query, vector)) for vector in vectors]
    ranked = sorted(zip(similarities, texts, strict=True), reverse=True)
    for similarity, text in ranked[: options.top_k]:
        print(f"{similarity:.4f}  {text[:100]}")


if __name__ == "__main__":
    main()
