"""Finetuning of standard tasks: resumed, not repeated, and written as tables."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training.finetuning.seeds import SeedRun

from albert_serve.bundle.manifest import Bundle
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.results import depth
from benchmarks.results.__main__ import main
from benchmarks.results.depth import draw, measure, open_bundle
from benchmarks.results.page import chance, figure_rows, render
from benchmarks.results.runs import Setup, read_results, run_task
from benchmarks.results.tasks import TASKS, Figure
from export.write import export_bundle
from tests.training.conftest import one_thread  # noqa: F401 - a fixture
from tests.training.support import REPOSITORY
from training import finetune
from training.data.labelled.texts import LabelledText
from training.evaluation.classification import classify
from training.evaluation.early_exit import early_exit_figures
from training.evaluation.metrics import metric_figures
from training.glue.tasks import Metric
from training.model.checkpoint import load_checkpoint, read_config, save_checkpoint

Capture = pytest.CaptureFixture[str]

DATA = REPOSITORY / "tests" / "data"
_MARK = "<!-- written by python -m benchmarks.results: {} -->\n"
PAGE = f"before\n{_MARK.format('begin')}{_MARK.format('end')}after\n"
TITLES = [measure.title for task in TASKS.values() for measure in task.measures]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    shutil.copytree(DATA / "banking77", folder / "banking77")
    (folder / "squad").mkdir()
    for name in ("train-v1.1", "squadshifts-new_wiki"):
        shutil.copy(DATA / "squad.json", folder / "squad" / f"{name}.json")
    for version in ("1.1", "2.0"):
        content = json.loads((DATA / f"squad_dev/dev-v{version}.json").read_bytes())
        content["data"] = content["data"][:1]
        content["data"][0]["paragraphs"] = content["data"][0]["paragraphs"][:1]
        (folder / f"squad/dev-v{version}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def command(data: Path, checkpoint_dir: Path, tmp_path: Path) -> list[str]:
    start = ("--initialize-from", str(checkpoint_dir), "--device", "cpu")
    where = ("--data", str(data), "--output", str(tmp_path / "runs"))
    return [*start, *where, "--seeds", "2", "--steps", "2"]


def test_tasks_are_trained_measured_and_not_repeated(
    command: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "results.md"
    page.write_text(PAGE)
    assert main([*command, "--tasks", "banking77", "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert [title for title in TITLES if f"| {title} |" in text] == ["Banking77"]
    records = [
        json.loads(file.read_bytes())
        for file in (tmp_path / "runs/banking77").glob("seed-*/figures.json")
    ]
    points = [
        100 * record["figures"]["Banking77"]["text_classification_accuracy"] for record in records
    ]
    median = statistics.median(points)
    row = f"| Banking77 | accuracy | {median:.1f} | {min(points):.1f} to {max(points):.1f}"
    assert f"{row} | all 4 collapsed |" in text
    assert all(record["stage"]["steps"] == 2 for record in records)

    monkeypatch.setattr(finetune, "main", lambda _: pytest.fail("a finished run is repeated"))
    assert main([*command, "--tasks", "banking77"]) == 0
    capsys.readouterr()
    assert main([*command, "--tasks", "banking77", "--steps", "3"]) == 1
    error = capsys.readouterr().err
    assert "was trained with" in error
    assert "give another --output" in error


@pytest.mark.parametrize(
    ("collapsed", "seeds", "shown"),
    [
        ({}, [0, 1], "2"),
        ({0: 2}, [1, 2], "2 (1 collapsed)"),
        ({0: 2, 2: None}, [1], "1 (2 collapsed)"),
        ({0: 2, 1: 3, 2: None, 3: None}, [2, 3], "all 4 collapsed"),
    ],
)
def test_collapsed_runs_are_shown_as_such(
    data: Path, tmp_path: Path, collapsed: dict[int, int | None], seeds: list[int], shown: str
) -> None:
    """By the seed that takes the place of each; a file has what earlier versions wrote."""
    task = TASKS["banking77"]
    setup = Setup(
        initialize_from="", data=data, output=tmp_path, num_seeds=2, num_steps=2, device="cpu"
    )
    replaced = {fresh: seed for seed, fresh in collapsed.items() if fresh is not None}
    runs = [
        {
            "seed": seed,
            "value": seed / 10,
            "step": 2,
            "has_collapsed": seed in collapsed,
            "in_place_of": replaced.get(seed),
        }
        for seed in sorted({0, 1, *replaced})
    ]
    for seed in range(4):
        classes = {name: {"texts": 1} for name in ("a", "b")}
        figures = {f"text_classification_{name}": seed / 10 for name in ("accuracy", "macro_f1")}
        record = {
            "options": setup.training(task),
            "figures": {"Banking77": {**figures, "text_classification_classes": classes}},
            "stage": {},
        }
        folder = tmp_path / "banking77" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "figures.json").write_text(json.dumps(record))
    (tmp_path / "banking77" / "seeds.json").write_text(json.dumps({"runs": runs}))
    results = read_results(setup, "banking77", task)
    assert list(results.by_seed) == seeds
    accuracy, _ = figure_rows({"banking77": results})
    low, high = min(seeds) * 10, max(seeds) * 10
    assert accuracy[2:5] == [f"{(low + high) / 2:.1f}", f"{low:.1f} to {high:.1f}", shown]


def test_runs_that_all_diverged_have_a_row(data: Path, tmp_path: Path) -> None:
    task = TASKS["banking77"]
    setup = Setup(
        initialize_from="", data=data, output=tmp_path, num_seeds=1, num_steps=2, device="cpu"
    )
    runs = [
        asdict(SeedRun(seed=seed, value=None, step=None, has_collapsed=True, has_diverged=True))
        for seed in (0, 1)
    ]
    runs[1]["in_place_of"] = 0
    (tmp_path / "banking77").mkdir()
    (tmp_path / "banking77" / "seeds.json").write_text(json.dumps({"runs": runs}))
    results = read_results(setup, "banking77", task)
    assert "| Banking77 | accuracy | - | - | all 2 collapsed | - |" in render(
        {"banking77": results}, "model", []
    )
    assert run_task(setup, "banking77", task) == 0


def test_questions_are_measured_by_both_versions(
    command: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(TASKS["squad"], options=("--length", "128"))  # the model's positions
    monkeypatch.setattr("benchmarks.results.__main__.TASKS", {"squad": short})
    assert main([*command, "--tasks", "squad", "--seeds", "1"]) == 0
    table = capsys.readouterr().out
    assert "| SQuAD 1.1 | F1 |" in table
    assert "| SQuAD 2.0 | best F1 |" in table
    record = json.loads((tmp_path / "runs/squad/seed-0/figures.json").read_bytes())
    assert "question_answering_best_f1" in record["figures"]["SQuAD 2.0"]


def test_all_that_is_missing_is_listed(command: list[str], data: Path, capsys: Capture) -> None:
    (data / "banking77/train.csv").unlink()
    assert main([*command, "--tasks", "cola", "banking77", "sick"]) == 1
    error = capsys.readouterr().err
    for name in ("cola/ of cola", "banking77/train.csv", "sick/SICK_train.txt", "--tasks"):
        assert name in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("metric", ["accuracy", "f1", "macro_f1", "matthews_correlation"])
def test_chance_is_the_figure_of_one_answer_for_all(metric: Metric) -> None:
    targets = np.array([0] * 3 + [1] * 5)
    always_one = np.eye(2)[np.ones(8, int)]
    classes = {"no": {"texts": 3}, "yes": {"texts": 5}}
    figure = Figure(title="", key=f"text_classification_{metric}")
    expected = metric_figures((metric,), always_one, targets)[metric]
    assert chance(figure, {"text_classification_classes": classes}) == pytest.approx(expected)


@pytest.fixture
def adaptive(checkpoint_dir: Path, tmp_path: Path) -> Bundle:
    model = load_checkpoint(checkpoint_dir, has_exits=True).eval()
    labels = {"id2label": read_config(checkpoint_dir)["id2label"]}
    folder = tmp_path / "checkpoint"
    save_checkpoint(model, folder, tokenizer_from=checkpoint_dir, extra_config=labels)
    return export_bundle(folder, tmp_path / "bundle").bundle


def test_every_depth_is_measured_and_drawn(adaptive: Bundle, tmp_path: Path) -> None:
    words = ("good", "war and peace", "the city was lost", "music")
    texts = [LabelledText(text=text, pair=None, label=1) for text in words]
    measured = measure(adaptive, texts, num_rounds=1, num_threads=1)
    model = load_checkpoint(tmp_path / "checkpoint").eval()
    tokenizer = AlbertTokenizer.from_file(adaptive.tokenizer_file)
    classified = classify(model, tokenizer, texts, ["negative", "positive"])
    assert classified.layer_logits is not None
    figures = early_exit_figures(("accuracy",), classified.layer_logits, classified.targets)
    by_layer = {str(row["layers"]): row["accuracy"] for row in figures["by_layer"]}
    by_layer["all 3"] = by_layer.pop("3")
    by_patience = {f"patience {row['patience']}": row["accuracy"] for row in figures["by_patience"]}
    expected = {title: 100 * value for title, value in (by_layer | by_patience).items()}
    assert {title: each.accuracy for title, each in measured.items()} == pytest.approx(expected)
    assert measured["all 3"].speed == 1
    assert all(each.speed > 0 for each in measured.values())
    draw([measured, measured], tmp_path / "depth.png")
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")


def test_a_bundle_is_exported_again_for_other_weights_alone(
    adaptive: Bundle, tmp_path: Path
) -> None:
    checkpoint, manifest = tmp_path / "checkpoint", adaptive.folder / "manifest.json"
    written = manifest.stat().st_mtime_ns
    assert open_bundle(checkpoint, adaptive.folder).manifest == adaptive.manifest
    assert manifest.stat().st_mtime_ns == written
    weights = load_file(checkpoint / "model.safetensors")
    weights["classifier.bias"] += 1
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    again = open_bundle(checkpoint, adaptive.folder)
    assert again.folder == adaptive.folder
    stored = load_file(again.folder / "model.safetensors")
    assert torch.equal(stored["classifier.bias"], weights["classifier.bias"])


def test_depth_needs_a_finished_run(data: Path, tmp_path: Path, capsys: Capture) -> None:
    assert depth.main(["--data", str(data), "--output", str(tmp_path / "none")]) == 1
    assert "--tasks sst2-depth" in capsys.readouterr().err
