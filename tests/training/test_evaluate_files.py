"""The files that an evaluation writes, and labels in `config.json` that it cannot read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from training.data.labelled.texts import read_labelled
from training.evaluate import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(finetuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finetuned / "checkpoint", tmp_path_factory.mktemp("e") / "c"))


@pytest.mark.parametrize(
    ("id2label", "message"),
    [
        (
            {"zero": "a", "one": "b"},
            "names 2 labels; the classifier has 2 outputs, so it must name",
        ),
        ({"0": "a", "1": 7}, "each by a text; it is {'0': 'a', '1': 7}"),
        (["a", "b"], "id2label of config.json is ['a', 'b'], not an object"),
    ],
)
def test_labels_that_cannot_be_read(
    checkpoint: Path,
    labelled: Path,
    tmp_path: Path,
    id2label: object,
    message: str,
    capsys: Capture,
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": id2label}))
    assert main([str(folder), "--text-classification", str(labelled)]) == 1
    assert message in capsys.readouterr().err


def test_reports_and_predictions_of_one_evaluation(
    checkpoint: Path, labelled: Path, tmp_path: Path
) -> None:
    """In bf16, which changes the loss a little."""
    output, report = tmp_path / "figures.json", tmp_path / "report"
    options = [str(checkpoint), "--text-classification", str(labelled), "--output", str(output)]
    assert main(options) == 0
    exact = json.loads(output.read_text())
    more = ["--report", str(report), "--predictions", str(tmp_path / "a.tsv")]
    assert main([*options, *more, "--precision", "bf16"]) == 0
    figures = json.loads(output.read_text())
    loss = "text_classification_loss"
    assert figures[loss] == pytest.approx(exact[loss], abs=0.1)
    assert figures[loss] != exact[loss]
    assert "# Evaluation of" in (report / "report.md").read_text()
    lines = (tmp_path / "a.tsv").read_text().splitlines()[1:]
    predicted = [line.split("\t")[1] for line in lines]
    names = ["negative", "positive"]
    texts, _ = read_labelled([labelled], names)
    right = [names.index(each) == text.label for each, text in zip(predicted, texts, strict=True)]
    assert sum(right) / 40 == figures["text_classification_accuracy"]
