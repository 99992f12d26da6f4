"""A run's model: the checkpoint's weights, with the heads of the run's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.support import TINY, our_model
from training.errors import RunError
from training.finetuning.config import FinetuneConfig
from training.finetuning.model import Start, load_start, new_classifiers
from training.model.checkpoint import label_keys, save_checkpoint
from training.model.heads import AlbertForTasks, Task

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
        ("good fair bad", [0, 1, 2]),
        ("BAD fair Good", [2, 1, 0]),
        ("fair bad good", [1, 2, 0]),
        ("good fair", None),
        ("good fair bad worse", None),
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


@pytest.mark.parametrize("names", ["0 1 2", "LABEL_0 LABEL_1 LABEL_2", "0.5 -1 2"])
def test_numbers_have_no_meaning_of_their_own(tmp_path: Path, names: str) -> None:
    start, keys = opened(tmp_path, names.split()), label_keys(names.split())
    assert new_classifiers(start, {HEAD: keys}) == [HEAD]
    scored = {**label_keys(["good", "fair", "bad"]), "problem_type": "regression"}
    assert new_classifiers(opened(tmp_path, ("good", "fair", "bad")), {HEAD: scored}) == [HEAD]


def test_a_first_classifier_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = opened(tmp_path)
    assert new_classifiers(start, {OTHER: label_keys(["a", "b"])}) == [OTHER]
    model = load_start(start, [OTHER], {OTHER: label_keys(["a", "b"])})
    assert dict(model.tasks) == {"fill-mask": TINY.vocab_size, HEAD: 3, OTHER: 2}
    assert capsys.readouterr().out == ""


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


def test_the_sizes_are_the_checkpoints_with_the_runs_positions_and_dropout(tmp_path: Path) -> None:
    start = opened(tmp_path, length=8, max_positions=12, dropout=0.25, classifier_dropout=0.5)
    model = load_start(start, [], {})
    assert model.config == start.architecture
    sizes = model.config
    assert (sizes.max_positions, sizes.hidden_size) == (12, TINY.hidden_size)
    dropouts = (sizes.hidden_dropout, sizes.attention_dropout, sizes.classifier_dropout)
    assert dropouts == (0.25, 0.25, 0.5)
    positions = our_model(TINY, ("fill-mask", HEAD)).state_dict()[
        "albert.embeddings.position.weight"
    ]
    got = model.state_dict()["albert.embeddings.position.weight"]
    assert torch.equal(got, positions[:12])


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


def test_the_default_length_of_questions_is_cut_to_the_models_positions(tmp_path: Path) -> None:
    """Alone; a length that is given, or that of other tasks, is an error."""
    opened(tmp_path, length=None, question_answering=["a.json"])
    for values in ({"length": 17}, {"length": None, "embeddings": ["a.csv"]}):
        with pytest.raises(RunError, match="--length"):
            opened(tmp_path, question_answering=["a.json"], **values)
