"""Finetuning by the time that it is given."""

from __future__ import annotations

import pytest

from benchmarks import budgets
from tests.training.support import REPOSITORY

DATA = REPOSITORY / "tests" / "data"


@pytest.mark.extended
def test_the_table_has_a_row_for_each_budget(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(DATA / "banking77" / f"{name}.csv") for name in ("train", "test")]
    assert budgets.main([*files, "--budgets", "1s", "--busy-budget", "", "--few", "8"]) == 0
    *_, heads, budget, few_heads, few, peer = capsys.readouterr().out.splitlines()
    for line, title in ((heads, "--head-only"), (budget, "--budget 1s"), (few, "no options, 8")):
        assert line.startswith(f"| {title}")
    assert [line.split(" | ")[1] for line in (heads, few_heads, peer)] == ["240", "48", "240"]
    assert all(float(line.split(" | ")[3]) > 60 for line in (heads, budget, few, peer))
