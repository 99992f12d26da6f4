"""The wire contract: what is taken, what is refused, and how a refusal reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from albert_serve.api.schemas import MAX_TARGETS, Order, TaskRequest
from albert_serve.api.wire import MAX_CHARS, MAX_ITEMS, validate
from albert_serve.errors import InvalidInputError
from albert_serve.tasks import TASKS

ITEMS: dict[str, Any] = {
    "fill-mask": "a [MASK]",
    "text-classification": {"text": "a", "text_pair": "b"},
    "question-answering": {"question": "q", "context": "c"},
    "sentence-order": {"text": "a", "text_pair": "b"},
    "token-classification": "a",
    "feature-extraction": "a",
}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(task: str, body: Any) -> TaskRequest:
    return validate(TASKS[task].request, body)


def refusal(task: str, body: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read(task, body)
    return str(caught.value)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "parameters", [{}, {"parameters": None}, {"parameters": {"truncation": None}}], ids=str
)
def test_missing_and_null_values_have_their_defaults(task: str, parameters: dict[str, Any]) -> None:
    request = read(task, {"inputs": ITEMS[task], **parameters})
    assert request.parameters == TASKS[task].parameters()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, "truncate"), (False, "error"), ("truncate", "truncate"), ("error", "error")],
)
def test_truncation_is_as_in_transformers(value: object, expected: str) -> None:
    request = read("fill-mask", {"inputs": "a", "parameters": {"truncation": value}})
    assert request.parameters.truncation == expected


@pytest.mark.parametrize("task", TASKS)
def test_inputs_are_one_item_or_a_list_that_has_an_end(task: str) -> None:
    one = read(task, {"inputs": ITEMS[task]}).inputs
    assert not isinstance(one, list)
    assert read(task, {"inputs": [ITEMS[task]] * 2}).inputs == [one, one]
    assert refusal(task, {"inputs": [ITEMS[task]] * (MAX_ITEMS + 1)}) == (
        f"inputs holds {MAX_ITEMS + 1} items; at most {MAX_ITEMS} are taken: split the list"
    )


REFUSALS: list[tuple[str, Any, str]] = [
    ("fill-mask", [], "the body must be an object, not []"),
    ("fill-mask", {}, "inputs is missing"),
    ("fill-mask", {"inputs": []}, "inputs must hold at least one item"),
    ("fill-mask", {"inputs": ["a", 1]}, "inputs[1] must be a valid string, not 1"),
    (
        *("fill-mask", {"inputs": "\ud800"}),
        "inputs holds half of a surrogate pair, which stands for no character",
    ),
    (
        *("fill-mask", {"inputs": ["a", "x" * (MAX_CHARS + 1)]}),
        (
            f"inputs[1] has {MAX_CHARS + 1} characters; at most {MAX_CHARS} are taken: shorten or "
            "split the text"
        ),
    ),
    (
        *("fill-mask", {f"x{number}": 1 for number in range(5)}),
        "the body: 'x0', 'x1', 'x2' is not known here; allowed are inputs, parameters",
    ),
    ("sentence-order", {"inputs": [1] * 65_536}, "inputs[0] must be an object, not 1"),
    (
        *("sentence-order", {"inputs": {"sentences": [1, 2, 3, 4, 5]}}),
        (
            "inputs.sentences[0] must be a valid string, not 1; inputs.sentences[1] must be a "
            "valid string, not 2; inputs.sentences[2] must be a valid string, not 3; and 2 more"
        ),
    ),
    (
        *("sentence-order", {"inputs": {"sentences": ["a", "b"], "text": "c"}}),
        "inputs: 'text' is not known here; allowed are sentences",
    ),
]
# Parameters, and how they are refused.
BAD_PARAMETERS: list[tuple[str, dict[str, Any], str]] = [
    (
        *("fill-mask", {"topk": 3}),
        ": 'topk' is not known here; allowed are truncation, top_k, targets",
    ),
    ("fill-mask", {"truncation": 1}, ".truncation must be true or false, not 1"),
    ("fill-mask", {"top_k": 0}, ".top_k must be greater than or equal to 1, not 0"),
    ("fill-mask", {"top_k": "5"}, ".top_k must be a valid integer, not '5'"),
    (
        *("fill-mask", {"targets": ["x"] * (MAX_TARGETS + 1)}),
        f".targets holds {MAX_TARGETS + 1} items; at most {MAX_TARGETS} are taken: split the list",
    ),
    (
        *("fill-mask", {"targets": ["x" * 512] * 128 + ["x"]}),
        (
            ": the targets have 65537 characters together; at most 65536 are taken: send fewer or "
            "shorter ones"
        ),
    ),
    (
        *("text-classification", {"function_to_apply": "default"}),
        ".function_to_apply must be 'sigmoid', 'softmax' or 'none', not 'default'",
    ),
    (
        *("question-answering", {"null_score_diff_threshold": float("inf")}),
        ".null_score_diff_threshold must be a finite number, not inf",
    ),
]


@pytest.mark.parametrize(
    ("task", "body", "expected"),
    [
        *REFUSALS,
        *(
            (task, {"inputs": ITEMS[task], "parameters": parameters}, f"parameters{expected}")
            for task, parameters, expected in BAD_PARAMETERS
        ),
    ],
)
def test_a_refusal_is_one_readable_sentence(task: str, body: Any, expected: str) -> None:
    assert refusal(task, body) == expected


def test_a_long_or_deep_value_is_not_repeated_whole() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10_000, {"x" * 10_000: ["y" * 10_000] * 1000}, deep):
        assert len(refusal("sentence-order", {"inputs": value})) < 200
        assert len(refusal("fill-mask", {"inputs": "a", "parameters": {"truncation": value}})) < 200


@given(body=ANY_JSON | st.dictionaries(st.sampled_from(["inputs", "parameters"]), ANY_JSON))
def test_any_json_is_taken_or_refused_in_a_line(body: Any) -> None:
    for task in TASKS:
        try:
            read(task, body)
        except InvalidInputError as error:
            message = str(error)
            assert message
            assert "\n" not in message


def test_replies_refuse_nan_and_ignore_new_fields() -> None:
    with pytest.raises(ValidationError, match="finite"):
        Order(in_order=float("nan"))
    assert Order.model_validate({"in_order": 0.5, "new": 1}) == Order(in_order=0.5)
