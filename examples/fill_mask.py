"""Fill the masks of a text."""

from __future__ import annotations

from connection import connect, example_parser


def main() -> None:
    """Print the likeliest fillings."""
    parser = example_parser(str(__doc__))
    parser.add_argument("text", nargs="?", default="Paris is the capital of [MASK].")
    parser.add_argument(
        "--top-k", type=int, default=5, help="number of predictions (default: %(default)s)"
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        metavar="WORD",
        help="words to choose from, instead of the vocabulary",
    )
    options = parser.parse_args()
    with connect(options) as albert:
        choice = {"targets": options.targets} if options.targets else {}
        for answer in albert.fill_mask(options.text, top_k=options.top_k, **choice):
            for filled in answer if isinstance(answer, list) else [answer]:
                print(f"{filled.score:.4f}  {filled.sequence}")


if __name__ == "__main__":
    main()
