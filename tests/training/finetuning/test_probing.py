"""A run begins with a head fitted on the frozen encoder, and is never worse than it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.training.support import (
    assert_close,
    best_step,
    hf_load,
    hf_logits,
    our_logits,
    ragged,
    run_command,
    validations,
)
from training.commands.finetune import main
from training.model.checkpoint import load_checkpoint, read_weights
from training.tasks.base import TRAINING, VALIDATION, hold_out
from training.tasks.classification.files import LabelledText

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]
START = ROOT / "models" / "albert-small-en"
BANKING = ROOT / "tests" / "data" / "banking77"
run = partial(run_command, main)


@pytest.fixture(scope="module")
def intents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `--head-only` on the shipped model. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("intents") / "run"
    assert run(options(BANKING / "train.csv", "category"), folder, "--head-only") == 0
    return folder


def options(file: Path, label: str) -> list[str]:
    return [
        *("--initialize-from", str(START), "--text-classification", str(file)),
        *("--label-column", label, "--device", "cpu", "--precision", "fp32"),
    ]


def test_the_fitted_head_leaves_the_encoder_as_it_is(intents: Path) -> None:
    """And `transformers` reads it: the fit is of the function that is served."""
    before, after = read_weights(START), read_weights(intents / "best")
    encoder = [name for name in before if ".embeddings." in name or ".encoder." in name]
    assert all(torch.equal(before[name], after[name]) for name in encoder)
    assert validations(intents, "text-classification", "accuracy")[0] > 0.8
    ours = load_checkpoint(intents / "best").eval()
    theirs = hf_load("AlbertForSequenceClassification", intents / "best")
    batch = ragged()
    with torch.no_grad():
        logits = {"text-classification": our_logits(ours, batch)["text-classification"]}
        assert_close(logits, hf_logits(theirs, batch), 1e-4)


def test_training_goes_on_from_the_fitted_head_and_keeps_the_better(
    intents: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A rate that ruins the encoder leaves the fitted head as the best."""
    ruin = ("--steps", "2", "--lr", "1", "--adamw-lr", "1", "--schedule", "linear")
    folder = tmp_path / "run"
    assert run(options(BANKING / "train.csv", "category"), folder, *ruin) == 0
    figures = validations(folder, "text-classification", "accuracy")
    assert list(figures) == [0, 2]
    assert figures[0] == validations(intents, "text-classification", "accuracy")[0] > figures[2]
    assert best_step(folder) == 0
    lines = capsys.readouterr().out
    assert "to export" not in lines
    assert "24 of 240 texts are held out for validation" in lines
    assert "of the weights before the first step" in lines


def test_a_further_classifier_is_fitted_on_the_pooler_of_the_others(
    intents: Path, tmp_path: Path
) -> None:
    start = ("--initialize-from", str(intents / "best"), "--head", "copy", "--head-only")
    data = ("--text-classification", str(BANKING / "train.csv"), "--label-column", "category")
    assert main([*start, *data, "--output", str(tmp_path / "run"), "--device", "cpu"]) == 0
    before, after = read_weights(intents / "best"), read_weights(tmp_path / "run" / "best")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert validations(tmp_path / "run", "text-classification/copy", "accuracy")[0] > 0.8


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_scores_and_several_labels_are_fitted(problem: str, tmp_path: Path) -> None:
    """Whether a text speaks of a card, by a model that was never trained to say so."""
    rows = (BANKING / "train.csv").read_text().splitlines()[1:]
    file = tmp_path / "data.csv"
    lines = [f"{row.rpartition(',')[0]},{int('card' in row.rpartition(',')[2])}" for row in rows]
    file.write_text("\n".join(["text,card", *lines]))
    words = ("--head-only", "--problem-type", problem)
    columns = options(file, "card")
    if problem == "multi_label_classification":
        file.write_text(
            "\n".join(["text,card,other", *(f"{each},{1 - int(each[-1])}" for each in lines)])
        )
        columns = [*options(file, "card"), "--label-column", "card", "other"]
    assert run(columns, tmp_path / "run", *words) == 0
    figure = "pearson" if problem == "regression" else "micro_f1"
    assert validations(tmp_path / "run", "text-classification", figure)[0] > 0.6


def test_held_out_texts_have_the_same_part_of_each_label() -> None:
    """But for a label of a single text, which is to be learnt."""
    labels = [0] * 100 + [1] * 50 + [2]
    texts = [LabelledText(text=str(n), pair=None, label=k) for n, k in enumerate(labels)]
    divided = hold_out(texts, 0.2)
    assert Counter(each.label for each in divided[VALIDATION]) == {0: 20, 1: 10}
    assert len(divided[TRAINING]) + len(divided[VALIDATION]) == len(texts)
    assert hold_out(texts, 0.2) == divided
    assert VALIDATION not in hold_out(texts[:49], 0.2)


def test_equal_texts_are_on_one_side(capsys: Capture) -> None:
    """Whatever their case, white space and form of Unicode; a pair is equal in both texts."""
    forms = ("Caf\u00e9 {} is good", "cafe\u0301  {} IS good ", "CAF\u00c9 {} is good")
    texts = [
        LabelledText(text=form.format(n), pair="b", label=n % 2)
        for n in range(60)
        for form in forms
    ]
    divided = hold_out([*texts, replace(texts[0], pair="other")], 0.2)
    assert "120 of 181 texts equal another one" in capsys.readouterr().out
    numbers = {
        split: [text.text.split()[1] for text in its if text.pair == "b"]
        for split, its in divided.items()
    }
    assert set(numbers[TRAINING]).isdisjoint(numbers[VALIDATION])
    assert set(Counter(numbers[VALIDATION]).values()) == {3}
