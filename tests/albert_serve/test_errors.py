"""A reply's status finds its error, and the documents' table has every one."""

from __future__ import annotations

import re

import pytest

from albert_serve import errors
from albert_serve.errors import AlbertServeError, InvalidInputError, RequestError, request_error
from tests.albert_serve.support import ROOT


def public_errors() -> dict[str, type[AlbertServeError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, AlbertServeError)
    }


def test_an_unknown_type_falls_back_to_the_status() -> None:
    assert type(request_error(422, "why", "from a newer service")) is InvalidInputError


@pytest.mark.parametrize("status", [418, 502])
def test_a_status_of_no_error_is_a_plain_request_error(status: int) -> None:
    assert type(request_error(status, "why")) is RequestError


def test_the_documents_table_has_every_error_that_a_client_can_meet() -> None:
    rows = re.findall(
        r"^\| (\d+) \| `(\w+)` \|.*\| `(\w+)` \|$",
        (ROOT / "docs/tasks.md").read_text(),
        re.MULTILINE,
    )
    for status, error_type, name in rows:
        assert type(request_error(int(status), "why", error_type)).__name__ == name
    ours = {
        (str(int(kind.status)), kind.error_type, kind.__name__)
        for kind in public_errors().values()
        if issubclass(kind, RequestError) and kind is not RequestError
    }
    assert ours <= set(rows)
