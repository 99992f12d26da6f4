"""The commands of README.md that train and export work as printed, in fewer steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.printed import printed_commands, run_printed

README = "README.md"
FEWER = {
    "training.pretrain": "--steps 20 --budget 1h --no-compile",
    "training.finetune": "--steps 6 --budget 1h",
    "export": "--quality-budget 20s",
}


def test_the_readme_has_five_commands_and_serves() -> None:
    activate, *commands = printed_commands(README, "training.vocab")
    assert activate == "source .venv/bin/activate"
    assert [" ".join(command.split()[:3]) for command in commands] == [
        "python -m training.vocab",
        "python -m training.pretrain",
        "python -m training.finetune",
        "python -m training.evaluate",
        "python -m export",
        "albert-serve serve --bundle",
    ]


@pytest.mark.slow
def test_the_readmes_commands_make_a_bundle_of_all_tasks(tmp_path: Path) -> None:
    *commands, serve = printed_commands(README, "training.vocab")[1:]
    inspect = serve.replace("serve --bundle", "info")
    outputs = run_printed([*commands, inspect], tmp_path, FEWER)
    manifest = json.loads((tmp_path / "bundles/mine/manifest.json").read_text())
    assert manifest["config"]["vocab_size"] == 2000
    assert set(manifest["tasks"]) == {
        "fill-mask",
        "sentence-order",
        "text-classification",
        "question-answering",
    }
    assert manifest["tasks"]["text-classification"]["labels"] == ["negative", "positive"]
    stages = manifest["provenance"]["training"]["stages"]
    assert [(stage["program"], stage["steps"]) for stage in stages] == [
        ("training.pretrain", 20),
        ("training.finetune", 6),
    ]
    evaluation = json.loads((tmp_path / "runs/tasks/checkpoint/evaluation.json").read_text())
    assert manifest["evaluation"] == evaluation
    assert manifest["quality"]
    assert "question-answering" in outputs[-1]
