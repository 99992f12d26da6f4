"""Each method that answers inputs, with inputs for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from albert_serve.api.schemas import (
    Answer,
    Coherence,
    EntityGroup,
    FilledToken,
    LabelScore,
    Order,
    QuestionContext,
    TextInput,
    TextPair,
)


class Case(NamedTuple):
    """Inputs of a method, the type of its results or of what they are lists of, and its task.

    Attributes:
        implied: the options that the method sets.
    """

    rows: list[Any]
    kind: type
    task: str
    options: dict[str, Any] = {}  # noqa: RUF012
    implied: dict[str, Any] = {}  # noqa: RUF012


MASKED = ["The [MASK] was born.", "a [MASK]", "[MASK] and [MASK]"]
TEXTS = ["a film", "It rained.", "word"]
PAIR = {"text": "It rained.", "text_pair": "We stayed in."}
QUESTION = {"question": "Who came?", "context": "Ada came at noon."}
SENTENCES = [["It rained.", "We stayed in."], ["He left.", "She came.", "They met."]]
CASES = {
    "fill_mask": Case(MASKED, FilledToken, "fill-mask", options={"top_k": 2}),
    "text_classification": Case(
        [*TEXTS, PAIR, TextInput(text="a film")],
        LabelScore,
        "text-classification",
        options={"top_k": 1},
    ),
    "question_answering": Case(
        [QUESTION, QuestionContext.model_validate(QUESTION)], Answer, "question-answering"
    ),
    "sentence_order": Case(
        [PAIR, TextPair.model_validate(PAIR)], Order, "sentence-order", options={"truncation": True}
    ),
    "coherence": Case(SENTENCES, Coherence, "sentence-order"),
    "token_classification": Case(
        TEXTS, EntityGroup, "token-classification", options={"ignore_labels": []}
    ),
    "feature_extraction": Case(TEXTS, float, "feature-extraction", options={"pooling": "cls"}),
    "token_features": Case(
        TEXTS,
        float,
        "feature-extraction",
        options={"normalize": True},
        implied={"pooling": "none"},
    ),
}


def kinds(value: Any) -> set[type]:
    """The types of the values of nested lists."""
    return set().union(*map(kinds, value)) if isinstance(value, list) else {type(value)}


def flat(value: Any) -> list[Any]:
    """The numbers and texts of a result; names and lengths are values, too."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return [part for pair in value.items() for each in pair for part in flat(each)]
    if isinstance(value, list):
        return [len(value), *(part for each in value for part in flat(each))]
    return [value]


def assert_same(result: Any, expected: Any) -> None:
    """Compare with a tolerance: the last digits depend on the batch."""
    close = [pytest.approx(one, abs=1e-4) if type(one) is float else one for one in flat(expected)]
    assert flat(result) == close
