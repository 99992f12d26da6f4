"""Options determine the hyperparameters, record, steps, validation and selection of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.support import RACE, SQUAD, SQUAD_V2, TINY, write
from training.commands.finetune import ClassifierConfig, FinetuneConfig
from training.data.batch import TokenisedExample
from training.data.collate import Collator
from training.data.examples import ExampleSettings
from training.data.streams import ExampleStream, PackedStream
from training.errors import RunError
from training.finetuning import tasks
from training.finetuning.model import Start, extra_config
from training.finetuning.plan import Plan, plan_of
from training.finetuning.recipes import PAPER, hyperparameters_of
from training.finetuning.record import export_command, record_of
from training.loop.distributed import join_world
from training.loop.validation import Validation
from training.model.checkpoint import label_keys
from training.model.heads import Task
from training.tasks.base import TrainingTask
from training.tasks.classification.loss import Classification
from training.tasks.classification.metrics import ValidationMetrics

# Columns of table 14 in arXiv 1909.11942: LR, BSZ, ALBERT DR, Classifier DR, TS, WS, MSL.
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


def make_config(**values: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"initialize_from": "x", "output": "runs/my run", **values})


def make_head(head: str, **values: Any) -> ClassifierConfig:
    return ClassifierConfig(head=head, **{"text_classification": "x.csv", **values})


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_recipe_has_the_values_of_table_14(name: str) -> None:
    """Values that are not in the table come from the original code."""
    rows = {row.split()[0]: row.split()[1:] for row in TABLE_14.strip().splitlines()}
    assert rows.keys() == PAPER.keys()
    recipe = PAPER[name]
    values = [recipe["lr"], *recipe["batch_size"], recipe["dropout"]]
    values += [recipe["classifier_dropout"], recipe["steps"]]
    values += [recipe["warmup"] * recipe["steps"], recipe["length"]]
    assert values == pytest.approx([*map(float, rows[name])])
    assert (recipe["optimizer"], recipe["schedule"]) == ("adamw", "linear")
    assert (recipe["weight_decay"], recipe["clip_norm"]) == (0.01, 1)


def test_questions_have_the_recipe_of_their_version_of_squad() -> None:
    """The version is 2.0 if some questions have no answer."""
    for files, options, expected in (
        ([SQUAD, SQUAD_V2], {}, (8144, 512, 512)),
        ([SQUAD], {}, (3649, 384, 384)),
        ([SQUAD], {"length": 64}, (3649, 64, 64)),
        ([SQUAD], {"epochs": 2.0}, (None, 384, 384)),
    ):
        config = make_config(question_answering=files, recipe="paper", **options)
        assert (config.steps, config.length, config.question_length) == expected


@pytest.mark.parametrize(
    ("names", "is_stored", "values", "expected"),
    [
        ("a b", False, {}, ["", "/b"]),
        ("a b", True, {}, ["/a", "/b"]),
        ("a", False, {"text_classification": "x.csv"}, ["", "/a"]),
    ],
)
def test_the_first_classifier_is_the_default_unless_one_exists(
    vocab_dir: Path,
    names: str,
    is_stored: bool,
    values: dict[str, Any],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint or data before `--head` can provide a default classifier."""
    heads: list[str] = []
    monkeypatch.setattr(tasks, "read_classification", lambda config, *_: heads.append(config.head))
    stored: dict[Task, int] = {"text-classification": 2} if is_stored else {}
    start = Start(folder=vocab_dir, hf={}, heads=stored, architecture=TINY)
    config = make_config(heads=tuple(map(make_head, names.split())), **values)
    with join_world(config.device) as world:
        tasks.read_tasks(config, start, tasks.setup_of(config, start, world))
    assert heads == [f"text-classification{suffix}" for suffix in expected]


def test_continued_pretraining_has_its_documented_defaults(
    vocab_dir: Path, easy_corpus: Path, tmp_path: Path
) -> None:
    config = make_config(output=tmp_path / "run", pretraining=[easy_corpus], order_share=0.5)
    start = Start(folder=vocab_dir, hf={}, heads={}, architecture=TINY)
    with join_world(config.device) as world:
        [task] = tasks.read_tasks(config, start, tasks.setup_of(config, start, world))
    masked, pairs = task.streams
    assert isinstance(masked, PackedStream)
    assert isinstance(pairs, PackedStream)
    assert masked.plan.settings == ExampleSettings(length=128, sentence_task="none")
    assert pairs.plan.settings == ExampleSettings(length=16, sentence_task="pairs", min_sentences=2)
    assert isinstance(masked.collate, Collator)
    assert masked.collate.masking.rate == 0.15
    assert config.sentence_weight == 1  # pairs have few labels per step


@pytest.mark.parametrize(
    ("labels", "head_name", "expected"),
    [
        ("A b", None, "mood"),
        ("a c", None, "none"),
        ("a b", "tone", "tone"),
        ("a c", "tone", "tone"),
    ],
)
def test_the_default_classifier_keeps_its_name_unless_the_run_changes_it(
    labels: str, head_name: str | None, expected: str
) -> None:
    hf = {**label_keys(labels.split()), "albert_default_head": "mood"}
    start = Start(folder=Path(), hf=hf, heads={"text-classification": 2}, architecture=TINY)
    classifier = replace(make_classifier([0, 1]), head_name=head_name)
    config = extra_config(start, start.heads, [make_task(3), classifier])
    assert config.get("albert_default_head", "none") == expected


def test_several_label_columns_are_multi_label_classification_by_default() -> None:
    assert make_head("a", label_column=["x", "y"]).problem == "multi_label_classification"
    assert make_head("a", label_column=["x"]).problem is None


def test_a_run_resumes_if_the_options_that_change_its_weights_are_the_same(tmp_path: Path) -> None:
    """Options of the machine, the output and the validation may change."""
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf()))

    def record(**values: Any) -> dict[str, str]:
        values = {"question_answering": [SQUAD], "pretraining": ["a.txt"], "steps": 9, **values}
        config = make_config(**values)
        return record_of(config, hyperparameters_of(config, tmp_path))

    original = record()
    assert (original["lr"], original["embeddings"]) == ("0.0002", "None")
    texts = record(text_classification=[SQUAD], label_column="x")
    assert (texts["label_column"], texts["multiple_choice"]) == ("x", "None")
    assert str(RACE / "train") in record(task="race", data=RACE)["multiple_choice"]
    machine = {"threads": 3, "precision": "bf16", "micro_batch_size": 2, "output": "other"}
    reports = {"save_every": 9.0, "report_every": 1, "keep": 9, "validate_every": 7}
    validation = {"validation": [SQUAD_V2], "metric": "exact_match"}
    assert record(**machine, **reports, **validation) == original
    changes: list[dict[str, Any]] = [
        *({"steps": 8}, {"lr": 1e-3}, {"truncation": False}),
        {"question_answering": [SQUAD, SQUAD_V2]},
        {"heads": (make_head("a"),)},
        {"heads": (make_head("a", labels=["b"]),)},
    ]
    records = [original, *(record(**change) for change in changes)]
    assert all(record not in records[:index] for index, record in enumerate(records))
    assert record(length=128) == {**original, "question_length": "128"}
    # Above a hidden size of 384, the default learning rate decreases in proportion.
    (tmp_path / "config.json").write_text(json.dumps(replace(TINY, hidden_size=768).to_hf()))
    assert record() == {**original, "lr": "0.0001"}


TEXTS: dict[str, Any] = {"text_classification": "a.csv", "validation": ["b.csv", "c d.csv"]}
COLUMNS: dict[str, Any] = {"text_column": "x", "label_column": ["y", "z"]}
DATA = "--text-classification b.csv 'c d.csv'"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**TEXTS, **COLUMNS}, f"{DATA} --text-column x --label-column y z"),
        ({"text_classification": "a.csv"}, None),
        ({"question_answering": "a.json", "validation": "b.json"}, "--question-answering b.json"),
        ({**TEXTS, "heads": (make_head("m", **TEXTS),)}, f"{DATA} --head m {DATA}"),
    ],
)
def test_the_printed_export_command_measures_on_the_validation_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str | None
) -> None:
    """The command is not printed without validation files."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "b.csv", "c d.csv"):
        (tmp_path / name).touch()
    command = "albert-serve export 'runs/my run/best' 'bundles/my run' --precision int8"
    assert export_command(make_config(**values)) == (words and f"{command} {words}")


def stream_of(name: str, targets: Sequence[int]) -> ExampleStream[TokenisedExample]:
    """Return a stream of one example per step."""
    examples = [TokenisedExample(ids=[2, 3], types=[0, 0], target=label) for label in targets]
    return ExampleStream(task=name, examples=examples, batch_size=1, row_length=8, seed=0)


def make_task(
    num_steps: int, *, name: str = "token-classification", metric: str = "f1"
) -> TrainingTask:
    """Return a task with validation whose epoch has this number of steps."""
    streams = [stream_of(name, [0] * num_steps)]
    return TrainingTask(
        name=name, streams=streams, losses={}, metric=metric, validation=Validation()
    )


def make_classifier(
    targets: list[int], problem: Any = "single_label_classification"
) -> Classification:
    """Return a classifier of two labels without held-out texts."""
    metrics = ValidationMetrics(problem=problem, num_labels=2, official=("accuracy",), metric=None)
    stream = stream_of("text-classification", targets)
    return Classification(
        name=stream.task,
        streams=[stream],
        losses={},
        head_name=None,
        names=("a", "b"),
        metrics=metrics,
        examples=stream.examples,
    )


def make_plan(*tasks: TrainingTask, **values: Any) -> Plan:
    return plan_of(tasks, FinetuneConfig(output=Path("run"), **values), {})


@pytest.mark.parametrize(
    ("steps_per_epoch", "values", "expected"),
    [
        # 1500 steps are 12.5 epochs, which are rounded to an even number.
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
def test_a_run_ends_after_the_first_of_its_limits(
    steps_per_epoch: int, values: dict[str, Any], expected: int | None
) -> None:
    """Only a run without a limit has patience by default."""
    values.setdefault("validation_split", 0)
    plan = make_plan(make_task(steps_per_epoch), **values)
    assert plan.progress.num_steps == expected
    assert plan.progress.budget_s == values.get("budget")
    assert plan.validate_every == steps_per_epoch
    assert plan.selection is not None
    has_limit = not values.keys().isdisjoint(("steps", "epochs", "budget"))
    assert (plan.selection.metric, plan.selection.patience) == ("f1", None if has_limit else 5)
    changed = make_plan(make_task(9), validate_every=2, patience=3, **values)
    assert changed.validate_every == 2
    assert changed.selection is not None
    assert changed.selection.patience == 3


def test_several_tasks_need_a_limit_and_are_validated_every_500_steps() -> None:
    tasks = [make_task(5), make_task(7, name="question-answering")]
    plan = make_plan(*tasks, steps=3)
    assert (plan.progress.num_steps, plan.validate_every) == (3, 500)
    assert plan.mixture.weights == [1, 1]
    for limits in ({}, {"epochs": 2.0}, {"epochs": 2.0, "steps": 3}):
        with pytest.raises(RunError, match="epochs is undefined"):
            make_plan(*tasks, **limits)
    with pytest.raises(RunError, match=r"--weights \[1.0\] is .*token-classification, question-"):
        make_plan(*tasks, steps=1, weights=1)
    for metric in ("loss", "mse"):
        with pytest.raises(RunError, match=f"--metric {metric} does not apply to several"):
            make_plan(make_task(5), make_task(5, metric=metric), steps=1)


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
def test_few_texts_have_contrastive_training_unless_a_limit_is_set(
    targets: list[int], values: dict[str, Any], expected: bool
) -> None:
    """Texts are few if labels have at most 16 on average. One label needs two texts or more."""
    plan = make_plan(make_classifier(targets), **values)
    assert plan.has_contrast == expected
    assert (plan.progress.num_steps == 0) == expected
    multi_label = make_classifier(targets, "multi_label_classification")
    assert not make_plan(multi_label, **values).has_contrast
    assert not make_plan(make_classifier(targets), make_task(3), steps=1).has_contrast


def test_order_share_moves_weight_from_pretraining_to_pairs() -> None:
    tasks = [make_task(5), make_task(7, name="pretraining")]
    plan = make_plan(*tasks, steps=1, weights=(1, 4), pretraining=["a"], order_share=0.25)
    assert plan.mixture.weights == [1, 3, 1]


def test_the_criterion_of_a_selection_names_the_content_of_its_texts(tmp_path: Path) -> None:
    """The folder does not matter. The fraction of held-out training texts is part of it."""
    files = [tmp_path / name / "dev.tsv" for name in "abc"]
    for file, text in zip(files, ("x", "x", "y"), strict=True):
        write(file, f"text\tlabel\n{text}\t1\n")

    def criterion(**values: Any) -> str:
        selection = make_plan(make_task(5), steps=1, **values).selection
        assert selection is not None
        return selection.criterion

    texts = [{"text_classification": file, "validation": file} for file in files]
    assert criterion(**texts[0]) == criterion(**texts[1]) != criterion(**texts[2])
    assert criterion(**texts[0]).startswith("f1 of dev.tsv (content ")
    for name in ("text_classification", "token_classification"):
        held_out = criterion(**{name: files[0]})
        assert held_out.startswith("f1 of 0.1 of dev.tsv (content ")
        assert held_out != criterion(**{name: files[2]})


def test_patience_and_a_metric_need_held_out_data() -> None:
    for values in ({"patience": 2}, {"metric": "loss"}):
        with pytest.raises(RunError, match="--patience and --metric need held-out data"):
            make_plan(make_classifier([0, 1]), steps=1, **values)
    plan = make_plan(make_classifier([0, 1]), steps=1)
    assert (plan.validation, plan.selection) == (None, None)
