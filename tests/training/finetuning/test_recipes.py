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
ENDS = {"epochs", "budget"}
NAMES = {*DEFAULTS, *PAPER["rte"].options, *DATA, *ENDS, "task", "recipe", "heads", "order_share"}


# Of arXiv 1909.11942: LR, BSZ, ALBERT DR, Classifier DR, TS, WS, MSL.
TABLE_14 = """
cola    1e-5   16  0    0.1   5336   320  512
stsb    2e-5   16  0    0.1   3598   214  512
sst2    1e-5   32  0    0.1  20935  1256  512
mnli    3e-5  128  0    0.1  10000  1000  512
qnli    1e-5   32  0    0.1  33112  1986  512
qqp     5e-5  128  0.1  0.1  14000  1000  512
rte     3e-5   32  0.1  0.1    800   200  512
mrpc    2e-5   32  0    0.1    800   200  512
wnli    2e-5   16  0.1  0.1   2000   250  512
squad1  5e-5   48  0    0.1   3649   365  384
squad2  3e-5   48  0    0.1   8144   814  512
race    2e-5   32  0.1  0.1  12000  1000  512
"""


def options(**values: Any) -> Namespace:
    return Namespace(**{**dict.fromkeys(NAMES), **values})


def test_the_defaults_without_a_recipe() -> None:
    resolved = vars(with_defaults(options(lr=1e-3)))
    assert {name: resolved[name] for name in DEFAULTS} == {**DEFAULTS, "lr": 1e-3}
    assert resolved["steps"] is resolved["dropout"] is None


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_values(name: str) -> None:
    """All rows of table 14."""
    rows = {row.split()[0]: row.split()[1:] for row in TABLE_14.strip().splitlines()}
    assert rows.keys() == PAPER.keys()
    data = {"squad1": [SQUAD], "squad2": [SQUAD_V2]}.get(name)
    task = None if data else name
    got = with_defaults(options(task=task, question_answering=data, recipe="paper"))
    warmup = got.warmup * got.steps
    values = [got.lr, *got.batch_size, got.dropout, got.classifier_dropout]
    assert [*values, got.steps, warmup, got.length] == pytest.approx([*map(float, rows[name])])
    assert (got.optimizer, got.schedule) == ("adamw", "linear")


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
    """Of v2.0 if some have no answer."""
    two = with_defaults(options(question_answering=[SQUAD, SQUAD_V2], recipe="paper"))
    assert (two.steps, two.length) == (8144, 512)


def test_the_length_of_windows_is_the_one_that_is_given_or_the_recipes() -> None:
    lengths = [
        with_defaults(options(question_answering=[SQUAD], **given)).question_length
        for given in ({}, {"length": 64}, {"recipe": "paper"}, {"recipe": "paper", "length": 64})
    ]
    assert lengths == [None, 64, 384, 64]


def test_attention_dropout_is_reported_on_a_gpu() -> None:
    drops = replace(TINY, attention_dropout=0.1)
    notice = describe_attention(drops, torch.device("cuda", 0))
    assert notice is not None
    assert notice.startswith(
        "attention dropout 0.1: the GPU's kernel for packed rows has no dropout"
    )
    assert describe_attention(drops, torch.device("cpu")) is None
    assert describe_attention(TINY, torch.device("cuda", 0)) is None
