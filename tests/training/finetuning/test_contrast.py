"""Few texts of each label: the encoder learns to tell the labels apart, then a head is fitted."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.training.support import best_step, run_command, validations
from training.commands.finetune import main
from training.model.checkpoint import read_weights
from training.tasks.classification.fitted_head import contrastive_loss

ROOT = Path(__file__).parents[3]
START = ROOT / "models" / "albert-small-en"
BANKING = ROOT / "tests" / "data" / "banking77"
LABELS = ("card_arrival", "top_up_failed")
run = partial(run_command, main)


def excerpt(name: str, folder: Path) -> str:
    """Write five texts of each of two labels."""
    with (BANKING / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "category"])
        writer.writeheader()
        for label in LABELS:
            writer.writerows([row for row in rows if row["category"] == label][:5])
    return str(folder / name)


def test_few_texts_train_the_encoder_and_then_fit_the_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, dev = (excerpt(name, tmp_path) for name in ("train.csv", "dev.csv"))
    options = ["--initialize-from", str(START), "--text-classification", train]
    options += ["--label-column", "category", "--validation", dev, "--device", "cpu"]
    assert run(options, tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "10 texts of 2 labels are few" in printed
    assert "--epochs trains the classifier instead" in printed
    assert best_step(tmp_path / "run") == 0
    assert validations(tmp_path / "run", "text-classification", "accuracy")[0] > 0.8
    before, after = read_weights(START), read_weights(tmp_path / "run" / "best")
    changed = [name for name in before if ".encoder." in name]
    assert not any(torch.equal(before[name], after[name]) for name in changed)
    assert run(options, tmp_path / "other", "--seed", "1") == 0
    other = read_weights(tmp_path / "other" / "best")
    assert not any(torch.equal(other[name], after[name]) for name in changed)


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
