"""The table of accuracy by budget is of runs of the command, as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.budgets import main

BANKING = Path(__file__).parents[1] / "data" / "banking77"


@pytest.mark.extended
def test_the_table_has_a_row_for_each_budget(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(BANKING / f"{name}.csv") for name in ("train", "test")]
    assert main([*files, "--budgets", "1s", "--busy-budget", "", "--few", "8"]) == 0
    *_, heads, budget, few_heads, few, peer = capsys.readouterr().out.splitlines()
    for line, title in ((heads, "--head-only"), (budget, "--budget 1s"), (few, "no options, 8")):
        assert line.startswith(f"| {title}")
    assert [line.split(" | ")[1] for line in (heads, few_heads, peer)] == ["240", "48", "240"]
    assert all(float(line.split(" | ")[3]) > 60 for line in (heads, budget, few, peer))
