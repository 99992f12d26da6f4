"""Say how well the sentences of a text follow each other, and find their best order."""

from __future__ import annotations

from connection import connect, example_parser

# Passages, since of single sentences the default model hardly knows the order.
SENTENCES = [
    (
        "After the war he moved to Berlin, where he taught at the university until 1965. "
        "He died there in 1970."
    ),
    "Karl Berg was a German physicist. He was born in Vienna in 1901, the son of a teacher.",
    (
        "He studied physics in Vienna and Munich. In 1926 he received his doctorate for a work on "
        "the light of stars."
    ),
]


def main() -> None:
    """Print the probability of each neighbouring pair, and the best order."""
    parser = example_parser(str(__doc__))
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="two or more, in order")
    options = parser.parse_args()
    sentences = options.sentences
    with connect(options) as albert:
        coherence = albert.coherence(sentences)
        for pair in coherence.pairs:
            print(f"{pair.in_order:.4f}  {sentences[pair.first]} {sentences[pair.second]}")
        print(f"coherence {coherence.coherence:.4f}")

        best = albert.reorder(sentences)
        print(f"at best {best.best_coherence:.4f}:")
        print(" ".join(sentences[place] for place in best.best_order))


if __name__ == "__main__":
    main()
