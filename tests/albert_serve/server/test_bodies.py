"""Bodies are counted before they are parsed: very many values would keep everybody waiting."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_serve.errors import MalformedRequestError, TooMuchAtOnceError
from albert_serve.server.bodies import parse_json

# Signs that stand before values are in these, and what ends a string or does not.
texts = st.text(alphabet=',[{}]"\\:a é') | st.sampled_from(["\\", '\\"', '\\\\"', '",'])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, min_size=1) | st.dictionaries(texts, inner, min_size=1),
)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(value=values, is_ascii=st.booleans())
def test_only_values_are_counted_and_each_is(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    num_values = count(value)
    assert parse_json(body, max_values=num_values) == value
    with pytest.raises(TooMuchAtOnceError, match=f"over {num_values - 1} values"):
        parse_json(body, max_values=num_values - 1)


def test_a_text_may_have_more_commas_than_a_body_values() -> None:
    text = "1,2,[3],{4}," * 1000
    assert parse_json(json.dumps([text, text]).encode(), max_values=3) == [text, text]


@pytest.mark.parametrize("body", [b"[" * 100, b'{"a": ' * 100, b"[1,", b'"[,', b"", b'["\\'])
def test_what_is_no_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedRequestError, match="the body is not JSON"):
        parse_json(body, max_values=1000)
