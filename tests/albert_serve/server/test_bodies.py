"""A body is JSON in UTF-8, or it is malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_serve.errors import MalformedRequestError
from albert_serve.server.bodies import parse_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=values, is_ascii=st.booleans())
def test_json_is_read_as_it_was_written(value: Any, is_ascii: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=is_ascii).encode()) == value


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a": ' * 100, b"[1,", b'"[,', b"", b'["\\', b"\xff", b"[NaN]"]
)
def test_what_is_no_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedRequestError, match="the body is not JSON"):
        parse_json(body)
