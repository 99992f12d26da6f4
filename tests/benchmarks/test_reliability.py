"""The scenarios run against a real service; what they count, and what they make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.load import load
from benchmarks.harness.plan import OpenLoop, Plan
from benchmarks.reliability.__main__ import main
from benchmarks.reliability.faults import sigterm
from benchmarks.reliability.host import growth, mixed_requests, serving
from benchmarks.reliability.pressure import Setting
from benchmarks.reliability.report import Result, tables, write_into
from tests.albert_serve.conftest import bundle_dir, checkpoint_dir  # noqa: F401 - fixtures


@pytest.mark.slow
def test_ten_times_too_much_is_answered_or_refused(
    bundle_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    with serving(bundle_dir, tmp_path, {"THREADS": "1"}) as service:
        result = load(
            Plan(
                port=service.port,
                requests=mixed_requests(),
                pattern=OpenLoop(rate_per_s=1000, duration_s=3, num_connections=500),
            )
        )
    assert len(result.replies) == pytest.approx(3000, rel=0.01)
    assert result.num_others == 0, result.problems
    assert result.num_bad_refusals == 0
    assert result.num(200) > 0


@pytest.mark.slow
def test_nothing_is_lost_at_the_end(bundle_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    result = sigterm(Setting(bundle=bundle_dir, folder=tmp_path, seconds=6, minutes=0))
    assert result.passed, result


def test_growth_is_that_of_medians_and_leaves_the_start_out() -> None:
    assert growth([1.0] * 10 + [100.0] * 80 + [106.0] * 10) == pytest.approx(0.06)
    assert growth([100.0] * 99 + [900.0]) == 0


def test_a_page_keeps_the_text_around_its_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- figures: python -m benchmarks.reliability --write -->\nold\n"
        "<!-- end of figures -->\nafter\n"
    )
    failed = Result(name="overload", figures={"offered/s": "10"}, checks={"all is 200": False})
    write_into(page, tables([failed]))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| overload | all is 200 | **no** | offered/s: 10 |" in text
    assert "old" not in text
    (tmp_path / "bare.md").write_text("nothing")
    with pytest.raises(ValueError, match="must have the lines"):
        write_into(tmp_path / "bare.md", "")


def test_an_unknown_scenario_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["overlode"])
    assert "there are capacity, overload" in capsys.readouterr().err
