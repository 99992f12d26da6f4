"""Several labels and numbers of the user's own files, from training to the served bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from scipy import stats

from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from export.__main__ import main as export
from tests.training.support import best_step, evaluated, run_command, validations
from training.commands import evaluate
from training.commands.finetune import main
from training.model.checkpoint import read_config

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

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
    assert "texts.csv, line 3: over 16 tokens" in capsys.readouterr().err
