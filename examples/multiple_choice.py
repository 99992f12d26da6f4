"""Choose among the answers to a question; for a model that was finetuned for multiple choice.

The model that ships has no head for it; docs/own-model.md makes one that has.
"""

from __future__ import annotations

from connection import connect, example_parser

CONTEXT = "Ada forgot her umbrella at home. On her way to work it began to rain."
CHOICES = ["She got wet.", "She was glad of her umbrella.", "She stayed in bed."]


def main() -> None:
    """Print the choices, the best first."""
    parser = example_parser(str(__doc__))
    parser.add_argument("--context", default=CONTEXT)
    parser.add_argument("--question", default="What happened?")
    parser.add_argument("--choices", nargs="+", metavar="CHOICE", default=CHOICES)
    options = parser.parse_args()
    question = {
        "context": options.context,
        "question": options.question,
        "choices": options.choices,
    }
    with connect(options) as albert:
        for choice in albert.multiple_choice(question):
            print(f"{choice.score:.4f}  {choice.label}")


if __name__ == "__main__":
    main()
