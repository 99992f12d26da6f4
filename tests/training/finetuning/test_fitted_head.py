"""A run begins with a head fitted on the frozen encoder, or on one that few texts have trained."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

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
from training.tasks.classification.fitted_head import contrastive_loss

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]
START = ROOT / "models" / "albert-small-en"
BANKING = ROOT / "tests" / "data" / "banking77"
run = partial(run_command, main)
accuracies = partial(validations, task="text-classification", figure="accuracy")


def options(file: Path, *labels: str, start: Path = START) -> list[str]:
    return [
        *("--initialize-from", str(start), "--text-classification", str(file)),
        *("--label-column", *labels, "--device", "cpu", "--precision", "fp32"),
    ]


@pytest.fixture(scope="module")
def intents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `--head-only` on the shipped model. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("intents") / "run"
    assert run(options(BANKING / "train.csv", "category"), folder, "--head-only") == 0
    return folder


def test_the_fitted_head_leaves_the_encoder_as_it_is(intents: Path) -> None:
    """And `transformers` reads it: the fit is of the function that is served."""
    before, after = read_weights(START), read_weights(intents / "best")
    encoder = [name for name in before if ".embeddings." in name or ".encoder." in name]
    assert all(torch.equal(before[name], after[name]) for name in encoder)
    assert accuracies(intents)[0] > 0.8
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
    figures = accuracies(folder)
    assert list(figures) == [0, 2]
    assert figures[0] == accuracies(intents)[0] > figures[2]
    assert best_step(folder) == 0
    lines = capsys.readouterr().out
    assert "To export" not in lines
    assert "24 of 240 texts are held out for validation" in lines


def test_a_further_classifier_is_fitted_on_the_pooler_of_the_others(
    intents: Path, tmp_path: Path
) -> None:
    data = options(BANKING / "train.csv", "category", start=intents / "best")
    assert run(["--head", "copy", *data], tmp_path / "run", "--head-only") == 0
    before, after = read_weights(intents / "best"), read_weights(tmp_path / "run" / "best")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert validations(tmp_path / "run", "text-classification/copy", "accuracy")[0] > 0.8


@pytest.mark.parametrize(
    ("problem", "columns", "figure"),
    [
        ("regression", ["card"], "pearson"),
        ("multi_label_classification", ["card", "other"], "micro_f1"),
    ],
)
def test_scores_and_several_labels_are_fitted(
    problem: str, columns: list[str], figure: str, tmp_path: Path
) -> None:
    """Whether a text speaks of a card, by a model that was never trained to say so."""
    rows = (BANKING / "train.csv").read_text().splitlines()[1:]
    file, lines = tmp_path / "data.csv", ["text,card,other"]
    for text, _, label in (row.rpartition(",") for row in rows):
        lines.append(f"{text},{int('card' in label)},{int('card' not in label)}")
    file.write_text("\n".join(lines))
    words = ("--head-only", "--problem-type", problem)
    assert run(options(file, *columns), tmp_path / "run", *words) == 0
    assert validations(tmp_path / "run", "text-classification", figure)[0] > 0.6


def excerpt(name: str, folder: Path) -> Path:
    """Write five texts of each of two labels."""
    with (BANKING / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "category"])
        writer.writeheader()
        for label in ("card_arrival", "top_up_failed"):
            writer.writerows([row for row in rows if row["category"] == label][:5])
    return folder / name


def test_few_texts_train_the_encoder_and_then_fit_the_head(tmp_path: Path, capsys: Capture) -> None:
    train, dev = (excerpt(name, tmp_path) for name in ("train.csv", "dev.csv"))
    words = ("--validation", str(dev))
    assert run(options(train, "category"), tmp_path / "run", *words) == 0
    assert "10 texts of 2 labels are few" in capsys.readouterr().out
    assert best_step(tmp_path / "run") == 0
    assert accuracies(tmp_path / "run")[0] > 0.8
    before, after = read_weights(START), read_weights(tmp_path / "run" / "best")
    changed = [name for name in before if ".encoder." in name]
    assert not any(torch.equal(before[name], after[name]) for name in changed)


def test_the_loss_is_that_of_all_pairs_of_a_batch() -> None:
    """Of each text that shares its label: the mean of Khosla et al.'s terms, by loops."""
    rows_CH = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = [0, 0, 1, 0, 2]
    cosines = (F.normalize(rows_CH, dim=-1) @ F.normalize(rows_CH, dim=-1).T).numpy()
    terms = []
    for i in (0, 1, 3):
        others = [j for j in range(5) if j != i]
        total = np.log(sum(np.exp(20 * cosines[i, j]) for j in others))
        terms.append(
            np.mean([total - 20 * cosines[i, j] for j in others if labels[j] == labels[i]])
        )
    loss = contrastive_loss(rows_CH, torch.tensor(labels))
    assert loss.item() == pytest.approx(np.mean(terms))


def test_held_out_texts_have_the_same_part_of_each_label() -> None:
    """But for a label of a single text, which is to be learnt."""
    labels = [0] * 100 + [1] * 50 + [2]
    texts = [LabelledText(text=str(n), pair=None, label=k) for n, k in enumerate(labels)]
    divided = hold_out(texts, 0.2)
    assert Counter(each.label for each in divided[VALIDATION]) == {0: 20, 1: 10}
    assert len(divided[TRAINING]) + len(divided[VALIDATION]) == len(texts)
    assert hold_out(texts, 0.2) == divided
    assert len(hold_out(texts[:50], 0.2)[VALIDATION]) == 10
    assert VALIDATION not in hold_out(texts[:49], 0.2)
    many = [LabelledText(text=str(n), pair=None, label=n % 2) for n in range(4010)]
    assert len(hold_out(many, 0.5)[VALIDATION]) == 2000


def test_equal_texts_are_on_one_side(capsys: Capture) -> None:
    """Whatever their case, white space and form of Unicode; a pair is equal in both texts."""
    forms = ("Caf\u00e9 {} is good", "cafe\u0301  {} IS good ", "CAF\u00c9 {} is good")
    texts = [
        LabelledText(text=form.format(n), pair="b", label=n % 2)
        for n in range(60)
        for form in forms
    ]
    divided = hold_out([*texts, replace(texts[0], pair="other")], 0.2)
    assert "120 of 181 texts are duplicates" in capsys.readouterr().out
    numbers = {
        split: [text.text.split()[1] for text in its if text.pair == "b"]
        for split, its in divided.items()
    }
    assert set(numbers[TRAINING]).isdisjoint(numbers[VALIDATION])
    assert set(Counter(numbers[VALIDATION]).values()) == {3}
