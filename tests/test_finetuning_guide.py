"""The commands of docs/finetuning.md work as printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.printed import printed_commands, run_printed

GUIDE = "docs/finetuning.md"


def test_the_guide_has_five_commands() -> None:
    activate, *commands = printed_commands(GUIDE, "training.finetune")
    assert activate == "source .venv/bin/activate"
    assert [" ".join(command.split()[:3]) for command in commands] == [
        "python -m training.finetune",
        "python -m training.evaluate",
        "python -m export",
        "albert-serve info bundles/intents",
        "albert-serve serve --bundle",
    ]


@pytest.mark.slow
def test_the_guide_trains_a_better_classifier_than_chance(tmp_path: Path) -> None:
    outputs = run_printed(printed_commands(GUIDE, "training.finetune")[1:5], tmp_path)
    figures = json.loads((tmp_path / "runs/intents/checkpoint/evaluation.json").read_text())
    assert figures["text_classification_accuracy"] > 0.6  # by chance it is 1/6
    assert "validation of text-classification" in outputs[0]
    manifest = json.loads((tmp_path / "bundles/intents/manifest.json").read_text())
    assert manifest["evaluation"]["text_classification_macro_f1"] == pytest.approx(
        figures["text_classification_macro_f1"]
    )
    assert "change_pin" in outputs[3]
