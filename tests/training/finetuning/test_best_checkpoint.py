"""The best checkpoint is selected by one figure of one set of texts, and is not lost."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.training.support import RACE, best_step, run_command, validations
from training.finetune import main
from training.finetuning.validating import describe_held_out

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


@pytest.fixture
def start(pretrained: Path, labelled: Path) -> list[str]:
    """A run that keeps one checkpoint beside the best one; its end and validation are not given."""
    return [
        *("--initialize-from", str(pretrained / "checkpoint"), "--length", "64"),
        *("--text-classification", str(labelled), "--batch-size", "20", "--keep", "1"),
        *("--lr", "5e-3", "--precision", "fp32", "--device", "cpu", "--validate-every", "2"),
    ]


def test_other_figures_and_other_texts_are_refused(
    start: list[str], labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    """And the best checkpoint stays."""
    texts = tmp_path / "dev.tsv"
    shutil.copy(labelled, texts)
    options = [*start, "--steps", "4", "--validation", str(texts)]
    assert run(options, tmp_path / "run") == 0
    best = best_step(tmp_path / "run")
    capsys.readouterr()
    by_accuracy = describe_held_out("accuracy", [texts])
    by_loss = describe_held_out("loss", [texts])

    assert run([*options, "--steps", "6", "--metric", "loss"], tmp_path / "run") == 1
    assert capsys.readouterr().err == refused(by_accuracy, by_loss)
    text = texts.read_text()
    texts.write_text(text.replace("\t1", "\t0", 1))  # as many bytes
    assert run([*options, "--steps", "6"], tmp_path / "run") == 1
    corrected = describe_held_out("accuracy", [texts])
    assert capsys.readouterr().err == refused(by_accuracy, corrected)
    assert best_step(tmp_path / "run") == best
    assert (tmp_path / "run/best/model.safetensors").is_file()

    elsewhere = tmp_path / "elsewhere" / "dev.tsv"
    elsewhere.parent.mkdir()
    elsewhere.write_text(text)
    more = ("--validation", str(elsewhere), "--metric", "accuracy")
    assert run([*options, *more], tmp_path / "run") == 0


def refused(known: str, now: str) -> str:
    return (
        f"error: the run selects its best checkpoint by {known}, not {now}; resume it with the "
        "same --metric and --validation, or give another --output\n"
    )


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
    assert min(losses.values()) == losses[2]
    assert best_step(folder) == 2


def test_a_folder_is_known_by_its_content(tmp_path: Path) -> None:
    shutil.copytree(RACE, tmp_path / "race")
    before = describe_held_out("accuracy", [RACE])
    assert before.startswith("accuracy of race (content ")
    assert describe_held_out("accuracy", [tmp_path / "race"]) == before
    (tmp_path / "race" / "train" / "more.txt").write_text("{}")
    assert describe_held_out("accuracy", [tmp_path / "race"]) == before
    (tmp_path / "race" / "dev" / "more.txt").write_text("{}")
    assert describe_held_out("accuracy", [tmp_path / "race"]) != before
