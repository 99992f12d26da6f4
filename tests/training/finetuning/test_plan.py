"""Hyperparameters, record, steps, validation and selection of a run follow from its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.support import SQUAD, SQUAD_V2, TINY
from training.commands.finetune import ClassifierConfig, FinetuneConfig
from training.data.batch import TokenisedExample
from training.data.streams import ExampleStream
from training.errors import RunError
from training.finetuning import tasks
from training.finetuning.model import Start
from training.finetuning.plan import Plan, plan_of
from training.finetuning.recipes import PAPER, hyperparameters_of
from training.finetuning.record import export_command, record_of
from training.loop.distributed import join_world
from training.loop.validation import HEADS_MEAN, Validation
from training.model.heads import Task
from training.tasks.base import TrainingTask
from training.tasks.classification.loss import Classification
from training.tasks.classification.metrics import ValidationMetrics

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


def configured(**values: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"initialize_from": "x", "output": "runs/my run", **values})


def named(head: str, **values: Any) -> ClassifierConfig:
    return ClassifierConfig(head=head, **{"text_classification": "x.csv", **values})


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_values(name: str) -> None:
    """All rows of table 14, and the rest of the original code."""
    rows = {row.split()[0]: row.split()[1:] for row in TABLE_14.strip().splitlines()}
    assert rows.keys() == PAPER.keys()
    got = PAPER[name]
    values = [got["lr"], *got["batch_size"], got["dropout"], got["classifier_dropout"]]
    values += [got["steps"], got["warmup"] * got["steps"], got["length"]]
    assert values == pytest.approx([*map(float, rows[name])])
    assert (got["optimizer"], got["schedule"]) == ("adamw", "linear")
    assert (got["weight_decay"], got["clip_norm"]) == (0.01, 1)


def test_questions_have_the_recipe_of_their_version() -> None:
    """Of v2.0 if some have no answer."""
    two = configured(question_answering=[SQUAD, SQUAD_V2], recipe="paper")
    assert (two.steps, two.length, two.question_length) == (8144, 512, 512)
    one = configured(question_answering=[SQUAD], recipe="paper")
    assert (one.steps, one.length, one.question_length) == (3649, 384, 384)
    assert configured(question_answering=[SQUAD], recipe="paper", length=64).question_length == 64


@pytest.mark.parametrize(
    ("names", "is_started", "values", "expected"),
    [
        ("a b", False, {}, ["", "/b"]),
        ("a b", True, {}, ["/a", "/b"]),
        ("a", False, {"text_classification": "x.csv"}, ["", "/a"]),
    ],
)
def test_the_default_classifier_is_the_first(
    vocab_dir: Path,
    names: str,
    is_started: bool,
    values: dict[str, Any],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without data before `--head`, and without a default classifier in the checkpoint."""
    read: list[str] = []
    monkeypatch.setattr(tasks, "read_classification", lambda config, *_: read.append(config.head))
    stored: dict[Task, int] = {"text-classification": 2} if is_started else {}
    start = Start(folder=vocab_dir, hf={}, heads=stored, architecture=TINY)
    config = configured(heads=tuple(map(named, names.split())), **values)
    with join_world(config.device) as world:
        tasks.read_tasks(config, start, tasks.setup_of(config, start, world))
    assert read == [f"text-classification{end}" for end in expected]


def test_a_run_is_resumed_with_the_options_that_change_what_is_learnt(tmp_path: Path) -> None:
    """Others may change: where it computes and writes, and how it is validated."""
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf()))

    def record(**values: Any) -> dict[str, str]:
        values = {"question_answering": [SQUAD], "pretraining": ["a.txt"], "steps": 9, **values}
        config = configured(**values)
        return record_of(config, hyperparameters_of(config, tmp_path))

    same = record()
    assert same == record(
        output="other",
        threads=3,
        save_every=9.0,
        report_every=1,
        keep=9,
        micro_batch_size=2,
        validation=[SQUAD_V2],
        validate_every=7,
        metric="exact_match",
        precision="bf16",
    )
    changes: list[dict[str, Any]] = [
        {"steps": 8},
        {"lr": 1e-3},
        {"truncation": False},
        {"question_answering": [SQUAD, SQUAD_V2]},
        {"heads": (named("a"),)},
        {"heads": (named("a", labels=["b"]),)},
    ]
    records = [record(**change) for change in changes]
    assert all(one not in [same, *records[:n]] for n, one in enumerate(records))
    assert record(length=128) == {**same, "question_length": "128"}


TEXTS: dict[str, Any] = {"text_classification": "a.csv", "validation": ["b.csv", "c d.csv"]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {**TEXTS, "text_column": "x", "label_column": ["y", "z"]},
            "--text-classification b.csv 'c d.csv' --text-column x --label-column y z",
        ),
        ({"text_classification": "a.csv"}, None),
        ({"question_answering": "a.json", "validation": "b.json"}, "--question-answering b.json"),
        (
            {**TEXTS, "heads": (named("m", **TEXTS),)},
            "--text-classification b.csv 'c d.csv' --head m --text-classification b.csv 'c d.csv'",
        ),
    ],
)
def test_the_command_that_exports_measures_on_the_validation_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str | None
) -> None:
    """There is none without validation files."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "b.csv", "c d.csv"):
        (tmp_path / name).touch()
    command = "albert-serve export 'runs/my run/best' 'bundles/my run' --precision int8"
    assert export_command(configured(**values)) == (words and f"{command} {words}")


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


def plan(*planned: TrainingTask, **values: Any) -> Plan:
    return plan_of(planned, FinetuneConfig(output=Path("run"), **values), {})


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
    ],
)
def test_few_texts_have_a_contrast_unless_the_end_is_given(
    targets: list[int], values: dict[str, Any], expected: bool
) -> None:
    """Few are 16 of each label on average; one label has two or more."""
    planned = plan(classifier(targets), **values)
    assert planned.has_contrast == expected
    assert (planned.progress.num_steps == 0) == expected
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
        ({"epochs": 2.0}, None),
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
