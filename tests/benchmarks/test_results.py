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
from benchmarks import budgets, overlap
from benchmarks.results.__main__ import main
from benchmarks.results.page import chance
from benchmarks.results.tasks import Figure
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


@pytest.mark.extended
def test_the_table_has_a_row_for_each_budget(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(DATA / "banking77" / f"{name}.csv") for name in ("train", "test")]
    assert budgets.main([*files, "--budgets", "1s", "--busy-budget", "", "--few", "8"]) == 0
    *_, heads, budget, few_heads, few, peer = capsys.readouterr().out.splitlines()
    for line, title in ((heads, "--head-only"), (budget, "--budget 1s"), (few, "no options, 8")):
        assert line.startswith(f"| {title}")
    assert [line.split(" | ")[1] for line in (heads, few_heads, peer)] == ["240", "48", "240"]
    assert all(float(line.split(" | ")[3]) > 60 for line in (heads, budget, few, peer))


WORDS = [f"Word{number}" for number in range(20)]


def squad(*contexts: str) -> str:
    qas = [{"id": "1", "question": "Which?", "answers": [{"text": "x", "answer_start": 0}]}]
    articles = [{"title": c[:3], "paragraphs": [{"context": c, "qas": qas}]} for c in contexts]
    return json.dumps({"version": "1.1", "data": articles})


@pytest.mark.parametrize(
    ("context", "is_known"),
    [
        (" ".join(WORDS), True),
        (", ".join(WORDS).upper(), True),  # whatever stands between the words
        (" ".join([*WORDS[:14], *("other" for _ in range(6))]), True),  # 7 of 13
        (" ".join([*WORDS[:13], *("other" for _ in range(7))]), False),  # 6 of 13
        (" ".join(reversed(WORDS)), False),
        (" ".join(WORDS[:7]), False),  # no 8-gram
    ],
)
def test_contexts_over_the_share_are_those_of_the_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], context: str, is_known: bool
) -> None:
    (tmp_path / "corpus.txt").write_text("Before. " + " ".join(WORDS) + "; behind.\n")
    questions, output = tmp_path / "squad.json", tmp_path / "apart.json"
    questions.write_text(squad(context, "nothing of it"))
    command = ["--corpus", str(tmp_path / "corpus.txt"), "--questions", str(questions)]
    assert overlap.main([*command, "--output", str(output)]) == 0
    assert f"{int(is_known)} of 2 contexts, in {int(is_known)} of 2 articles" in (
        capsys.readouterr().out
    )
    left = json.loads(output.read_text())["data"]
    expected = json.loads(squad(*([] if is_known else [context]), "nothing of it"))["data"]
    assert left == expected
