"""The temperature of a classifier, and its calibration error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from training.tasks.classification.metrics import calibration_error, calibration_figures


def _drawn(*, several: bool) -> tuple[Tensor, Tensor]:
    """Return logits, and labels drawn with their probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits_NK = 2 * torch.randn(4000, 3, generator=generator)
    if several:
        return logits_NK, torch.bernoulli(logits_NK.sigmoid(), generator=generator).long()
    return logits_NK, torch.multinomial(logits_NK.softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("sharpness", [0.25, 5.0])
def test_the_temperature_is_the_factor_by_which_logits_are_too_sharp(
    several: bool, sharpness: float
) -> None:
    logits_NK, targets = _drawn(several=several)
    figures = calibration_figures(logits_NK * sharpness, targets)
    assert figures["temperature"] == pytest.approx(sharpness, rel=0.1)
    assert figures["calibration_error"] < 0.02 < 0.1 < figures["raw_calibration_error"]


def test_the_error_is_the_gap_of_each_bin_by_its_share() -> None:
    logits_NK = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]]).log()
    assert calibration_error(logits_NK, torch.tensor([0, 1, 1, 1])) == pytest.approx(0.4)


def test_confidence_stays_below_one_where_all_few_predictions_are_right() -> None:
    logits_NK = torch.eye(2)[[0, 1, 0, 1]] * 50
    temperature = calibration_figures(logits_NK, torch.tensor([0, 1, 0, 1]))["temperature"]
    assert (logits_NK / temperature).softmax(-1).max().item() == pytest.approx(11 / 12, abs=0.01)
    several_NK = torch.eye(4) * 100 - 50
    temperature = calibration_figures(several_NK, torch.eye(4).long())["temperature"]
    assert (several_NK / temperature).sigmoid().max().item() == pytest.approx(11 / 12, abs=0.01)


def test_a_diverged_run_has_no_temperature() -> None:
    assert calibration_figures(torch.full((2, 2), torch.nan), torch.tensor([0, 1])) == {
        "temperature": 1.0,
        "calibration_error": pytest.approx(torch.nan, nan_ok=True),
        "raw_calibration_error": pytest.approx(torch.nan, nan_ok=True),
    }
