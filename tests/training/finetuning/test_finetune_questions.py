"""Questions that are held out select the best checkpoint, by the figures of evaluation."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import (
    SQUAD,
    SQUAD_V2,
    best_step,
    run_command,
    validations,
)
from training.commands import evaluate
from training.commands.finetune import FinetuneConfig, main
from training.finetuning.questions import question_examples
from training.finetuning.settings import settle

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)
f1 = partial(validations, task="question-answering", figure="f1")


@pytest.fixture
def start(pretrained: Path) -> list[str]:
    """A run of 12 steps with three validations, whose file is left to be named."""
    return [
        *("--initialize-from", str(pretrained / "checkpoint"), "--length", "64"),
        *("--question-answering", str(SQUAD), "--batch-size", "8", "--steps", "12"),
        *("--lr", "1e-2", "--adamw-lr", "1e-2", "--validate-every", "4"),
        *("--precision", "fp32", "--device", "cpu"),
    ]


@pytest.mark.parametrize(("file", "name"), [(SQUAD, "f1"), (SQUAD_V2, "best_f1")])
def test_the_best_checkpoint_has_the_best_f1(
    start: list[str], tmp_path: Path, file: Path, name: str
) -> None:
    """Of questions without an answer too, at the best threshold."""
    assert run([*start, "--validation", str(file)], tmp_path / "run") == 0
    values = f1(tmp_path / "run")
    assert list(values) == [4, 8, 12]
    best = best_step(tmp_path / "run")
    assert values[best] == max(values.values())
    checkpoint = str(tmp_path / "run" / "best")
    assert evaluate.main([checkpoint, "--question-answering", str(file), "--device", "cpu"]) == 0
    figures = json.loads((tmp_path / "run" / "best" / "evaluation.json").read_text())
    assert figures[f"question_answering_{name}"] == pytest.approx(values[best], abs=1e-4)


@pytest.mark.parametrize(("positions", "longest"), [(512, 384), (256, 256)])
def test_windows_are_by_default_as_long_as_the_services(
    tokenizer: AlbertTokenizer, tmp_path: Path, positions: int, longest: int
) -> None:
    content = json.loads(SQUAD.read_text())
    paragraph = content["data"][0]["paragraphs"][0]
    paragraph["context"] += " " + paragraph["context"]
    file = tmp_path / "long.json"
    file.write_text(json.dumps(content))
    length = questions_of(tmp_path).window_length(positions)
    windows = question_examples([file], tokenizer, length=length)
    assert max(len(window.ids) for window in windows) == longest
    assert max(window.target[1] for window in windows) > 127


def questions_of(folder: Path, **values: Any) -> FinetuneConfig:
    return settle(
        FinetuneConfig(
            initialize_from="x", output=folder, question_answering=(SQUAD,), steps=1, **values
        )
    )


def test_the_loss_can_decide(start: list[str], tmp_path: Path) -> None:
    assert run([*start, "--validation", str(SQUAD), "--metric", "loss"], tmp_path / "run") == 0
    losses = validations(tmp_path / "run", "question-answering", "loss")
    assert losses[best_step(tmp_path / "run")] == min(losses.values())
    assert f1(tmp_path / "run") == {}
