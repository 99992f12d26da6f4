"""The wire contract: what is taken, what is refused, and how a refusal reads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from albert_serve.schemas import (
    Answer,
    ErrorReply,
    FilledToken,
    InfoReply,
    LabelScore,
    Order,
    TaskRequest,
    TextInput,
    TextPair,
    describe,
)
from albert_serve.tasks import TASKS, shape_reply

ITEMS: dict[str, Any] = {
    "fill-mask": "a [MASK]",
    "text-classification": {"text": "a", "text_pair": "b"},
    "question-answering": {"question": "q", "context": "c"},
    "sentence-order": {"text": "a", "text_pair": "b"},
}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(task: str, body: Any) -> TaskRequest:
    return TASKS[task].request.model_validate(body)


def refusal(task: str, body: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        read(task, body)
    return describe(caught.value)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param({}, id="none"),
        pytest.param({"parameters": {}}, id="empty"),
        pytest.param({"parameters": None}, id="null"),
        pytest.param({"parameters": {"truncation": None}}, id="null inside"),
    ],
)
def test_what_is_left_out_or_null_has_its_default(task: str, parameters: dict[str, Any]) -> None:
    request = read(task, {"inputs": ITEMS[task], **parameters})
    assert request.parameters == TASKS[task].parameters()


@pytest.mark.parametrize("task", TASKS)
def test_inputs_are_one_item_or_a_list(task: str) -> None:
    one = read(task, {"inputs": ITEMS[task]}).inputs
    assert not isinstance(one, list)
    assert read(task, {"inputs": [ITEMS[task]] * 2}).inputs == [one, one]


@pytest.mark.parametrize("task", TASKS)
def test_the_schema_has_examples_that_it_takes(task: str) -> None:
    schema = TASKS[task].request.model_json_schema()
    assert schema["additionalProperties"] is False
    for example in schema["examples"]:
        read(task, example)


def test_classification_takes_texts_and_objects_mixed() -> None:
    inputs = ["a", {"text": "b"}, {"text": "c", "text_pair": "d"}]
    assert read("text-classification", {"inputs": inputs}).inputs == [
        "a",
        TextInput(text="b"),
        TextInput(text="c", text_pair="d"),
    ]


@pytest.mark.parametrize(
    ("task", "body", "expected"),
    [
        pytest.param("fill-mask", [], "the body must be an object, not []", id="no object"),
        pytest.param("fill-mask", {}, "inputs is missing", id="missing"),
        pytest.param("fill-mask", {"inputs": []}, "inputs must hold at least one item", id="empty"),
        pytest.param(
            "fill-mask",
            {"inputs": "a", "parameters": {"topk": 3}},
            "parameters: 'topk' is not known here; allowed are truncation, top_k, targets",
            id="unknown parameter",
        ),
        pytest.param(
            "fill-mask",
            {"inputs": "a", "parameters": {"top_k": 0}},
            "parameters.top_k must be greater than or equal to 1, not 0",
            id="out of range",
        ),
        pytest.param(
            "fill-mask",
            {"inputs": "a", "parameters": {"top_k": "5"}},
            "parameters.top_k must be a valid integer, not '5'",
            id="no silent conversion",
        ),
        pytest.param(
            "fill-mask",
            {"inputs": ["a", 1]},
            "inputs[1] must be a valid string, not 1",
            id="which item",
        ),
        pytest.param(
            "text-classification",
            {"inputs": "a", "parameters": {"function_to_apply": "default"}},
            "parameters.function_to_apply must be 'sigmoid', 'softmax' or 'none', not 'default'",
            id="no such choice",
        ),
        pytest.param(
            "text-classification",
            {"inputs": [{"text_pair": "b"}]},
            "inputs[0].text is missing",
            id="field called as a form is",
        ),
        pytest.param(
            "question-answering",
            {"inputs": {"question": "q"}},
            "inputs.context is missing",
            id="missing inside",
        ),
        pytest.param(
            "sentence-order",
            {"inputs": {"text": "a"}},
            "inputs.text_pair is missing",
            id="half a pair",
        ),
        pytest.param(
            "sentence-order",
            {"inputs": [1, 2, 3, 4, 5]},
            "inputs[0] must be an object, not 1; inputs[1] must be an object, not 2; "
            "inputs[2] must be an object, not 3; and 2 more",
            id="many",
        ),
    ],
)
def test_a_refusal_is_one_readable_sentence(task: str, body: Any, expected: str) -> None:
    assert refusal(task, body) == expected


def test_a_long_value_is_not_repeated_whole() -> None:
    assert len(refusal("sentence-order", {"inputs": "x" * 10_000})) < 200


@given(body=ANY_JSON | st.dictionaries(st.sampled_from(["inputs", "parameters"]), ANY_JSON))
def test_any_json_is_taken_or_refused_in_a_line(body: Any) -> None:
    for task in TASKS:
        try:
            read(task, body)
        except ValidationError as error:
            told = describe(error)
            assert told
            assert "\n" not in told


@pytest.mark.parametrize("task", [name for name in TASKS if name != "text-classification"])
def test_one_item_is_replied_to_bare_and_a_list_as_a_list(task: str) -> None:
    assert shape_reply(read(task, {"inputs": ITEMS[task]}), ["x"]) == "x"
    assert shape_reply(read(task, {"inputs": [ITEMS[task]]}), ["x"]) == ["x"]


def test_classification_always_replies_nested() -> None:
    labels = [LabelScore(label="a", score=1.0)]
    assert shape_reply(read("text-classification", {"inputs": "a"}), [labels]) == [labels]
    pairs = read("text-classification", {"inputs": ["a", "b"]})
    assert shape_reply(pairs, [labels, labels]) == [labels, labels]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (FilledToken, {"score", "token", "token_str", "sequence"}),
        (LabelScore, {"label", "score"}),
        (Answer, {"answer", "score", "start", "end"}),
        (Order, {"in_order"}),
        (ErrorReply, {"error", "error_type", "request_id"}),
    ],
)
def test_replies_have_these_fields_and_no_other(kind: Any, fields: set[str]) -> None:
    assert set(kind.model_fields) == fields


def test_replies_refuse_nan_and_pass_over_what_is_new() -> None:
    with pytest.raises(ValidationError, match="finite"):
        Order(in_order=float("nan"))
    assert Order.model_validate({"in_order": 0.5, "new": 1}) == Order(in_order=0.5)
    assert TextPair.model_validate({"text": "a", "text_pair": "b"}).text_pair == "b"
    assert "tasks" in InfoReply.model_json_schema()["required"]


@pytest.mark.parametrize("module", ["schemas", "client"])
def test_the_contract_and_the_client_need_no_numerics(module: str) -> None:
    code = (
        f"import sys, albert_serve.{module}; "
        "print([m for m in ('numpy', 'tokenizers', 'torch', 'onnxruntime') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == "[]"
