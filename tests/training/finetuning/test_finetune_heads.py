"""Several classifiers of texts in one set of weights, from training to figures."""

from __future__ import annotations

import itertools
import json
import shlex
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from export.__main__ import main as export
from tests.training.support import best_step, evaluated, read_metrics, run_command, validations
from training.commands.finetune import main
from training.model.checkpoint import read_config, read_shapes, read_weights

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

DEFAULT = "text-classification"
THING = "text-classification/thing"
MOODS = {"glad": ("good", "great", "beautiful", "first"), "sad": ("died", "lost", "war", "not")}
THINGS = ("game", "city", "music")


def rows(thing_first: bool) -> list[str]:
    """Each text with what it is about, or with its mood."""
    return [
        f"the {thing} was {word},{thing if thing_first else mood}"
        for mood, words in MOODS.items()
        for thing, word in itertools.product(THINGS, words)
    ]


class Heads(NamedTuple):
    """A run of two classifiers, its options and the files of both."""

    folder: Path
    options: list[str]
    moods: Path
    things: Path


@pytest.fixture(scope="module")
def trained(start: list[str], tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """The second classifier has columns, labels and a metric of its own."""
    folder = tmp_path_factory.mktemp("heads")
    moods, things = folder / "moods.csv", folder / "things.csv"
    moods.write_text("\n".join(["text,label", *rows(False)]))
    things.write_text("\n".join(["words,about", *rows(True)]))
    options = [
        *(*start, "--text-classification", str(moods), "--validation", str(moods)),
        *("--head", "thing", "--text-classification", str(things), "--validation", str(things)),
        *("--text-column", "words", "--label-column", "about", "--metric", "macro_f1"),
        *("--batch-size", "12", "--lr", "5e-3", "--steps", "160", "--validate-every", "40"),
    ]
    assert run(options, folder / "two moods") == 0
    return Heads(folder / "two moods", options, moods, things)


def test_both_are_learnt_each_with_labels_of_its_own(trained: Heads, tmp_path: Path) -> None:
    checkpoint = trained.folder / "best"
    hf = read_config(checkpoint)
    assert list(hf["id2label"].values()) == ["glad", "sad"]
    assert list(hf["albert_heads"]) == ["thing"]
    assert hf["albert_heads"]["thing"]["id2label"] == {"0": "city", "1": "game", "2": "music"}
    shapes = read_shapes(checkpoint)
    assert shapes["classifier.weight"] == (2, 32)
    assert shapes["heads.thing.classifier.weight"] == (3, 32)

    data = ["--text-classification", str(trained.moods), "--head", "thing"]
    data += ["--text-classification", str(trained.things)]
    data += ["--text-column", "words", "--label-column", "about"]
    figures = evaluated(checkpoint, *data, "--predictions", str(tmp_path / "predicted.tsv"))
    for end, name, right in (("", "", rows(False)), ("-thing", "/thing", rows(True))):
        lines = (tmp_path / f"predicted{end}.tsv").read_text().splitlines()[1:]
        pairs = zip(lines, right, strict=True)
        num_right = sum(one.split("\t")[1] == other.split(",")[1] for one, other in pairs)
        accuracy = figures[f"text_classification{name}_accuracy"]
        assert accuracy == pytest.approx(num_right / len(right))
        assert accuracy > 0.9
    assert list(figures["text_classification/thing_classes"]) == ["city", "game", "music"]


def test_the_last_line_exports_and_measures_on_the_validation_files(
    trained: Heads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Also of a run that has ended before."""
    monkeypatch.chdir(tmp_path)
    assert run(trained.options, trained.folder) == 0
    *_, last = capsys.readouterr().out.splitlines()
    program, verb, *words = shlex.split(last.partition(": ")[2])
    assert (program, verb) == ("albert-serve", "export")
    assert export([*words, "--max-cost", "100"]) == 0
    assert (tmp_path / "bundles" / "two moods" / "manifest.json").is_file()


def test_each_is_validated_and_the_mean_decides(trained: Heads) -> None:
    folder = trained.folder
    moods = validations(folder, DEFAULT, "accuracy")
    things = validations(folder, THING, "macro_f1")
    assert list(moods) == list(things) == [0, 40, 80, 120, 160]
    means = {step: (moods[step] + things[step]) / 2 for step in moods}
    assert means[best_step(folder)] == max(means.values())
    assert "thing" in json.loads((folder / "run.json").read_text())["heads"]
    training = json.loads((folder / "checkpoint/training.json").read_text())
    settings = training["stages"][-1]["settings"]
    assert settings["validation"] == settings["text_classification"] == ["moods.csv", "things.csv"]
    # Each step trains one of them.
    names = {name for line in read_metrics(folder) for name in line if name.endswith("/loss")}
    assert {f"{DEFAULT}/loss", f"{THING}/loss"} <= names


def test_a_head_is_added_to_a_model_that_has_some(
    trained: Heads, start: list[str], tmp_path: Path
) -> None:
    """The others keep their weights but for the backbone's, and their labels and names."""
    best, moods, folder = trained.folder / "best", trained.moods, tmp_path / "added"
    tiny = ["--steps", "2", "--lr", "1e-9", "--adamw-lr", "1e-9", "--weight-decay", "0"]
    head = ["--head", "mood-2", "--text-classification", str(moods), "--labels", "sad", "glad"]
    options = [*start, "--initialize-from", str(best), *tiny, *head]
    assert run(options, folder) == 0
    before, after = (read_config(each) for each in (best, folder / "checkpoint"))
    for key in ("id2label", "label2id", "problem_type"):
        assert after[key] == before[key]
    assert list(after["albert_heads"]) == ["thing", "mood-2"]
    assert after["albert_heads"]["thing"] == before["albert_heads"]["thing"]
    assert list(after["albert_heads"]["mood-2"]["id2label"].values()) == ["sad", "glad"]
    for name in ("classifier.weight", "heads.thing.classifier.bias"):
        old, new = (read_weights(each)[name] for each in (best, folder / "checkpoint"))
        torch.testing.assert_close(new, old, atol=1e-6, rtol=0)
    # What was learnt is still answered.
    data = ("--text-classification", str(moods))
    assert evaluated(folder / "checkpoint", *data)["text_classification_accuracy"] > 0.9
