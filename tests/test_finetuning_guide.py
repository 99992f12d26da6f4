"""The commands of docs/finetuning.md work as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
GUIDE = REPOSITORY / "docs" / "finetuning.md"


def printed_commands() -> list[str]:
    """The commands of the guide's first block, without comments."""
    block = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[0]
    lines = (line for line in block.splitlines() if not line.startswith("#"))
    commands = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [command for command in commands if command.strip()]


def test_the_guide_has_five_commands() -> None:
    activate, *commands = printed_commands()
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
    for name in ("models", "tests", "training", "export", "albert_serve", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}
    outputs = []
    for command in printed_commands()[1:5]:
        ended = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=900,
        )
        outputs.append(ended.stdout)
    figures = json.loads((tmp_path / "runs/intents/checkpoint/evaluation.json").read_text())
    assert figures["text_classification_accuracy"] > 0.6  # by chance it is 1/6
    assert "validation of text-classification" in outputs[0]
    manifest = json.loads((tmp_path / "bundles/intents/manifest.json").read_text())
    assert manifest["evaluation"]["text_classification_macro_f1"] == pytest.approx(
        figures["text_classification_macro_f1"]
    )
    assert "change_pin" in outputs[3]
