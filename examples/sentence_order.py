"""Say how well the sentences of a text follow each other."""

from __future__ import annotations

from connection import connect, example_parser

# Passages, because the default model cannot order single sentences.
SENTENCES = [
    "Since 1990 the church has been a museum. It is visited by about 20,000 people every year.",
    (
        "Saint Mary is a church in the village of Holm. It was built in the 12th century, and it "
        "is the oldest building of the village."
    ),
    "In 1712 the tower was destroyed by a storm. It was rebuilt three years later.",
]


def main() -> None:
    """Print the probability of each neighbouring pair, and the coherence."""
    parser = example_parser(str(__doc__))
    parser.add_argument(
        "sentences", nargs="*", default=SENTENCES, help="two or more sentences, in order"
    )
    options = parser.parse_args()
    sentences = options.sentences
    with connect(options) as albert:
        coherence = albert.coherence(sentences)
        for pair in coherence.pairs:
            print(f"{pair.in_order:.4f}  {sentences[pair.first]} {sentences[pair.second]}")
        print(f"coherence {coherence.coherence:.4f}")


if __name__ == "__main__":
    main()
