"""All tasks from Python, against a service on port 3000 (`make serve`)."""

from __future__ import annotations

import sys

from albert_serve.client import AlbertClient


def main(url: str) -> None:
    """Ask the service at `url` one question a task, and print what it answers."""
    with AlbertClient(url) as albert:
        for filled in albert.fill_mask("He was born in the United [MASK].", top_k=3):
            print("fill-mask", filled)
        print("text-classification", albert.text_classification("A warm and funny film."))
        question = {
            "question": "When was the bridge built?",
            "context": "The bridge over the river was built in 1932.",
        }
        print("question-answering", albert.question_answering(question))
        pair = {
            "text": "She was born in Vienna in 1901.",
            "text_pair": "In 1923 she moved to Paris to study painting.",
        }
        print("sentence-order", albert.sentence_order(pair))
        embedding = albert.feature_extraction("It rained, so we stayed in.", normalize=True)
        print("feature-extraction", embedding[:3], "and", len(embedding) - 3, "more numbers")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:3000")
