"""A test without its program is skipped, and fails in CI."""

from __future__ import annotations

import shutil

import pytest

from tests.programs import is_ci, needs_program

MISSING = "no-such-program is not installed; apt-get install its-package"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("", False), ("0", False), ("False", False), ("1", True), ("true", True)],
)
def test_ci_is_known_by_its_variable(
    value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if value is not None:
        monkeypatch.setenv("CI", value)
    assert is_ci() is expected


def test_the_first_program_that_is_installed_is_taken() -> None:
    assert needs_program("no-such-program", "sh", "ls") == shutil.which("sh")


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_a_missing_program_is_named(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=MISSING):
        needs_program("no-such-program", package="its-package")
