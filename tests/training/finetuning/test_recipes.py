"""Hyperparameters are the recipe's where they are not given."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.training.support import SQUAD, SQUAD_V2, TINY
from training.finetuning.recipes import DEFAULTS, PAPER, with_defaults
from training.finetuning.start import describe_attention
from training.loop.progress import RunError

DATA = {"text_classification", "multiple_choice", "question_answering", "pretraining"}
NAMES = {*DEFAULTS, *PAPER["rte"].options, *DATA, "epochs", "budget", "task", "recipe", "heads"}


def options(**values: Any) -> Namespace:
    return Namespace(**{**dict.fromkeys(NAMES), **values})


def test_the_defaults_without_a_recipe() -> None:
    resolved = vars(with_defaults(options(lr=1e-3)))
    assert {name: resolved[name] for name in DEFAULTS} == {**DEFAULTS, "lr": 1e-3}
    assert resolved["steps"] is resolved["dropout"] is None


def test_the_papers_values() -> None:
    """Two rows of table 14."""
    rte = with_defaults(options(task="rte", recipe="paper"))
    assert (rte.lr, rte.batch_size, rte.dropout, rte.classifier_dropout) == (3e-5, [32], 0.1, 0.1)
    assert (rte.steps, rte.warmup * rte.steps, rte.length) == (800, 200, 512)
    assert (rte.optimizer, rte.schedule) == ("adamw", "linear")
    sst2 = with_defaults(options(task="sst2", recipe="paper"))
    assert (sst2.lr, sst2.batch_size, sst2.dropout) == (1e-5, [32], 0.0)
    assert (sst2.steps, round(sst2.warmup * sst2.steps), sst2.length) == (20935, 1256, 512)


def test_each_value_can_be_given() -> None:
    given: dict[str, Any] = {"lr": 1.0, "batch_size": [4], "dropout": 0.0, "length": 64, "steps": 9}
    resolved = vars(with_defaults(options(task="rte", recipe="paper", **given)))
    assert {name: resolved[name] for name in given} == given


@pytest.mark.parametrize("end", [{"epochs": 3.0}, {"budget": 60.0}])
def test_another_end_replaces_the_recipes_steps(end: dict[str, float]) -> None:
    resolved = with_defaults(options(task="rte", recipe="paper", **end))
    assert resolved.steps is None
    assert resolved.warmup == 0.25


def test_a_recipe_needs_a_task() -> None:
    for more in ({}, {"pretraining": [SQUAD]}, {"heads": [Namespace()]}):
        data = {"question_answering": [SQUAD], **more} if more else {}
        with pytest.raises(RunError, match="--recipe paper differs from task to task; give --task"):
            with_defaults(options(recipe="paper", **data))


def test_questions_have_the_recipe_of_their_version() -> None:
    one = with_defaults(options(question_answering=[SQUAD], recipe="paper"))
    assert (one.lr, one.batch_size, one.steps, one.length) == (5e-5, [48], 3649, 384)
    two = with_defaults(options(question_answering=[SQUAD, SQUAD_V2], recipe="paper"))
    assert (two.lr, two.batch_size, two.steps, two.length) == (3e-5, [48], 8144, 512)


def test_attention_dropout_is_reported_on_a_gpu() -> None:
    drops = replace(TINY, attention_dropout=0.1)
    notice = describe_attention(drops, torch.device("cuda", 0))
    assert notice is not None
    assert notice.startswith(
        "attention dropout 0.1: the GPU's kernel for packed rows has no dropout"
    )
    assert describe_attention(drops, torch.device("cpu")) is None
    assert describe_attention(TINY, torch.device("cuda", 0)) is None
