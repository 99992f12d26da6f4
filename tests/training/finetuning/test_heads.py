"""Heads of a run: of the checkpoint, new, or fitted on an encoder that few texts train before."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.training.support import (
    TINY,
    assert_close,
    best_step,
    hf_load,
    hf_logits,
    our_logits,
    our_model,
    ragged,
    run_command,
    validations,
)
from training.commands.finetune import main
from training.errors import RunError
from training.finetuning.config import FinetuneConfig
from training.finetuning.model import Start, load_start, new_classifiers
from training.model.checkpoint import label_keys, load_checkpoint, read_weights, save_checkpoint
from training.model.heads import AlbertForTasks, Task
from training.tasks.base import TRAINING, VALIDATION, hold_out
from training.tasks.classification.files import LabelledText
from training.tasks.classification.fitted_head import contrastive_loss

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]
START = ROOT / "models" / "albert-small-en"
BANKING = ROOT / "tests" / "data" / "banking77"
run = partial(run_command, main)
accuracies = partial(validations, task="text-classification", figure="accuracy")


def options(file: Path) -> list[str]:
    return [
        *("--initialize-from", str(START), "--text-classification", str(file)),
        *("--label-column", "category", "--device", "cpu", "--precision", "fp32"),
    ]


@pytest.fixture(scope="module")
def intents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `--head-only` on the shipped model. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("intents") / "run"
    assert run(options(BANKING / "train.csv"), folder, "--head-only") == 0
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
    assert run(options(BANKING / "train.csv"), folder, *ruin) == 0
    figures = accuracies(folder)
    assert list(figures) == [0, 2]
    assert figures[0] == accuracies(intents)[0] > figures[2]
    assert best_step(folder) == 0
    lines = capsys.readouterr().out
    assert "To export" not in lines
    assert "24 of 240 texts are held out for validation" in lines


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
    assert run(options(train), tmp_path / "run", *words) == 0
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


HEAD: Task = "text-classification"
OTHER: Task = "text-classification/other"


def opened(
    folder: Path,
    labels: Sequence[str] = ("a", "b", "c"),
    heads: tuple[Task, ...] = (),
    **values: Any,
) -> Start:
    """A checkpoint with a classifier of these labels and further heads."""
    model = our_model(TINY, ("fill-mask", HEAD, *heads))
    save_checkpoint(model, folder, extra_config=label_keys(labels))
    return Start.open(folder, FinetuneConfig(output=folder, **{"length": 16, **values}))


def output_of(model: AlbertForTasks) -> torch.Tensor:
    weight: torch.Tensor = model.state_dict()[f"heads.{HEAD}.output.weight"]
    return weight


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        ("BAD fair Good", [2, 1, 0]),
        ("fair bad good", [1, 2, 0]),
        ("good fair", None),
        ("good fair awful", None),
    ],
)
def test_a_classifier_goes_on_if_its_labels_have_the_same_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], labels: str, order: list[int] | None
) -> None:
    """In any case and order; otherwise a new one begins, which is said."""
    start, keys = opened(tmp_path, ("good", "fair", "bad")), label_keys(labels.split())
    assert new_classifiers(start, {HEAD: keys}) == ([] if order else [HEAD])
    names = ", ".join(labels.split())
    line = f"A new classifier of {names} replaces the classifier of good, fair, bad.\n"
    assert capsys.readouterr().out == ("" if order else line)
    stored = output_of(our_model(TINY, ("fill-mask", HEAD)))
    weight = output_of(load_start(start, [HEAD], {HEAD: keys}))
    if order:
        assert torch.equal(weight, stored[order])
    else:
        assert not torch.isin(weight, stored).any()


@pytest.mark.parametrize("task", ["multiple-choice", "token-classification"])
def test_the_one_head_named_classifier_is_replaced_with_the_named_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: Task
) -> None:
    folder = tmp_path / "both"
    save_checkpoint(load_start(opened(tmp_path), [OTHER], {OTHER: label_keys(["a", "b"])}), folder)
    start = Start.open(folder, FinetuneConfig(output=folder, length=16))
    model = load_start(
        start, [task], {task: label_keys(["x", "y", "z"])} if task.startswith("token") else {}
    )
    assert set(model.tasks) == {"fill-mask", task}
    assert capsys.readouterr().out.splitlines() == [
        f"The checkpoint's named classifiers are removed: {OTHER}.",
        f"The checkpoint's {HEAD} head is replaced by a {task} head.",
    ]


@pytest.mark.parametrize("option", ["length", "order_length"])
def test_sequences_have_from_eight_tokens_to_the_models_positions(
    tmp_path: Path, option: str
) -> None:
    values: dict[str, Any] = {"pretraining": ["a.txt"]}
    for values[option] in (8, 16):
        opened(tmp_path, **values)
    for values[option] in (7, 17):
        flag = f"--{option.replace('_', '-')} {values[option]}"
        message = f"{flag} is not between 8 and the model's 16 positions"
        with pytest.raises(RunError, match=message):
            opened(tmp_path, **values)
