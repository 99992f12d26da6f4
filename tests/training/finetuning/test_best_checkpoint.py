"""The best checkpoint is selected by one figure of one set of texts, and is not lost."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.training.support import best_step, run_command, validations
from training.commands.finetune import main

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


@pytest.fixture
def start(classifier: Path, labelled: Path) -> list[str]:
    """A run that keeps one checkpoint beside the best one; its end and validation are not given."""
    return [
        *("--initialize-from", str(classifier), "--length", "64"),
        *("--text-classification", str(labelled), "--labels", "negative", "positive"),
        *("--batch-size", "20", "--keep", "1"),
        *("--lr", "5e-3", "--precision", "fp32", "--device", "cpu", "--validate-every", "2"),
    ]


def test_the_best_of_other_texts_is_refused(
    start: list[str], labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    """By their content, wherever they are; and the best checkpoint stays."""
    texts, folder = tmp_path / "dev.tsv", tmp_path / "run"
    shutil.copy(labelled, texts)
    options = [*start, "--steps", "4", "--validation", str(texts)]
    assert run(options, folder) == 0
    best = best_step(folder)
    text = texts.read_text()
    texts.write_text(text.replace("\t1", "\t0", 1))  # as many bytes
    assert run([*options, "--steps", "6"], folder) == 1
    error = capsys.readouterr().err
    assert "error: the run selects its best checkpoint by accuracy of dev.tsv (content " in error
    assert best_step(folder) == best
    assert (folder / "best/model.safetensors").is_file()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "dev.tsv").write_text(text)
    assert run(options, folder, "--validation", str(tmp_path / "elsewhere" / "dev.tsv")) == 0


def test_training_without_validation_keeps_the_best_until_there_is_another(
    start: list[str], labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    """On texts with the other label, training makes the loss worse."""
    others = tmp_path / "others.tsv"
    flipped = {"0": "1", "1": "0"}
    lines = labelled.read_text().splitlines()
    others.write_text("\n".join(line[:-1] + flipped.get(line[-1], line[-1]) for line in lines))
    folder, held_out = tmp_path / "run", ("--validation", str(others), "--metric", "loss")
    assert run(start, folder, "--steps", "2", *held_out) == 0
    assert run(start, folder, "--steps", "5") == 0
    assert best_step(folder) == 2
    assert (folder / "best/model.safetensors").is_file()
    other = ("--validation", str(others), "--metric", "accuracy")
    assert run(start, folder, "--steps", "7", *other) == 1
    assert "the run selects its best checkpoint by loss of " in capsys.readouterr().err
    assert run(start, folder, "--steps", "7", *held_out) == 0
    losses = validations(folder, "text-classification", "loss")
    assert list(losses) == [2, 6, 7]
    assert losses[best_step(folder)] == min(losses.values())
