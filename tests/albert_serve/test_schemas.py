"""Request schemas: valid requests, messages about invalid requests, and documented errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_serve import errors
from albert_serve.api.schemas import TaskRequest
from albert_serve.api.wire import validate
from albert_serve.errors import InvalidInputError, RequestError, request_error
from albert_serve.tasks import TASKS
from tests.albert_serve.support import ITEMS, ROOT

MASKS, ORDER = "fill-mask", "sentence-order"
LONGEST, TOO_LONG = "x" * 1_000_000, "at most 1000000 are allowed. Shorten or split the text."
TOO_MANY = "at most 65536 are allowed. Split the list."
TARGETS = ["x" * 512] * 128
UNKNOWN_TEXT = {"sentences": ["a", "b"], "text": "c"}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(task: str, body: Any) -> TaskRequest:
    return validate(TASKS[task].request, body)


def error_of(task: str, body: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read(task, body)
    return str(caught.value)


@pytest.mark.parametrize("task", TASKS)
def test_inputs_are_one_item_or_a_list_and_null_parameters_mean_defaults(task: str) -> None:
    for parameters in ({}, {"parameters": None}, {"parameters": {"truncation": None}}):
        request = read(task, {"inputs": ITEMS[task], **parameters})
        assert request.parameters == TASKS[task].parameters()
    assert not isinstance(request.inputs, list)
    assert read(task, {"inputs": [ITEMS[task]] * 2}).inputs == [request.inputs] * 2
    assert TOO_MANY in error_of(task, {"inputs": [ITEMS[task]] * 65_537})


def test_values_at_their_limits_are_accepted() -> None:
    assert read(MASKS, {"inputs": ["a"] * 65_536})
    assert read(MASKS, {"inputs": LONGEST})
    for parameters in ({"targets": TARGETS, "top_k": 1}, {"targets": ["x"] * 1000, "top_k": 1000}):
        assert read(MASKS, {"inputs": "a", "parameters": parameters})


@pytest.mark.parametrize(
    ("task", "body", "expected"),
    [
        (MASKS, {}, "inputs is missing."),
        (MASKS, {"inputs": []}, "inputs must have at least 1 item."),
        (MASKS, {"inputs": ["a", 1]}, "inputs[1] must be a valid string, not 1."),
        ("text-classification", {"inputs": 3}, "inputs must be a valid string, not 3."),
        (MASKS, {"inputs": ["a", f"{LONGEST}x"]}, f"inputs[1] has 1000001 characters; {TOO_LONG}"),
        (MASKS, {"inputs": ["x"] * 65_537}, f"inputs has 65537 items; {TOO_MANY}"),
        (MASKS, {"x": 1}, "Unknown field 'x'. Use inputs, parameters."),
        (ORDER, {"inputs": {"sentences": ["a"]}}, "inputs.sentences must have at least 2 items."),
        (ORDER, {"inputs": UNKNOWN_TEXT}, "inputs: Unknown field 'text'. Use sentences."),
    ],
)
def test_an_error_has_the_path_and_the_allowed_values(task: str, body: Any, expected: str) -> None:
    assert error_of(task, body) == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"truncation": 1}, ".truncation must be true or false, not 1"),
        ({"top_k": 0}, ".top_k must be greater than or equal to 1, not 0"),
        ({"top_k": 1001}, ".top_k must be less than or equal to 1000, not 1001"),
        ({"targets": ["x"] * 1001}, ".targets has 1001 items"),
        ({"targets": [*TARGETS, "x"]}, ": The targets have 65537 characters; at most 65536 "),
    ],
)
def test_the_error_of_an_invalid_parameter_has_its_name(parameters: Any, expected: str) -> None:
    message = error_of("fill-mask", {"inputs": "a", "parameters": parameters})
    assert message.startswith(f"parameters{expected}")


def test_three_errors_are_shown_and_the_others_are_counted() -> None:
    invalid = dict.fromkeys(("top_k", "max_answer_len", "max_seq_len", "max_question_len"), 0)
    body = {"inputs": ITEMS["question-answering"], "parameters": invalid}
    assert error_of("question-answering", body).endswith("not 0. There are 1 more errors.")
    del invalid["top_k"]
    assert error_of("question-answering", body).endswith("not 0.")


def test_an_error_shortens_a_long_or_deep_value() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10_000, {"x" * 10_000: ["y" * 10_000] * 1000}, deep):
        for body in ({"inputs": value}, {"inputs": [], "parameters": {"truncation": value}}):
            assert len(error_of("sentence-order", body)) < 200


@given(body=ANY_JSON | st.dictionaries(st.sampled_from(["inputs", "parameters"]), ANY_JSON))
def test_any_json_is_accepted_or_rejected_with_one_line(body: Any) -> None:
    for task in TASKS:
        try:
            read(task, body)
        except InvalidInputError as error:
            message = str(error)
            assert re.fullmatch(r"[^\n]+", message)


def test_the_table_of_errors_in_the_documents_is_complete() -> None:
    page = (ROOT / "docs/tasks.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|.*\| `(\w+)` \|$", page, re.MULTILINE)
    for status, error_type, name in rows:
        assert type(request_error(int(status), "message", error_type)).__name__ == name
    expected = {
        (str(int(item.status)), item.error_type, item.__name__)
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, RequestError) and item is not RequestError
    }
    assert expected <= set(rows)
