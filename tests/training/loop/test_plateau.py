"""The alarm is raised for runs that learn no context, and for no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.loop.plateau import PlateauAlarm

ENTROPY = 6.835
Curve = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Course:
    """Reports of a run: every so many steps the loss of a curve over steps, with noise."""

    num_steps: int = 7000
    report_every: int = 50
    warmup: float = 0.03
    noise: float = 0.03
    seed: int = 0

    def alarms(self, curve: Curve) -> list[tuple[int, str]]:
        """The steps at which the alarm says something, and what."""
        alarm = PlateauAlarm(unigram_entropy=ENTROPY, warmup=self.warmup)
        rng = np.random.default_rng(self.seed)
        alarms = []
        for step in range(self.report_every, self.num_steps + 1, self.report_every):
            loss = curve(step) + self.noise * rng.standard_normal()
            accuracy = 0.12 if loss > 0.9 * ENTROPY else 0.3
            message = alarm.add(
                step=step, progress=step / self.num_steps, loss=loss, accuracy=accuracy
            )
            if message is not None:
                alarms.append((step, message))
        return alarms


def through(*points: tuple[float, float]) -> Curve:
    """A curve that goes straight from point to point, (step, loss), and stays at the last."""
    steps, losses = zip(*points, strict=True)
    return lambda step: float(np.interp(step, steps, losses))


# Measured curves (docs/decisions.md), and made up ones.
LEARNING: dict[str, Curve] = {
    "small, from local": through((0, 6.85), (100, 6.6), (200, 6.26), (400, 5.89), (7000, 4.8)),
    "from the start": through((0, 9.4), (50, 7.0), (500, 6.0), (7000, 3.5)),
    "slowly but steadily": through((0, 6.9), (5000, 3.0)),
    "large vocabulary, slow at first": through((0, 10.3), (2500, 6.5), (7000, 2.5)),
    "that stands still lower": through((0, 6.9), (400, 6.0), (7000, 6.0)),
}
STUCK: dict[str, Curve] = {
    "at the entropy": through((0, 9.4), (100, 6.84)),
    "at the entropy less copying": through((0, 9.4), (100, 6.84), (600, 6.4)),
    "slowly down to copying": through((0, 6.87), (400, 6.67), (1000, 6.55), (1900, 6.42)),
    "lower rates, to no avail": through((0, 6.5), (300, 6.42), (475, 6.38)),
    "above the entropy": through((0, 9.4), (100, 7.2)),
}


@pytest.mark.parametrize("curve", LEARNING.values(), ids=LEARNING)
@pytest.mark.parametrize("report_every", [5, 200])
def test_a_run_that_learns_is_left_in_peace(curve: Curve, report_every: int) -> None:
    assert not Course(report_every=report_every).alarms(curve)


@pytest.mark.parametrize("curve", STUCK.values(), ids=STUCK)
@pytest.mark.parametrize("report_every", [5, 200])
def test_a_plateau_is_reported_once(curve: Curve, report_every: int) -> None:
    alarms = Course(report_every=report_every).alarms(curve)
    assert len(alarms) == 1
    assert alarms[0][0] <= 3500


@given(
    noise=st.floats(0, 0.1),
    seed=st.integers(0, 2**32),
    ratio=st.floats(0.935, 1.1),
    report_every=st.integers(10, 100),
)
def test_noise_neither_hides_nor_repeats_a_plateau(
    noise: float, seed: int, ratio: float, report_every: int
) -> None:
    course = Course(noise=noise, seed=seed, report_every=report_every)
    assert len(course.alarms(lambda step: ratio * ENTROPY)) == 1
