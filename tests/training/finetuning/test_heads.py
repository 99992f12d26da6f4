"""Heads of a run: stored in the checkpoint, new, or fitted; few texts train the encoder first."""

from __future__ import annotations

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
    read_validations,
    run_command,
    write,
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


def accuracies(folder: Path) -> dict[int, float]:
    return read_validations(folder, "text-classification", "accuracy")


def options(file: Path) -> list[str]:
    return [
        *("--initialize-from", str(START), "--text-classification", str(file)),
        *("--label-column", "category", "--device", "cpu", "--precision", "fp32"),
    ]


@pytest.fixture(scope="module")
def intents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `--head-only` on the default model. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("intents") / "run"
    assert run(options(BANKING / "train.csv"), folder, "--head-only") == 0
    return folder


def test_fitting_a_head_leaves_the_encoder_unchanged(intents: Path) -> None:
    """`transformers` computes the same logits with the fitted head."""
    before, after = read_weights(START), read_weights(intents / "best")
    encoder = [name for name in before if ".embeddings." in name or ".encoder." in name]
    assert all(torch.equal(before[name], after[name]) for name in encoder)
    assert accuracies(intents)[0] > 0.8
    assert read_validations(intents, "text-classification", "loss")[0] < 0.5
    our = load_checkpoint(intents / "best").eval()
    assert "sentence-order" not in our.tasks  # the pooler has changed
    hf = hf_load("AlbertForSequenceClassification", intents / "best")
    batch = ragged()
    with torch.no_grad():
        logits = {"text-classification": our_logits(our, batch)["text-classification"]}
        assert_close(logits, hf_logits(hf, batch), 1e-4)


def test_the_fitted_head_is_the_best_checkpoint_if_training_makes_it_worse(
    intents: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The learning rate is so high that it ruins the encoder."""
    ruinous_steps = ("--steps", "2", "--lr", "1", "--adamw-lr", "1", "--schedule", "linear")
    folder = tmp_path / "run"
    assert run(options(BANKING / "train.csv"), folder, *ruinous_steps) == 0
    by_step = accuracies(folder)
    assert list(by_step) == [0, 2]
    assert by_step[0] == accuracies(intents)[0] > by_step[2]
    assert best_step(folder) == 0
    output = capsys.readouterr().out
    assert "To export" not in output
    assert "24 of 240 texts are held out for validation" in output


def excerpt(name: str, folder: Path) -> Path:
    """Write the first five texts of two labels."""
    header, *lines = (BANKING / name).read_text().splitlines()
    rows = [header]
    for label in ("card_arrival", "top_up_failed"):
        rows += [line for line in lines if line.endswith(f",{label}")][:5]
    return write(folder / name, "\n".join(rows))


def test_few_texts_train_the_encoder_before_the_head(tmp_path: Path, capsys: Capture) -> None:
    train, dev = (excerpt(name, tmp_path) for name in ("train.csv", "dev.csv"))
    assert run(options(train), tmp_path / "run", "--validation", str(dev)) == 0
    output = capsys.readouterr().out
    assert "10 texts of 2 labels are few" in output
    assert "separate the labels in 50 steps" in output
    assert f"run: albert-serve export {tmp_path / 'run' / 'best'} " in output
    assert best_step(tmp_path / "run") == 0
    assert accuracies(tmp_path / "run")[0] > 0.8
    before, after = read_weights(START), read_weights(tmp_path / "run" / "best")
    encoder = [name for name in before if ".encoder." in name]
    assert not any(torch.equal(before[name], after[name]) for name in encoder)


def test_the_contrastive_loss_is_that_of_khosla_et_al() -> None:
    """The terms of each text that shares its label are computed in loops."""
    rows_CH = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = [0, 0, 1, 0, 2]
    cosines = (F.normalize(rows_CH, dim=-1) @ F.normalize(rows_CH, dim=-1).T).numpy()
    terms = []
    for i in (0, 1, 3):
        others = [j for j in range(5) if j != i]
        positives = [j for j in others if labels[j] == labels[i]]
        total = np.log(sum(np.exp(20 * cosines[i, j]) for j in others))
        terms.append(np.mean([total - 20 * cosines[i, j] for j in positives]))
    loss = contrastive_loss(rows_CH, torch.tensor(labels))
    assert loss.item() == pytest.approx(np.mean(terms))


def test_the_same_fraction_of_each_label_is_held_out(capsys: Capture) -> None:
    """Texts whose label no other text has are not held out. Equal texts are in the same split."""
    labels = [0] * 100 + [1] * 50 + list(range(2, 12))
    texts = [LabelledText(text=str(n), pair=None, label=k) for n, k in enumerate(labels)]
    splits = hold_out(texts, 0.2)
    assert Counter(text.label for text in splits[VALIDATION]) == {0: 20, 1: 10}
    assert len(splits[TRAINING]) + len(splits[VALIDATION]) == len(texts)
    assert hold_out(texts, 0.2) == splits
    assert hold_out([*texts, *texts], 0.2) == {name: part * 2 for name, part in splits.items()}
    assert "160 of 320 texts are duplicates." in capsys.readouterr().out
    assert len(hold_out(texts[:50], 0.2)[VALIDATION]) == 10
    assert VALIDATION not in hold_out(texts[:49], 0.2)
    many = [LabelledText(text=str(n), pair=None, label=n % 2) for n in range(4010)]
    assert len(hold_out(many, 0.5)[VALIDATION]) == 2000


HEAD: Task = "text-classification"
NAMED_HEAD: Task = "text-classification/other"


def save_and_open(folder: Path, labels: Sequence[str] = ("a", "b", "c"), **values: Any) -> Start:
    """Save and open a checkpoint with a classifier of these labels."""
    save_checkpoint(our_model(TINY, ("fill-mask", HEAD)), folder, extra_config=label_keys(labels))
    return Start.open(folder, FinetuneConfig(output=folder, **{"length": 16, **values}))


def output_weight(model: AlbertForTasks) -> torch.Tensor:
    weight: torch.Tensor = model.state_dict()[f"heads.{HEAD}.output.weight"]
    return weight


@pytest.mark.parametrize(
    ("stored_labels", "labels", "order"),
    [
        ("good fair bad", "BAD fair Good", [2, 1, 0]),
        ("good fair bad", "fair bad good", [1, 2, 0]),
        ("good fair bad", "good fair", None),
        ("good fair bad", "good fair awful", None),
        ("3 2 1", "1 2 3", None),
    ],
)
def test_a_stored_classifier_is_used_if_its_labels_have_the_same_names(
    tmp_path: Path, capsys: Capture, stored_labels: str, labels: str, order: list[int] | None
) -> None:
    """Case and order may differ. With other labels, a new classifier replaces the stored one.

    A number may mean something else in other data.
    """
    start, keys = save_and_open(tmp_path, stored_labels.split()), label_keys(labels.split())
    assert new_classifiers(start, {HEAD: keys}) == ([] if order else [HEAD])
    new, replaced = (", ".join(text.split()) for text in (labels, stored_labels))
    line = f"A new classifier of {new} replaces the classifier of {replaced}.\n"
    assert capsys.readouterr().out == ("" if order else line)
    stored = output_weight(our_model(TINY, ("fill-mask", HEAD)))
    weight = output_weight(load_start(start, [HEAD], {HEAD: keys}))
    if order:
        assert torch.equal(weight, stored[order])
    else:
        assert not torch.isin(weight, stored).any()


@pytest.mark.parametrize("task", ["multiple-choice", "token-classification"])
def test_a_head_of_another_task_replaces_all_text_classifiers(
    tmp_path: Path, capsys: Capture, task: Task
) -> None:
    folder, keys = tmp_path / "both", {NAMED_HEAD: label_keys(["a", "b"])}
    save_checkpoint(load_start(save_and_open(tmp_path), [NAMED_HEAD], keys), folder)
    start = Start.open(folder, FinetuneConfig(output=folder, length=16))
    assert NAMED_HEAD in load_start(start, [HEAD], {HEAD: label_keys(["a", "b"])}).tasks
    new_keys = {task: label_keys(["x", "y", "z"])} if task == "token-classification" else {}
    model = load_start(start, [task], new_keys)
    assert set(model.tasks) == {"fill-mask", task}
    assert capsys.readouterr().out.splitlines() == [
        f"The checkpoint's named classifiers are removed: {NAMED_HEAD}.",
        f"The checkpoint's {HEAD} head is replaced by a {task} head.",
    ]


@pytest.mark.parametrize(
    ("option", "data"),
    [
        ("length", "pretraining"),
        ("order_length", "pretraining"),
        ("length", "question_answering"),
    ],
)
def test_the_length_is_from_8_to_the_positions_of_the_model(
    tmp_path: Path, option: str, data: str
) -> None:
    values: dict[str, Any] = {data: ["a.txt"]}
    for values[option] in (8, 16):
        save_and_open(tmp_path, **values)
    for values[option] in (7, 17):
        flag = f"--{option.replace('_', '-')} {values[option]}"
        message = f"{flag} is not between 8 and the model's 16 positions"
        with pytest.raises(RunError, match=message):
            save_and_open(tmp_path, **values)
