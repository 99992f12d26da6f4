"""Several processes finetune as one does: each task, and its validation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training.processes import Ended, run_in_process, run_world
from tests.training.support import SQUAD, WIKI, best_step, checkpoint_state, moved, read_metrics

PROGRAM = "training.commands.finetune"
STEPS = 6
# What sets the runs apart is the order of sums. Measured in fp32 after these 6 steps, which move
# weights by 1e-2 and more: 2e-7 to 1e-6 between weights.
CLOSE = 1e-5
# The biases of scores that are compared by a softmax have no gradient but that of rounding.
WITHOUT_GRADIENT = (
    "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.key.bias",
    "qa_outputs.bias",
)

alone = partial(run_in_process, program=PROGRAM)
together = partial(run_world, program=PROGRAM)


@pytest.fixture
def exact(start: list[str]) -> list[str]:
    """A run of six steps without dropout; its data is left to be named."""
    rates = ("--optimizer", "adamw", "--lr", "3e-3", "--dropout", "0", "--classifier-dropout", "0")
    return [*start, *rates, "--report-every", "1", "--keep", "20"]


def check_ended(ended: Sequence[Ended]) -> None:
    """The main process alone says something."""
    assert [each.status for each in ended] == [0] * len(ended), [each.err for each in ended]
    for other in ended[1:]:
        assert (other.out, other.err) == ("", "")


def check_close(one: Path, other: Path) -> None:
    """Two runs have the same curves and validations, and weights, up to their last digits."""
    lines = [read_metrics(folder) for folder in (one, other)]
    assert len(lines[0]) >= STEPS
    for mine, theirs in zip(*lines, strict=True):
        for name in mine.keys() - {"elapsed_s", "tokens_per_s"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (mine, name)
    tensors = [load_file(folder / "checkpoint" / "model.safetensors") for folder in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        if name not in WITHOUT_GRADIENT:
            assert (tensor - tensors[1][name]).abs().max() < CLOSE, name


def test_two_processes_train_as_one_does(exact: list[str], tmp_path: Path) -> None:
    """Two classifiers, of several labels and of a number, beside questions and text.

    The batches do not divide evenly, where the task allows it.
    """
    moods, scores = tmp_path / "moods.jsonl", tmp_path / "scores.csv"
    rows = [("a good game", ["glad"]), ("the war was lost", ["sad"]), ("a city", [])] * 5
    moods.write_text("\n".join(json.dumps({"text": t, "label": names}) for t, names in rows))
    scores.write_text("text,label\n" + "a good game,1\nthe war was lost,-1.5\n" * 6)
    options = [
        *(*exact, "--text-classification", str(moods)),
        *("--problem-type", "multi_label_classification"),
        *("--question-answering", str(SQUAD), "--pretraining", str(WIKI)),
        *("--head", "score", "--text-classification", str(scores), "--problem-type", "regression"),
        *("--batch-size", "7", "5", "3", "4", "--steps", "12"),
    ]
    assert alone(options, tmp_path / "one").status == 0
    check_ended(together(options, tmp_path / "two"))
    check_close(tmp_path / "one", tmp_path / "two")
    assert moved(tmp_path / "one") > 5e-3


def test_texts_are_trained_and_validated_as_by_one(
    exact: list[str], labelled: Path, tmp_path: Path
) -> None:
    """Also in other micro-batches; amidst the run and at its end, by a metric of all texts."""
    one, several = tmp_path / "one", tmp_path / "several"
    texts = [*exact, "--text-classification", str(labelled), "--validation", str(labelled)]
    texts += ["--batch-size", "13", "--validate-every", "4", "--metric", "macro_f1"]
    assert alone(texts, one).status == 0
    ended = together(texts, several, "--micro-batch-size", "4")
    check_ended(ended)
    assert "validation of text-classification: loss" in ended[0].out + ended[0].err
    check_close(one, several)
    assert best_step(one) == best_step(several)
    selections = [checkpoint_state(folder)["selection"] for folder in (one, several)]
    assert selections[0] == pytest.approx(selections[1])
