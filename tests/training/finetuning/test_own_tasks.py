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

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import TextClassification, load_tasks
from export.__main__ import main as export
from tests.training.support import best_step, read_metrics, run_command, validations
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


@pytest.fixture
def moods(tmp_path: Path) -> Path:
    """A folder of training and validation files."""
    lines = [json.dumps({"text": text, "label": labels}) for text, labels in rows()]
    (tmp_path / "moods").mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / "moods" / name).write_text("\n".join(lines))
    return tmp_path / "moods"


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    """Texts with the number of their glad words less that of their sad ones, times ten."""
    lines = ["text,label"]
    lines += [f"{t},{10 * (('glad' in labels) - ('sad' in labels))}" for t, labels in rows()]
    (tmp_path / "scores.csv").write_text("\n".join(lines))
    return tmp_path / "scores.csv"


def evaluated(checkpoint: Path, data: Path, *more: str) -> dict[str, float]:
    arguments = [str(checkpoint), "--text-classification", str(data), *more]
    assert evaluate.main(arguments) == 0
    figures: dict[str, float] = json.loads((checkpoint / "evaluation.json").read_text())
    return figures


def served(bundle: Path, texts: list[str]) -> list[dict[str, float]]:
    """The scores of each text's labels, as the service answers them."""
    opened = Bundle.open(bundle)
    engine = Engine.open(opened, RuntimeOptions(device="cpu"))
    task = load_tasks(opened)["text-classification"]
    assert isinstance(task, TextClassification)
    answers = []
    for text in texts:
        prepared = task.prepare(text, TextClassificationParameters())
        answer = prepared.finish(engine.run(prepared.inputs))
        assert isinstance(answer, list)
        answers.append({each.label: each.score for each in answer})
    return answers


@pytest.mark.extended
def test_several_labels_from_a_folder_to_the_service(
    longer: list[str], moods: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"
    options = ["--text-classification", str(moods), "--problem-type", "multi_label_classification"]
    assert run([*longer, *options], folder) == 0
    assert f"validation on {moods / 'dev.jsonl'}\n" in capsys.readouterr().out
    config = read_config(folder / "best")
    assert config["problem_type"] == "multi_label_classification"
    assert config["id2label"] == {"0": "glad", "1": "sad"}
    figures = evaluated(folder / "best", moods)
    name = "validation/text-classification/micro_f1"
    measured = [line[name] for line in read_metrics(folder) if name in line]
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
    texts, labels = zip(*rows(), strict=True)
    answers = served(bundle, list(texts))
    got = np.array([[answer[name] > 0.5 for name in ("glad", "sad")] for answer in answers])
    right = np.array([[name in its for name in ("glad", "sad")] for its in labels])
    assert 100 * (got == right).all(1).mean() == pytest.approx(quality.bundle)
    assert f1_score(right, got, average="micro") == pytest.approx(
        figures["text_classification_micro_f1"], abs=0.1
    )


def test_numbers_of_a_file_from_training_to_the_service(
    longer: list[str], scores: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = ["--text-classification", str(scores), "--validation", str(scores)]
    more = ["--problem-type", "regression", "--metric", "mse", "--labels", "gladness"]
    assert run([*longer, *options, *more], folder) == 0
    config = read_config(folder / "best")
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "gladness"})
    figures = evaluated(folder / "best", scores)
    name = "validation/text-classification/mse"
    measured = [line[name] for line in read_metrics(folder) if name in line]
    assert figures["text_classification_mse"] == pytest.approx(min(measured), rel=1e-3)
    assert figures["text_classification_loss"] == pytest.approx(figures["text_classification_mse"])
    bundle = tmp_path / "bundle"
    exporting = [str(folder / "best"), str(bundle), "--text-classification", str(scores)]
    assert export(exporting) == 0
    quality = Bundle.open(bundle).manifest.heads["text-classification"].quality
    assert quality is not None
    assert quality.metric == "Pearson"
    assert quality.torch == pytest.approx(100 * figures["text_classification_pearson"], abs=1e-2)
    texts, labels = zip(*rows(), strict=True)
    got = [answer["gladness"] for answer in served(bundle, list(texts))]
    right = [10.0 * (("glad" in its) - ("sad" in its)) for its in labels]
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
    figures = evaluated(tmp_path / "run/best", texts)
    assert capsys.readouterr().out.splitlines()[-1] == f"5 {truncated.format(10)}"
    losses = validations(tmp_path / "run", "text-classification", "loss")
    assert figures["text_classification_loss"] == pytest.approx(losses[best_step(tmp_path / "run")])
    assert evaluate.main([str(tmp_path / "run/best"), *data[:2], "--no-truncation"]) == 1
    assert "texts.csv, line 3: over 16 tokens" in capsys.readouterr().err
