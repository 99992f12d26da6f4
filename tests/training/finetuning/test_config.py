"""A run's hyperparameters, its record and the command that exports it, by its options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.support import RACE, SQUAD, SQUAD_V2, TINY
from training.commands.finetune import ClassifierConfig, FinetuneConfig
from training.errors import RunError
from training.finetuning import tasks
from training.finetuning.model import Start
from training.finetuning.recipes import PAPER, hyperparameters_of
from training.finetuning.record import export_command, record_of
from training.loop.distributed import join_world
from training.tasks.pretraining.loss import PretrainingConfig

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


def sized(folder: Path, hidden_size: int) -> Path:
    """A checkpoint's folder with a config of this width alone."""
    hf = {**TINY.to_hf(), "hidden_size": hidden_size, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


@pytest.fixture
def start(vocab_dir: Path) -> Callable[..., Start]:
    """Make a start of a content of `config.json` and heads."""
    return lambda hf, heads: Start(folder=vocab_dir, hf=hf, heads=heads, architecture=TINY)


def read_all(config: FinetuneConfig, start: Start) -> None:
    with join_world(config.device) as world:
        tasks.read_tasks(config, start, tasks.setup_of(config, start, world))


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


def test_another_end_replaces_the_recipes_steps() -> None:
    rte = {"task": "rte", "data": "rte", "recipe": "paper"}
    assert configured(**rte).steps == 800
    assert configured(**rte, steps=7).steps == 7
    for end in ({"epochs": 3.0}, {"budget": 60.0}):
        ended = configured(**rte, **end)
        assert (ended.steps, ended.warmup) == (None, 0.25)


def test_questions_have_the_recipe_of_their_version() -> None:
    """Of v2.0 if some have no answer."""
    two = configured(question_answering=[SQUAD, SQUAD_V2], recipe="paper")
    assert (two.steps, two.length, two.question_length) == (8144, 512, 512)
    one = configured(question_answering=[SQUAD], recipe="paper")
    assert (one.steps, one.length, one.question_length) == (3649, 384, 384)
    assert configured(question_answering=[SQUAD], recipe="paper", length=64).question_length == 64


def test_the_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    config = configured(question_answering=[SQUAD])
    assert (config.length, config.question_length, config.batch_size) == (128, 384, (32,))
    assert (config.save_every, config.keep, config.report_every) == (300, 2, 50)
    assert config.validation_split == 0.1
    for hidden_size, rate in ((384, 2e-4), (385, 2e-4 * 384 / 385), (768, 1e-4)):
        values = hyperparameters_of(config, sized(tmp_path, hidden_size))
        assert values.lr == pytest.approx(rate)
    assert hyperparameters_of(configured(lr=3e-3), tmp_path).lr == 3e-3
    assert (values.optimizer, values.adamw_lr, values.weight_decay) == ("adamw", 3e-4, 0.01)
    assert (values.schedule, values.warmup, values.decay) == ("wsd", 0.05, 0.6)
    assert (values.sentence_weight, values.clip_norm, values.pooled_factor) == (0.1, 1, 1)
    pairs = configured(pretraining=["a.txt"], order_share=0.5)
    assert hyperparameters_of(pairs, tmp_path).sentence_weight == 1


@pytest.mark.parametrize(
    ("names", "is_started", "values", "expected"),
    [
        ("a b", False, {}, ["", "/b"]),
        ("b default", False, {}, ["/b", ""]),
        ("a b", True, {}, ["/a", "/b"]),
        ("mood b", "mood", {}, ["", "/b"]),
        ("a", False, {"text_classification": "x.csv"}, ["", "/a"]),
        ("default", True, {}, [""]),
        ("default", "mood", {}, "default is named mood"),
        ("default", False, {"text_classification": "x.csv"}, "--head default names the default"),
    ],
)
def test_the_default_classifier_is_the_first_or_the_one_of_that_name(
    names: str,
    is_started: bool | str,
    values: dict[str, Any],
    expected: list[str] | str,
    start: Callable[..., Start],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without data before `--head`, and without a default classifier in the checkpoint."""
    read: list[str] = []
    monkeypatch.setattr(tasks, "read_classification", lambda config, *_: read.append(config.head))
    heads = tuple(map(named, names.split()))
    hf = {"albert_default_head": is_started} if isinstance(is_started, str) else {}
    opened = start(hf, {"text-classification": 2} if is_started else {})
    if isinstance(expected, str):
        with pytest.raises(RunError, match=expected):
            read_all(configured(heads=heads, **values), opened)
    else:
        read_all(configured(heads=heads, **values), opened)
        assert read == [f"text-classification{end}" for end in expected]


def test_continued_pretraining_has_the_papers_mask_rate(
    start: Callable[..., Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[PretrainingConfig] = []
    monkeypatch.setattr(tasks, "read_text", lambda config, *_: read.append(config))
    given = {"mask_rate": 0.3, "order_share": 0.5, "order_short_rate": 0.2, "order_sentences": 3}
    for hf, values in (({}, {}), ({"albert_sentence_task": "nsp"}, given)):
        read_all(configured(pretraining=["a.txt"], **values), start(hf, {}))
    plain, paired = read
    assert (plain.mask_rate, plain.short_rate, plain.sentence_task) == (0.15, 0.1, "sop")
    assert (plain.has_pairs, plain.order_short_rate, plain.order_sentences) == (False, 0.1, 2)
    assert (paired.mask_rate, paired.short_rate, paired.sentence_task) == (0.3, 0.1, "nsp")
    assert (paired.has_pairs, paired.order_short_rate, paired.order_sentences) == (True, 0.2, 3)


def test_a_run_is_resumed_with_the_options_that_change_what_is_learnt(tmp_path: Path) -> None:
    """Others may change: where it computes and writes, and how it is validated."""
    sized(tmp_path, 24)

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
        {"seed": 1},
        {"patience": 3},
        {"truncation": False},
        {"question_answering": [SQUAD, SQUAD_V2]},
        {"heads": (named("a"),)},
        {"heads": (named("a", labels=["b"]),)},
        {"length": 128},  # the default, but for questions
    ]
    records = [record(**change) for change in changes]
    assert all(one not in [same, *records[:n]] for n, one in enumerate(records))
    assert records[-1] == {**same, "question_length": "128"}
    assert (same["question_length"], same["batch_size"]) == ("384", "[32]")
    assert (same["choice_columns"], same["label_column"], same["heads"]) == ("[]", "None", "[]")
    texts = [
        {"text_classification": "a.csv", "label_column": column} for column in ("x", ["x", "y"])
    ]
    assert [record(**each)["label_column"] for each in texts] == ["x", "['x', 'y']"]


TEXTS: dict[str, Any] = {"text_classification": "a.csv", "validation": ["b.csv", "c d.csv"]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (TEXTS, "--text-classification b.csv 'c d.csv'"),
        (
            {**TEXTS, "text_column": "x", "label_column": ["y", "z"]},
            "--text-classification b.csv 'c d.csv' --text-column x --label-column y z",
        ),
        ({"text_classification": "a.csv"}, None),
        ({"embeddings": "a.csv", "validation": "b.csv"}, None),
        ({"question_answering": "a.json", "validation": "b.json"}, "--question-answering b.json"),
        ({"multiple_choice": "a", "validation": "b"}, "--multiple-choice b"),
        ({"task": "race", "data": RACE}, f"--task race --data {RACE}"),
        (
            {**TEXTS, "heads": (named("m", **TEXTS),)},
            "--text-classification b.csv 'c d.csv' --head m --text-classification b.csv 'c d.csv'",
        ),
        ({"text_classification": "a.csv", "validation": [{"text": "a", "label": 1}]}, None),
    ],
)
def test_the_command_that_exports_measures_on_the_validation_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str | None
) -> None:
    """There is none without files of a classifier, of choices or of questions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path / "cache"))
    for name in ("a.csv", "b.csv", "c d.csv"):
        (tmp_path / name).touch()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    command = "albert-serve export 'runs/my run/best' 'bundles/my run' --precision int8"
    assert export_command(configured(**values)) == (words and f"{command} {words}")
