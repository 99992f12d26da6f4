"""The steps, the validation and the selection of a run follow from its tasks and its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from training.data.batch import TokenisedExample
from training.data.streams import ExampleStream
from training.errors import RunError
from training.finetuning.config import FinetuneConfig
from training.finetuning.plan import Plan, plan_of
from training.loop.validation import HEADS_MEAN, Validation
from training.tasks.base import TrainingTask
from training.tasks.classification.loss import Classification
from training.tasks.classification.metrics import ValidationMetrics


def task(size: int, *, name: str = "token-classification", figure: str = "f1") -> TrainingTask:
    """A task of so many examples, one a step, and its validation."""
    examples = [TokenisedExample(ids=[2, 3], types=[0, 0], target=0)] * size
    stream = ExampleStream(task=name, examples=examples, batch_size=1, row_length=8, seed=0)
    return TrainingTask(
        name=name, streams=[stream], losses={}, metric=figure, validation=Validation()
    )


def classifier(targets: list[int], problem: Any = "single_label_classification") -> Classification:
    """A classifier of two labels, without held-out texts."""
    name = "text-classification"
    metrics = ValidationMetrics(problem=problem, num_labels=2, official=("accuracy",), metric=None)
    examples = [TokenisedExample(ids=[2, 3], types=[0, 0], target=label) for label in targets]
    stream = ExampleStream(task=name, examples=examples, batch_size=8, row_length=8, seed=0)
    return Classification(
        name=name,
        streams=[stream],
        losses={},
        head_name=None,
        names=("a", "b"),
        metrics=metrics,
        examples=examples,
    )


def plan(*tasks: TrainingTask, **values: Any) -> Plan:
    return plan_of(tasks, FinetuneConfig(output=Path("run"), **values), {})


@pytest.mark.parametrize(
    ("steps_an_epoch", "values", "expected"),
    [
        # 1500 steps are 12.5 passes, of which half is rounded to the even number
        (120, {}, 12 * 120),
        (1, {}, 20),
        (1000, {}, 3000),
        (5, {"epochs": 1.5}, 8),
        (5, {"epochs": 2.0, "steps": 9}, 9),
        (5, {"epochs": 2.0, "steps": 11}, 10),
        (5, {"epochs": 2.0, "budget": 9.0}, 10),
        (5, {"steps": 7}, 7),
        (5, {"budget": 9.0}, None),
        (5, {"head_only": True, "text_classification": ["a.csv"]}, 0),
    ],
)
def test_a_run_has_the_steps_of_its_nearer_end(
    steps_an_epoch: int, values: dict[str, Any], expected: int | None
) -> None:
    values.setdefault("validation_split", 0)
    planned = plan(task(steps_an_epoch), **values)
    assert planned.progress.num_steps == expected
    assert planned.progress.budget_s == values.get("budget")
    assert planned.validate_every == steps_an_epoch
    assert plan(task(9), validate_every=2, **values).validate_every == 2


def test_several_tasks_need_an_end_and_are_validated_every_500_steps() -> None:
    tasks = [task(5), task(7, name="question-answering")]
    planned = plan(*tasks, steps=3)
    assert (planned.progress.num_steps, planned.validate_every) == (3, 500)
    for end in ({}, {"epochs": 2.0}, {"epochs": 2.0, "steps": 3}):
        with pytest.raises(RunError, match="epochs is undefined"):
            plan(*tasks, **end)


@pytest.mark.parametrize(
    ("targets", "values", "expected"),
    [
        ([0, 1] * 16, {}, True),
        ([0, 1] * 16 + [0], {}, False),
        ([0, 1], {}, False),
        ([0, 1] * 16, {"steps": 1}, False),
        ([0, 1] * 16, {"epochs": 1.0}, False),
        ([0, 1] * 16, {"budget": 1.0}, False),
        ([0, 1] * 16, {"head_only": True, "text_classification": ["a.csv"]}, False),
    ],
)
def test_few_texts_have_a_contrast_unless_the_end_is_given(
    targets: list[int], values: dict[str, Any], expected: bool
) -> None:
    """Few are 16 of each label on average; one label has two or more."""
    planned = plan(classifier(targets), **values)
    assert planned.has_contrast == expected
    assert (planned.progress.num_steps == 0) == (expected or "head_only" in values)
    assert not plan(classifier(targets, "multi_label_classification"), **values).has_contrast
    assert not plan(classifier(targets), task(3), steps=1).has_contrast


def test_pretraining_shares_its_weight_with_pairs() -> None:
    tasks = [task(5), task(7, name="pretraining")]
    assert plan(*tasks, steps=1).mixture.weights == [1, 1]
    paired = plan(*tasks, steps=1, weights=(1, 4), pretraining=["a"], order_share=0.25)
    assert paired.mixture.weights == [1, 3, 1]
    with pytest.raises(RunError, match=r"--weights \[1.0\] is .*token-classification, pretraining"):
        plan(*tasks, steps=1, weights=1)


@pytest.mark.parametrize(
    ("end", "patience"),
    [
        ({}, 5),
        ({"patience": 2}, 2),
        ({"steps": 9}, None),
        ({"epochs": 2.0}, None),
        ({"budget": 9.0}, None),
        ({"steps": 9, "patience": 2}, 2),
    ],
)
def test_the_default_patience_is_that_of_a_run_without_an_end(
    end: dict[str, Any], patience: int | None
) -> None:
    selection = plan(task(5), **end).selection
    assert selection is not None
    assert (selection.metric, selection.patience) == ("f1", patience)


def test_the_mean_of_several_classifiers_decides() -> None:
    several = [task(5), task(5, name="text-classification/a", figure="accuracy")]
    selection = plan(*several, steps=1).selection
    assert selection is not None
    assert selection.metric == HEADS_MEAN
    for lowest in ("loss", "mse"):
        with pytest.raises(RunError, match=f"--metric {lowest} does not apply to several"):
            plan(*several, task(5, figure=lowest), steps=1)


def test_a_selection_is_known_by_the_content_of_its_texts(tmp_path: Path) -> None:
    """Wherever they are; and by the part of the training texts that is held out."""
    files = [tmp_path / name / "dev.tsv" for name in "abc"]
    for file, text in zip(files, ("x", "x", "y"), strict=True):
        file.parent.mkdir()
        file.write_text(f"text\tlabel\n{text}\t1\n")

    def measured(**values: Any) -> str:
        selection = plan(task(5), steps=1, **values).selection
        assert selection is not None
        return selection.criterion

    texts = [{"text_classification": file, "validation": file} for file in files]
    assert measured(**texts[0]) == measured(**texts[1]) != measured(**texts[2])
    assert measured(**texts[0]).startswith("f1 of dev.tsv (content ")
    for name in ("text_classification", "token_classification"):
        held_out = measured(**{name: files[0]})
        assert held_out.startswith("f1 of 0.1 of dev.tsv (content ")
        assert held_out != measured(**{name: files[2]})


def test_patience_and_a_metric_need_held_out_data() -> None:
    for values in ({"patience": 2}, {"metric": "loss"}):
        with pytest.raises(RunError, match="--patience and --metric need held-out data"):
            plan(classifier([0, 1]), steps=1, **values)
    planned = plan(classifier([0, 1]), steps=1)
    assert (planned.validation, planned.selection) == (None, None)
