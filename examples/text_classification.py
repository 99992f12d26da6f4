"""Classify texts."""

from __future__ import annotations

from connection import connect, example_parser

TEXTS = ["A warm and funny film.", "It drags on for two dull hours."]


def main() -> None:
    """Print the best label of each text."""
    parser = example_parser(str(__doc__))
    parser.add_argument("texts", nargs="*", default=TEXTS)
    options = parser.parse_args()
    with connect(options) as albert:
        answers = albert.text_classification(options.texts)
        for text, (best, *_) in zip(options.texts, answers, strict=True):
            print(f"{best.label} {best.score:.4f}  {text}")


if __name__ == "__main__":
    main()
