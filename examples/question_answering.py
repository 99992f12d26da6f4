"""Find the answer to a question in a text."""

from __future__ import annotations

from argparse import BooleanOptionalAction

from connection import connect, example_parser

CONTEXT = (
    "Marie Curie was born in Warsaw in 1867. She moved to Paris to study physics, and in 1903 she "
    "shared the Nobel Prize with her husband Pierre."
)


def main() -> None:
    """Print the answer within the text around it."""
    parser = example_parser(str(__doc__))
    parser.add_argument("question", nargs="?", default="When was Marie Curie born?")
    parser.add_argument("context", nargs="?", default=CONTEXT)
    parser.add_argument(
        "--top-k", type=int, default=1, help="number of answers (default: %(default)s)"
    )
    parser.add_argument(
        "--allow-none",
        action=BooleanOptionalAction,
        help='whether "no answer" competes; None: as the model was exported',
    )
    options = parser.parse_args()
    with connect(options) as albert:
        answers = albert.question_answering(
            {"question": options.question, "context": options.context},
            top_k=options.top_k,
            handle_impossible_answer=options.allow_none,
        )
        for answer in answers if isinstance(answers, list) else [answers]:
            before, after = options.context[: answer.start], options.context[answer.end :]
            shown = (
                f"...{before[-30:]}[{answer.answer}]{after[:30]}..." if answer.answer else "none"
            )
            print(f"{answer.score:.4f}  {shown}")


if __name__ == "__main__":
    main()
