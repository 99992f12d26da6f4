"""Classifiers after each layer: trained together, measured by layers and patience, and cut."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from albert_serve.config import AlbertConfig
from albert_serve.errors import ConfigError
from tests.training.support import (
    hf_load,
    ragged,
    randomize,
    run_command,
)
from training import evaluate
from training.data.batch import ExampleBatch
from training.evaluation.early_exit import early_exit_figures, layers_used
from training.finetune import main
from training.losses import classification_loss, early_exit_loss
from training.model.albert import ModelInputs
from training.model.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from training.model.heads import AlbertForTasks, PooledHead
from training.model.resizing import with_layers

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

NUM_LAYERS = 4
CONFIG = AlbertConfig(
    vocab_size=800,
    embedding_size=16,
    hidden_size=32,
    num_layers=NUM_LAYERS,
    num_heads=2,
    ffn_size=64,
    max_positions=64,
    classifier_dropout=0.0,
)
WORDS = {"glad": ("good", "great", "beautiful", "first"), "sad": ("died", "lost", "war", "not")}
THINGS = ("game", "city", "music", "work", "school")


def adaptive_model(config: AlbertConfig = CONFIG, num_labels: int = 3) -> AlbertForTasks:
    model = AlbertForTasks(config, {"text-classification": num_labels}, has_exits=True)
    randomize(model, seed=0)
    return model.eval()


@pytest.fixture
def moods(tmp_path: Path) -> Path:
    rows = [
        f"the {thing} was {word},{label}"
        for label, words in WORDS.items()
        for thing, word in itertools.product(THINGS, words)
    ]
    file = tmp_path / "moods.csv"
    file.write_text("\n".join(["text,label", *rows, ""]))
    return file


@pytest.fixture
def start(pretrained: Path, moods: Path, tmp_path: Path) -> list[str]:
    """A run of 60 steps of a model of four layers; its weights were trained as two."""
    folder = tmp_path / "start"
    shutil.copytree(pretrained / "checkpoint", folder)
    hf = read_config(folder)
    (folder / "config.json").write_text(json.dumps({**hf, "num_hidden_layers": NUM_LAYERS}))
    return [
        *("--initialize-from", str(folder), "--length", "32", "--batch-size", "16"),
        *("--steps", "60", "--lr", "5e-3", "--adamw-lr", "1e-2", "--precision", "fp32"),
        *("--device", "cpu", "--text-classification", str(moods), "--validation", str(moods)),
        *("--validate-every", "30", "--adaptive-depth"),
    ]


def layer_logits(model: AlbertForTasks, batch: ExampleBatch) -> list[torch.Tensor]:
    """Each classifier on the pooled first row of each layer's states, by hand."""
    head = model.heads["text-classification"]
    assert isinstance(head, PooledHead)
    assert model.exits is not None
    outputs = [*model.exits, head.output]
    states = list(model.albert.states(batch.tokens))[1:]
    return [output(head.pooler(state[:, 0])) for output, state in zip(outputs, states, strict=True)]


def example_batch(model: AlbertForTasks, tokens: ModelInputs | None = None) -> ExampleBatch:
    tokens = tokens or ragged()
    count, length = tokens.ids.shape
    return ExampleBatch(
        task="text-classification",
        tokens=tokens,
        num_tokens=count * length,
        counts={"text-classification": count},
        firsts=torch.arange(count) * length,
        sizes=torch.full((count,), length),
        targets=torch.arange(count) % model.tasks["text-classification"],
    )


def test_the_loss_is_the_mean_over_layers_weighted_by_their_numbers() -> None:
    model = adaptive_model().train()
    batch = example_batch(model)

    score = early_exit_loss(model, batch)["text-classification"]

    each = [
        F.cross_entropy(logits, batch.targets, reduction="sum")
        for logits in layer_logits(model, batch)
    ]
    expected = sum(number * loss for number, loss in enumerate(each, 1)) / 10
    torch.testing.assert_close(score.loss, expected)
    last = classification_loss(model, batch)["text-classification"]
    assert score.logits is not None
    assert last.logits is not None
    torch.testing.assert_close(score.logits, last.logits)
    assert score.right == last.right


@pytest.mark.parametrize(
    ("labels", "patience", "used"),
    [
        ([0, 0, 0, 0], 1, 2),
        ([0, 0, 0, 0], 2, 3),
        ([0, 0, 0, 0], 3, 4),
        ([0, 1, 1, 0], 1, 3),
        ([0, 1, 1, 0], 2, 4),
        ([0, 0, 1, 1], 1, 2),
        ([0, 0, 1, 1], 2, 4),
        ([0, 1, 0, 1], 1, 4),
    ],
)
def test_a_text_is_answered_when_layers_agree(labels: list[int], patience: int, used: int) -> None:
    logits = np.eye(2, dtype=np.float32)[labels][None]
    assert layers_used(logits, patience).tolist() == [used]


def test_figures_by_patience_are_those_of_the_layers_that_were_used() -> None:
    labels = np.array([[0, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]])
    logits = np.eye(2, dtype=np.float32)[labels]
    figures = early_exit_figures(("accuracy",), logits, np.array([0, 0, 1]))
    by_layer = [row["accuracy"] for row in figures["by_layer"]]
    assert by_layer == pytest.approx([2 / 3, 1, 2 / 3, 1 / 3])
    assert figures["by_patience"] == [
        {"patience": 1, "mean_layers": pytest.approx(7 / 3), "accuracy": 1.0},
        {"patience": 2, "mean_layers": pytest.approx(11 / 3), "accuracy": pytest.approx(2 / 3)},
        {"patience": 3, "mean_layers": 4.0, "accuracy": pytest.approx(1 / 3)},
    ]


def test_from_training_to_figures_after_each_layer(
    start: list[str], moods: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"
    assert run(start, folder) == 0
    model = load_checkpoint(folder / "best")
    assert model.exits is not None
    assert len(model.exits) == NUM_LAYERS - 1
    data = ("--text-classification", str(moods))

    report = tmp_path / "report"
    assert evaluate.main([str(folder / "best"), *data, "--report", str(report)]) == 0

    assert "## text_classification_by_layer\n" in (report / "report.md").read_text()
    figures = json.loads((folder / "best/evaluation.json").read_text())
    by_layer = figures["text_classification_by_layer"]
    assert [row["layers"] for row in by_layer] == [1, 2, 3, 4]
    assert by_layer[-1]["accuracy"] == figures["text_classification_accuracy"]
    assert by_layer[-1]["accuracy"] > 0.9
    assert by_layer[0]["accuracy"] > 0.6  # a classifier that was not trained has a half
    by_patience = figures["text_classification_by_patience"]
    layers = [row["mean_layers"] for row in by_patience]
    assert 2 <= layers[0] < layers[1] < layers[2] == 4
    assert "mean_layers" in capsys.readouterr().out
    # The one that was trained for it answers a model that is cut.
    for number, row in enumerate(by_layer, 1):
        file = tmp_path / f"{number}.json"
        options = ["--layers", str(number), "--output", str(file)]
        assert evaluate.main([str(folder / "best"), *data, *options]) == 0
        cut = json.loads(file.read_text())
        assert cut["layers"] == number
        assert cut["text_classification_accuracy"] == row["accuracy"]
        assert len(cut.get("text_classification_by_layer", [0])) == number
    # `transformers` reads the last layer's.
    theirs = hf_load("AlbertForSequenceClassification", folder / "best")
    ids = torch.tensor([[2, 10, 11, 3]])
    batch = example_batch(model.eval(), ModelInputs(ids=ids, types=torch.zeros_like(ids)))
    with torch.inference_mode():
        expected = layer_logits(model, batch)[-1]
        torch.testing.assert_close(theirs(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_a_run_keeps_its_classifiers(
    start: list[str], tmp_path: Path, capsys: Capture, first: bool
) -> None:
    """It can neither gain nor lose them, even if its record does not say what it has."""
    without = [each for each in start if each != "--adaptive-depth"]
    commands = [start, without] if first else [without, start]
    assert run([*commands[0], "--steps", "2"], tmp_path / "run") == 0
    record = json.loads((tmp_path / "run/run.json").read_text())
    del record["adaptive_depth"]
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert run([*commands[1], "--steps", "3"], tmp_path / "run") == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    has = "has" if first else "has no"
    assert f"the run was started with other options: its model {has} classifiers.0.bias" in error
    assert "--adaptive-depth" in error


def test_classifiers_of_another_run_are_left_out_or_trained_on(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    assert run([*start, "--steps", "5"], tmp_path / "first") == 0
    first = str(tmp_path / "first/checkpoint")
    options = ["--initialize-from", first, "--steps", "1", "--lr", "1e-9", "--adamw-lr", "1e-9"]
    assert run([*start, *options], tmp_path / "on") == 0
    before, after = (load_checkpoint(tmp_path / name / "checkpoint") for name in ("first", "on"))
    assert before.exits is not None
    assert after.exits is not None
    torch.testing.assert_close(after.exits.state_dict(), before.exits.state_dict())
    notice = "the checkpoint's classifiers after each layer are left out"
    assert notice not in capsys.readouterr().out
    without = [each for each in start if each != "--adaptive-depth"]
    assert run([*without, *options], tmp_path / "without") == 0
    assert load_checkpoint(tmp_path / "without/checkpoint").exits is None
    assert notice in capsys.readouterr().out


def test_layers_with_weights_of_their_own_are_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, num_groups=2)
    with pytest.raises(ConfigError, match="share all weights"):
        adaptive_model(config)
    save_checkpoint(AlbertForTasks(config, {"fill-mask": 800}), tmp_path)
    with (
        pytest.raises(CheckpointError, match="only a model whose layers share all"),
        with_layers(tmp_path, 2),
    ):
        pass


@pytest.mark.parametrize("num_layers", [0, 5])
def test_there_are_no_more_layers_than_the_checkpoint_has(tmp_path: Path, num_layers: int) -> None:
    save_checkpoint(adaptive_model(), tmp_path)
    with pytest.raises(CheckpointError, match="1 to 4"), with_layers(tmp_path, num_layers):
        pass


def test_a_cut_model_has_the_same_weight_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AlbertForTasks(CONFIG, {"text-classification": 3}).eval()
    save_checkpoint(model, tmp_path)
    (tmp_path / "evaluation.json").write_text("{}")
    tokens = ragged()
    with with_layers(tmp_path, 2) as folder:
        assert (folder / "model.safetensors").samefile(tmp_path / "model.safetensors")
        assert not (folder / "evaluation.json").exists()
        cut = load_checkpoint(folder).eval()
        with torch.inference_mode():
            torch.testing.assert_close(cut(tokens), list(model.albert.states(tokens))[2])
