"""Finetuning of standard tasks: resumed, not repeated, and written as tables."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest

from albert_serve.files import sha256_of
from benchmarks.results.__main__ import main
from benchmarks.results.page import chance
from benchmarks.results.tasks import Figure
from tests.training.conftest import one_thread  # noqa: F401 - a fixture
from tests.training.support import REPOSITORY
from training.data.questions import read_squad
from training.evaluation.metrics import metric_figures
from training.glue.tasks import Metric

DATA = REPOSITORY / "tests" / "data"


def copy_data(folder: Path) -> None:
    """Data of two tasks under the names that they have in a data folder."""
    shutil.copytree(DATA / "banking77", folder / "banking77")
    shutil.copytree(DATA / "squad_dev", folder / "squad")
    for name in ("train-v1.1.json", "squadshifts-new_wiki.json"):
        shutil.copy(DATA / "squad.json", folder / "squad" / name)


def test_tasks_are_trained_measured_and_not_repeated(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_data(tmp_path / "data")
    page, runs = tmp_path / "results.md", tmp_path / "runs"
    marks = [
        f"<!-- written by python -m benchmarks.results: {word} -->" for word in ("begin", "end")
    ]
    page.write_text("before\n{}\n{}\nafter\n".format(*marks))
    start = ["--initialize-from", str(checkpoint_dir), "--device", "cpu", "--seeds", "2"]
    where = ["--data", str(tmp_path / "data"), "--output", str(runs)]
    command = [*start, *where, "--tasks", "banking77"]
    assert main([*command, "squad", "--steps", "2", "--write", str(page)]) == 0
    (questions,) = runs.glob("squad/seed-0/figures.json")
    assert str(runs / "unanswerable.json.xz") in json.loads(questions.read_bytes())["options"]
    assert {each.kind for each in read_squad([runs / "unanswerable.json.xz"])} >= {"exchanged"}
    assert "| SQuAD 2.0 | best F1 |" in page.read_text()
    files = sorted(runs.glob("banking77/seed-*/figures.json"))
    records = [json.loads(file.read_bytes()) for file in files]
    assert [record["stage"]["steps"] for record in records] == [2, 2]
    figures = [record["figures"]["Banking77"] for record in records]
    points = [100 * each["text_classification_accuracy"] for each in figures]
    median = statistics.median(points)
    row = f"| Banking77 | accuracy | {median:.1f} | {min(points):.1f} to {max(points):.1f} | 2"
    assert row in page.read_text()
    assert f"SHA-256 `{sha256_of(checkpoint_dir / 'model.safetensors')[:12]}`" in page.read_text()

    written = [file.stat().st_mtime_ns for file in files]
    assert main([*command, "--steps", "2"]) == 0
    assert [file.stat().st_mtime_ns for file in files] == written
    capsys.readouterr()
    assert main([*command, "--steps", "3"]) == 1
    assert "give another --output" in capsys.readouterr().err
    (tmp_path / "data" / "sick").mkdir()
    for task, missing in (("cola", "cola"), ("sick", "sick/SICK_train.txt")):
        assert main([*command, "--tasks", task]) == 1
        assert f"there is no {tmp_path / 'data' / missing};" in capsys.readouterr().err


def test_tables_of_the_document_name_their_checkpoint() -> None:
    """By hash; one that is not what ships is said to be an earlier one."""
    shipped = sha256_of(REPOSITORY / "models" / "albert-small-en" / "model.safetensors")
    page = (REPOSITORY / "docs" / "measurements.md").read_text(encoding="utf-8")
    _, _, results = page.partition("\n## Finetuning on standard tasks\n")
    for section in results.split("\n## ")[0].split("\n### "):
        of_tables = re.findall(r"SHA-256 `(\w{12})`(, an earlier model than the one)?", section)
        assert of_tables
        assert all((sha256 in shipped) == (not earlier) for sha256, earlier in of_tables)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "macro_f1", "matthews_correlation"])
def test_chance_is_the_figure_of_one_answer_for_all(metric: Metric) -> None:
    targets = np.array([0] * 3 + [1] * 5)
    always_one = np.eye(2)[np.ones(8, int)]
    classes = {"no": {"texts": 3}, "yes": {"texts": 5}}
    figure = Figure(title="", key=f"text_classification_{metric}")
    expected = metric_figures((metric,), always_one, targets)[metric]
    assert chance(figure, {"text_classification_classes": classes}) == pytest.approx(expected)
