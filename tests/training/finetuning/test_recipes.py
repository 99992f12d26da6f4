"""Hyperparameters are the recipe's where they are not given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.support import SQUAD, SQUAD_V2
from training.commands.finetune import FinetuneConfig
from training.finetuning.recipes import PAPER

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


def settled(**values: Any) -> FinetuneConfig:
    """The settings of a run on questions or texts, whose own files are not read."""
    end = {} if values.get("recipe") or "steps" in values else {"steps": 1}
    output = Path("nowhere")
    return FinetuneConfig(initialize_from="x", output=output, **{**end, **values})


@pytest.fixture
def rte(tmp_path: Path) -> dict[str, Any]:
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("index\tsentence1\tsentence2\tlabel\n")
    return {"task": "rte", "data": tmp_path, "recipe": "paper"}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_values(name: str) -> None:
    """All rows of table 14."""
    rows = {row.split()[0]: row.split()[1:] for row in TABLE_14.strip().splitlines()}
    assert rows.keys() == PAPER.keys()
    got = PAPER[name]
    values = [got["lr"], *got["batch_size"], got["dropout"], got["classifier_dropout"]]
    values += [got["steps"], got["warmup"] * got["steps"], got["length"]]
    assert values == pytest.approx([*map(float, rows[name])])
    assert (got["optimizer"], got["schedule"]) == ("adamw", "linear")


@pytest.mark.parametrize("end", [{"epochs": 3.0}, {"budget": 60.0}])
def test_another_end_replaces_the_recipes_steps(rte: dict[str, Any], end: dict[str, float]) -> None:
    settings = settled(**rte, **end)
    assert settings.steps is None
    assert settings.warmup == 0.25


def test_questions_have_the_recipe_of_their_version() -> None:
    """Of v2.0 if some have no answer."""
    two = settled(question_answering=[SQUAD, SQUAD_V2], recipe="paper")
    assert (two.steps, two.length, two.question_length) == (8144, 512, 512)
    one = settled(question_answering=[SQUAD], recipe="paper")
    assert (one.steps, one.length, one.question_length) == (3649, 384, 384)
    assert settled(question_answering=[SQUAD], recipe="paper", length=64).question_length == 64
