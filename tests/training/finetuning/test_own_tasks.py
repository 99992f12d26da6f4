"""Several labels and numbers of the user's own files, from training to the served bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score

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


@pytest.fixture
def longer(start: list[str]) -> list[str]:
    """A run of 40 steps; its data is left to be named."""
    return [*start, "--batch-size", "16", "--steps", "40", "--lr", "5e-3", "--validate-every", "20"]


def rows() -> Iterator[tuple[str, list[str]]]:
    """Texts that are glad, sad, both or neither."""
    for thing in THINGS:
        for glad, sad in zip(GLAD, SAD, strict=True):
            yield f"the {thing} was {glad}", ["glad"]
            yield f"the {thing} was {sad}", ["sad"]
            yield f"the {thing} was {glad} and {sad}", ["glad", "sad"]
            yield f"the {thing} was", []


def served(bundle: Path) -> list[dict[str, float]]:
    """The scores of each text's labels, as the service answers them."""
    with AlbertClient.local(bundle, num_threads=1) as albert:
        answers = albert.text_classification([text for text, _ in rows()])
    return [{each.label: each.score for each in answer} for answer in answers]


@pytest.mark.extended
def test_several_labels_from_a_folder_to_the_service(
    longer: list[str], tmp_path: Path, capsys: Capture
) -> None:
    moods, folder = tmp_path / "moods", tmp_path / "run"
    moods.mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        lines = [json.dumps({"text": text, "label": labels}) for text, labels in rows()]
        (moods / name).write_text("\n".join(lines))
    options = ["--text-classification", str(moods), "--problem-type", "multi_label_classification"]
    assert run([*longer, *options], folder) == 0
    assert f"validation on {moods / 'dev.jsonl'}\n" in capsys.readouterr().out
    config = read_config(folder / "best")
    assert config["problem_type"] == "multi_label_classification"
    assert config["id2label"] == {"0": "glad", "1": "sad"}
    figures = evaluated(folder / "best", "--text-classification", str(moods))
    measured = validations(folder, "text-classification", "micro_f1").values()
    assert figures["text_classification_micro_f1"] == pytest.approx(max(measured), abs=1e-3)
    assert figures["text_classification_micro_f1"] > 0.6
    bundle = tmp_path / "bundle"
    # As an int8 bundle of the best checkpoint.
    exporting = [str(folder / "best"), str(bundle), "--precision", "int8", "--force"]
    assert export([*exporting, "--text-classification", str(moods)]) == 0
    manifest = Bundle.open(bundle).manifest
    quality = manifest.heads["text-classification"].quality
    assert quality is not None
    assert (quality.metric, quality.data) == ("subset accuracy", ["dev.jsonl"])
    assert quality.torch == pytest.approx(100 * figures["text_classification_subset_accuracy"])
    assert manifest.evaluation["text_classification_micro_f1"] == pytest.approx(
        figures["text_classification_micro_f1"]
    )
    got = np.array([[each[name] > 0.5 for name in ("glad", "sad")] for each in served(bundle)])
    right = np.array([[name in its for name in ("glad", "sad")] for _, its in rows()])
    assert 100 * (got == right).all(1).mean() == pytest.approx(quality.bundle)
    assert f1_score(right, got, average="micro") == pytest.approx(
        figures["text_classification_micro_f1"], abs=0.1
    )


def test_numbers_of_a_file_from_training_to_the_service(longer: list[str], tmp_path: Path) -> None:
    """A text's number is that of its glad words less that of its sad ones, times ten."""
    scores, folder = tmp_path / "scores.csv", tmp_path / "run"
    lines = [f"{t},{10 * (('glad' in its) - ('sad' in its))}" for t, its in rows()]
    scores.write_text("\n".join(["text,label", *lines]))
    options = ["--text-classification", str(scores), "--validation", str(scores)]
    more = ["--problem-type", "regression", "--metric", "mse", "--labels", "gladness"]
    assert run([*longer, *options, *more], folder) == 0
    config = read_config(folder / "best")
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "gladness"})
    figures = evaluated(folder / "best", *options[:2])
    measured = validations(folder, "text-classification", "mse").values()
    assert figures["text_classification_mse"] == pytest.approx(min(measured), rel=1e-3)
    assert figures["text_classification_loss"] == pytest.approx(figures["text_classification_mse"])
    bundle = tmp_path / "bundle"
    exporting = [str(folder / "best"), str(bundle), "--text-classification", str(scores)]
    assert export(exporting) == 0
    quality = Bundle.open(bundle).manifest.heads["text-classification"].quality
    assert quality is not None
    assert quality.metric == "Pearson"
    assert quality.torch == pytest.approx(100 * figures["text_classification_pearson"], abs=1e-2)
    got = [answer["gladness"] for answer in served(bundle)]
    right = [10.0 * (("glad" in its) - ("sad" in its)) for _, its in rows()]
    assert 100 * stats.pearsonr(got, right).statistic == pytest.approx(quality.bundle, abs=1e-2)


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
