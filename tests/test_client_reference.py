"""The reference of the client is what its docstrings make of it."""

from __future__ import annotations

from scripts.client_reference import PAGE, reference


def test_the_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make docs`"
