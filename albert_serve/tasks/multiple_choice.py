"""Multiple choice: the probability of each choice that may answer a question, or end a text.

Each choice is read as a pair, `[CLS] context [SEP] question choice [SEP]`, of which the head gives
one logit; the probabilities are their softmax over the choices of the question.

Shape legend: N choices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from albert_serve.api.schemas import (
    ChoiceQuestion,
    ChoiceScore,
    MultipleChoiceAnswer,
    MultipleChoiceParameters,
)
from albert_serve.errors import InvalidInputError, TextTooLongError
from albert_serve.tasks.base import EncoderInput, Logits, Prepared, TaskSetup
from albert_serve.tasks.probability import softmax
from albert_serve.tasks.truncation import Truncator, named
from albert_serve.tokenizer import Encoding

# Also within words: RACE has "a_." and "to_tomorrow", and the original replaces every underscore.
_BLANK: Final = re.compile("_+")
# Of the choices in the blanks of a question, which may have many.
_MAX_CHARS_IN_BLANKS: Final = 1 << 16


def with_choice(question: str | None, choice: str) -> str:
    """Return a question with a choice in its blanks; after it, if it has no blanks."""
    if not question:
        return choice
    if _BLANK.search(question):
        return _BLANK.sub(lambda _: choice, question)
    return f"{question} {choice}"


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """Chooses among the answers to a question, or the endings of a text."""

    setup: TaskSetup

    def prepare(
        self, item: ChoiceQuestion, parameters: MultipleChoiceParameters
    ) -> Prepared[MultipleChoiceAnswer]:
        """Encode the choices of one question; the answer has the best choice first.

        Raises:
            InvalidInputError: a text is empty.
            TextTooLongError: the context and a choice do not fit and may not be truncated.
        """
        truncator = Truncator(self.setup.tokenizer, self.setup.max_positions, parameters.truncation)
        _check_blanks(item)
        context = _encode(truncator, item.context, item.context, "context")
        inputs: list[EncoderInput] = []
        num_truncated = 0
        cuts: dict[str, int] = {}
        for number, choice in enumerate(item.choices):
            place = f"choices[{number}]"
            encoding = _encode(truncator, choice, with_choice(item.question, choice), place)
            with named(f"context and {place} together"):
                fitted = truncator.fit_choice(context, encoding)
            inputs.append(fitted.at_cls("multiple-choice"))
            num_truncated += fitted.num_truncated
            _add_cuts(cuts, fitted.cut_at, item, number)
        return Prepared(
            inputs=inputs,
            finish=lambda logits: _finish(item.choices, logits, parameters.top_k),
            num_truncated=num_truncated,
            cuts=cuts,
        )


def _encode(truncator: Truncator, text: str, read: str, name: str) -> Encoding:
    """Encode the part of a text that is read; the text may have a question around it."""
    if not text.strip():
        raise InvalidInputError(f"{name} is empty; only texts can be chosen by and among")
    with named(name):
        return truncator.encode(read)


def _check_blanks(item: ChoiceQuestion) -> None:
    """Refuse a question that is far longer with its blanks filled than without, before that."""
    count = len(_BLANK.findall(item.question or ""))
    num_chars = count * sum(map(len, item.choices))
    if count > 1 and num_chars > _MAX_CHARS_IN_BLANKS:
        raise TextTooLongError(
            f"the choices have {num_chars} characters in the {count} blanks of the question; "
            f"at most {_MAX_CHARS_IN_BLANKS} are read"
        )


def _add_cuts(
    cuts: dict[str, int], cut_at: tuple[int | None, ...], item: ChoiceQuestion, number: int
) -> None:
    """Add the cuts of a choice; of the context and the question, the longest cut counts."""
    context_end, begin = cut_at
    if context_end is not None:
        cuts[".context"] = min(context_end, cuts.get(".context", context_end))
    if begin is not None and item.question:
        start = _offset_in_question(item.question, item.choices[number], begin)
        cuts[".question"] = max(start, cuts.get(".question", 0))
    elif begin is not None:
        cuts[f".choices[{number}]"] = begin


def _offset_in_question(question: str, choice: str, offset: int) -> int:
    """Return the offset in a question of a character of `with_choice`.

    Of a character of the choice, that of its blank or, where there is none, of the question's end.
    """
    num_more = 0  # characters before it that the question has not
    for blank in _BLANK.finditer(question):
        if offset < blank.start() + num_more + len(choice):
            return min(offset - num_more, blank.start())
        num_more += len(choice) - len(blank[0])
    return min(offset - num_more, len(question))


def _finish(choices: list[str], logits: list[Logits], top_k: int | None) -> MultipleChoiceAnswer:
    scores_N = softmax(np.concatenate(logits)[:, 0])
    order = np.argsort(-scores_N, kind="stable")[:top_k].tolist()
    return [
        ChoiceScore(label=choices[index], score=float(scores_N[index]), index=index)
        for index in order
    ]
