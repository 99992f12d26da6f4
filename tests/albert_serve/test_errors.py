"""The tree drawn in errors.py is the tree that exists, and a reply's status finds its error."""

from __future__ import annotations

import re

import pytest

from albert_serve import errors
from albert_serve.errors import (
    AlbertServeError,
    InvalidInputError,
    QueueFullError,
    RequestError,
    request_error,
)
from tests.albert_serve.support import ROOT

# The name, at four columns a level, then perhaps a status.
DRAWN_LINE = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+Error)\b\s*(?P<status>\d{3})?")


def drawn_tree() -> list[tuple[str, str | None, str | None]]:
    """(name, parent, status) in the order of the docstring."""
    path: list[str] = []
    tree = []
    for line in (errors.__doc__ or "").splitlines():
        if match := DRAWN_LINE.match(line):
            depth = len(match["indent"]) // 4 - 1
            path = [*path[:depth], match["name"]]
            tree.append((match["name"], path[-2] if depth else None, match["status"]))
    return tree


def public_errors() -> dict[str, type[AlbertServeError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, AlbertServeError)
    }


def test_every_error_is_drawn_and_every_drawn_error_exists() -> None:
    assert [name for name, _, _ in drawn_tree()] == list(public_errors())


@pytest.mark.parametrize(("name", "parent", "status"), drawn_tree())
def test_the_drawn_parent_and_status_are_the_real_ones(
    name: str, parent: str | None, status: str | None
) -> None:
    kind = public_errors()[name]
    assert parent is None or kind.__bases__[0].__name__ == parent
    assert status is None or kind.status == int(status)


def test_an_unknown_type_falls_back_to_the_status() -> None:
    assert type(request_error(422, "why", "from a newer service")) is InvalidInputError


@pytest.mark.parametrize("status", [418, 502])
def test_a_status_of_no_error_is_a_plain_request_error(status: int) -> None:
    assert type(request_error(status, "why")) is RequestError


def test_a_full_queue_says_when_to_come_back() -> None:
    assert QueueFullError("full", retry_after_s=2.5).retry_after_s == 2.5
    error = request_error(429, "full")
    assert isinstance(error, QueueFullError)
    assert error.retry_after_s == 1.0


def test_the_documents_table_has_every_error_that_a_client_can_meet() -> None:
    rows = re.findall(
        r"^\| (\d+) \| `(\w+)` \|.*\| `(\w+)` \|$",
        (ROOT / "docs/errors.md").read_text(),
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
