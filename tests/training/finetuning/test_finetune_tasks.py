"""Tasks of GLUE, RACE and the user are trained, validated and evaluated, and served."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import pytest
from scipy import stats

from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from export.__main__ import main as export
from tests.training.support import (
    RACE,
    best_step,
    checkpoint_state,
    evaluated,
    run_command,
    same_weights,
    stop_at,
    validations,
)
from training.commands import evaluate
from training.commands.finetune import main
from training.model.checkpoint import read_config
from training.model.heads import Task

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

TASK: Final[Task] = "text-classification"
PAIRS = ("the game was good", "a city was great", "his music died", "her work was lost")


def write(folder: Path, rows_of: Mapping[str, Sequence[str]]) -> Path:
    folder.mkdir()
    for name, rows in rows_of.items():
        (folder / name).write_text("\n".join([*rows, ""]), encoding="utf-8")
    return folder


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    """Sentences in order, and in reverse."""
    rows = [f"x\t1\t\t{text}" for text in PAIRS]
    rows += [f"x\t0\t*\t{' '.join(reversed(text.split()))}" for text in PAIRS]
    return write(tmp_path / "cola", {"train.tsv": rows, "dev.tsv": rows})


@pytest.fixture
def stsb(tmp_path: Path) -> Path:
    """Pairs of the same sentence, of others, and of one that is named twice."""
    rows = [f"g\tf\t12\t1\t5.000\t{text}\t{text}" for text in PAIRS]
    rows += [f"g\tf\t12\t1\t{n}.5\t{PAIRS[n]}\t{PAIRS[n - 1]}\ta\tb" for n in range(4)]
    return write(tmp_path / "stsb", {"sts-train.tsv": rows, "sts-dev.tsv": rows})


@pytest.mark.parametrize(
    ("task", "figure", "labels"),
    [
        ("cola", "matthews_correlation", ["unacceptable", "acceptable"]),
        ("stsb", "combined_score", ["score"]),
    ],
)
def test_the_best_checkpoint_has_the_figures_of_its_validation(
    start: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    task: str,
    figure: str,
    labels: list[str],
) -> None:
    """By the official metrics, which `albert-serve evaluate` computes on whole, padded texts."""
    data: Path = request.getfixturevalue(task)
    folder, options = tmp_path / "run", ["--task", task, "--data", str(data)]
    assert run([*start, "--keep", "1", *options], folder) == 0
    measured = validations(folder, TASK, figure)
    assert list(measured) == [0, 2, 4, 6]
    best = best_step(folder)
    assert measured[best] == max(measured.values())
    assert best == min(step for step, value in measured.items() if value == measured[best])
    figures = evaluated(folder / "best", *options)
    name = f"text_classification_{figure}"
    assert figures[name] == pytest.approx(measured[best], abs=1e-3)
    loss = validations(folder, TASK, "loss")[best]
    assert figures["text_classification_loss"] == pytest.approx(loss, rel=1e-3)
    config = read_config(folder / "best")
    assert list(config["id2label"].values()) == labels
    problem = "regression" if task == "stsb" else "single_label_classification"
    assert config["problem_type"] == problem
    if task == "cola":  # predictions are of the test file, also of an empty text
        (data / "test.tsv").write_text("index\tsentence\n0\tthe game was good\n1\t\n2\tgood\n")
        evaluated(folder / "best", *options, "--predictions", str(data / "CoLA.tsv"))
        header, *lines = (data / "CoLA.tsv").read_text().splitlines()
        assert header == "index\tprediction"
        assert [line.split("\t")[0] for line in lines] == ["0", "1", "2"]
        assert {line.split("\t")[1] for line in lines} <= {"0", "1"}


def test_a_run_that_is_stopped_in_validation_goes_on_as_one_that_was_not(
    start: list[str], cola: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation that the signal interrupted counts: for the best, and for patience."""
    options = [*start, "--task", "cola", "--data", str(cola), "--dropout", "0.1"]
    options += ["--steps", "10", "--patience", "3", "--metric", "loss", "--keep", "1"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(options, whole) == 0
    for step in (2, 5):
        with monkeypatch.context() as patch:
            stop_at(patch, step, signal.SIGTERM)
            assert run(options, stopped) == 143
    assert checkpoint_state(stopped)["step"] == 5
    assert run(options, stopped) == 0
    assert same_weights(stopped, whole)
    assert best_step(stopped) == best_step(whole)
    assert validations(stopped, TASK, "loss") == validations(whole, TASK, "loss")


@pytest.fixture
def race(start: list[str]) -> list[str]:
    return [*start, "--batch-size", "6", "--task", "RACE", "--data", str(RACE)]


losses = partial(validations, task="multiple-choice", figure="loss")


def test_the_best_checkpoint_of_choices_has_the_figures_of_its_validation(
    race: list[str], start: list[str], tmp_path: Path
) -> None:
    """By accuracy, which `albert-serve evaluate` computes on padded texts, for both levels.

    A folder of the task's is read by its splits, too.
    """
    folder = tmp_path / "run"
    assert run(race, folder) == 0
    own = [*start, "--batch-size", "6", "--multiple-choice", str(RACE)]
    assert run(own, tmp_path / "own") == 0
    assert same_weights(tmp_path / "own", folder)
    assert losses(tmp_path / "own") == losses(folder)
    measured = validations(folder, "multiple-choice", "accuracy")
    assert list(measured) == [2, 4, 6]
    best = best_step(folder)
    assert best == min(step for step in measured if measured[step] == max(measured.values()))
    figures = evaluated(folder / "best", "--task", "race", "--data", str(RACE))
    assert figures["multiple_choice_task"] == "RACE"
    assert figures["multiple_choice_accuracy"] == pytest.approx(measured[best])
    loss = losses(folder)[best]
    assert figures["multiple_choice_loss"] == pytest.approx(loss, rel=1e-3)
    levels = [figures[f"multiple_choice_{level}_accuracy"] for level in ("high", "middle")]
    assert sum(levels) / 2 == pytest.approx(measured[best])
    counts = [figures[f"multiple_choice{end}_questions"] for end in ("", "_high", "_middle")]
    assert counts[0] == counts[1] + counts[2] > counts[1] == counts[2]
    config = read_config(folder / "best")
    assert "AlbertForMultipleChoice" in config["architectures"]
    assert "id2label" not in config


GLAD, SAD = ("good", "great", "beautiful", "first"), ("died", "lost", "war", "not")
THINGS = ("game", "city", "music", "work", "school")


def rows() -> Iterator[tuple[str, list[str]]]:
    """Texts that are glad, sad, both or neither."""
    for thing in THINGS:
        for glad, sad in zip(GLAD, SAD, strict=True):
            yield f"the {thing} was {glad}", ["glad"]
            yield f"the {thing} was {sad}", ["sad"]
            yield f"the {thing} was {glad} and {sad}", ["glad", "sad"]
            yield f"the {thing} was", []


def test_labels_and_numbers_of_files_from_training_to_the_service(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """Several labels a text; a text's number is that of its glad words less its sad ones."""
    moods, scores, folder = tmp_path / "moods", tmp_path / "scores.csv", tmp_path / "run"
    moods.mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        lines = [json.dumps({"text": text, "label": labels}) for text, labels in rows()]
        (moods / name).write_text("\n".join(lines))
    numbers = [10.0 * (("glad" in labels) - ("sad" in labels)) for _, labels in rows()]
    lines = [f"{text},{number}" for (text, _), number in zip(rows(), numbers, strict=True)]
    scores.write_text("\n".join(["text,label", *lines]))
    data = ["--text-classification", str(moods)]
    more = ["--head", "score", "--text-classification", str(scores)]
    options = [*start, *data, "--problem-type", "multi_label_classification", *more]
    options += ["--problem-type", "regression", "--labels", "gladness", "--validation", str(scores)]
    options += ["--batch-size", "16", "--steps", "80", "--lr", "5e-3", "--validate-every", "40"]
    assert run(options, folder) == 0
    assert f"Validation uses {moods / 'dev.jsonl'}.\n" in capsys.readouterr().out
    config = read_config(folder / "best")
    assert config["problem_type"] == "multi_label_classification"
    assert config["id2label"] == {"0": "glad", "1": "sad"}
    assert config["albert_heads"]["score"]["problem_type"] == "regression"
    assert config["albert_heads"]["score"]["id2label"] == {"0": "gladness"}
    figures = evaluated(folder / "best", *data, *more)
    for head, metric in (("", "micro_f1"), ("/score", "pearson")):
        measured = validations(folder, f"text-classification{head}", metric)[best_step(folder)]
        assert figures[f"text_classification{head}_{metric}"] == pytest.approx(measured, abs=1e-3)
        assert measured > 0.6
    loss = figures["text_classification/score_loss"]
    assert loss == pytest.approx(figures["text_classification/score_mse"])

    assert export([str(folder / "best"), str(tmp_path / "bundle"), *data, *more]) == 0
    heads = Bundle.open(tmp_path / "bundle").manifest.heads
    labels, score = (heads[f"text-classification{end}"].quality for end in ("", "/score"))
    assert labels is not None
    assert score is not None
    assert (labels.metric, labels.data, score.metric) == (
        "subset accuracy",
        ["dev.jsonl"],
        "Pearson",
    )
    assert labels.torch == pytest.approx(100 * figures["text_classification_subset_accuracy"])
    texts = [text for text, _ in rows()]
    with AlbertClient.local(tmp_path / "bundle", num_threads=1) as albert:
        answers = albert.text_classification(texts)
        got = [answer[0].score for answer in albert.text_classification(texts, head="score")]
    assert 100 * stats.pearsonr(got, numbers).statistic == pytest.approx(score.bundle, abs=1e-2)
    named = [{each.label for each in answer if each.score > 0.5} for answer in answers]
    right = [predicted == {*own} for predicted, (_, own) in zip(named, rows(), strict=True)]
    assert 100 * sum(right) / len(right) == pytest.approx(labels.bundle)


def test_evaluate_reads_as_much_of_a_text_as_training_did(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    lines = [
        f"the {thing} was {mood}{' and so on' * (n % 2 * 9)},{mood}"
        for n, (thing, mood) in enumerate(product(THINGS, ("good", "lost")))
    ]
    texts = tmp_path / "texts.csv"
    texts.write_text("\n".join(["text,label", *lines]))
    data = ["--text-classification", str(texts), "--validation", str(texts)]
    assert run([*start, *data, "--length", "16"], tmp_path / "run") == 0
    truncated = "of {} texts were truncated to 16 tokens (--no-truncation makes them errors)"
    assert f"\n10 {truncated.format(20)}\n" in capsys.readouterr().out
    figures = evaluated(tmp_path / "run/best", *data[:2])
    assert capsys.readouterr().out.splitlines()[-1] == f"5 {truncated.format(10)}"
    losses = validations(tmp_path / "run", "text-classification", "loss")
    assert figures["text_classification_loss"] == pytest.approx(losses[best_step(tmp_path / "run")])
    assert evaluate.main([str(tmp_path / "run/best"), *data[:2], "--no-truncation"]) == 1
    assert "texts.csv, line 3: The text has more than 16 tokens" in capsys.readouterr().err
