"""An ablation compares like with like, says how sure it is, and loses nothing when stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.ablations.__main__ import main
from benchmarks.ablations.measure import (
    PAIR_TASKS,
    AblationTexts,
    length_features,
    measure_variant,
    probe,
    read,
)
from tests.training.conftest import one_thread  # noqa: F401 - a fixture
from tests.training.support import WIKI, randomize
from training.data.examples import SentenceTask
from training.data.masking import NgramMasking, word_starts
from training.data.shards import Shards
from training.evaluation.validation import measure
from training.losses import Objective
from training.model.heads import AlbertForTasks, Task, head_sizes
from training.prepare import prepare

CPU = torch.device("cpu")


def test_a_probe_learns_what_follows_from_the_features_and_no_noise() -> None:
    rng = np.random.default_rng(0)
    features = torch.from_numpy(rng.normal(size=(1200, 6)) * [1, 1e3, 1e-3, 1, 1, 0] + 5)
    labels = (features[:, 1] - 5 + 1e6 * (features[:, 2] - 5) > 0).long()
    guesses = probe(features[:800], labels[:800], features[800:])
    assert (guesses == labels[800:]).double().mean() > 0.95
    noise = torch.from_numpy(rng.integers(0, 2, 1200))
    guesses = probe(features[:800], noise[:800], features[800:])
    assert abs((guesses == noise[800:]).double().mean() - 0.5) < 0.1
    lengths = torch.from_numpy(rng.integers(1, 60, (800, 2)))
    longer = (lengths[:, 0] > lengths[:, 1]).long()
    guesses = probe(length_features(lengths[:400]), longer[:400], length_features(lengths[400:]))
    assert (guesses == longer[400:]).double().mean() > 0.95


@pytest.fixture(scope="module")
def texts(shards: Shards, tokenizer: AlbertTokenizer) -> AblationTexts:
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    return AblationTexts(
        training=shards, held_out=shards, masking=masking, length=48, num_tokens=3000
    )


def a_model(*tasks: Task) -> AlbertForTasks:
    config = AlbertConfig(
        vocab_size=800,
        embedding_size=8,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        ffn_size=32,
        max_positions=48,
    )
    model = AlbertForTasks(config, head_sizes(config, tasks))
    randomize(model, 0)
    return model


@pytest.mark.parametrize("task", PAIR_TASKS)
def test_readings_agree_with_validation(texts: AblationTexts, task: SentenceTask) -> None:
    model = a_model("fill-mask", "sentence-order")
    batches = list(texts.batches(task, texts.held_out))
    tallies = measure(Objective(model, CPU), batches, ("fill-mask", "sentence-order"), CPU)
    assert tallies is not None
    reading = read(model, batches, CPU)
    masked, order = tallies["fill-mask"], tallies["sentence-order"]
    assert len(reading.losses) == masked.count
    assert reading.losses.mean().item() == pytest.approx(masked.loss, rel=1e-4)
    assert reading.is_right.double().mean().item() == pytest.approx(masked.accuracy)
    assert len(reading.labels) == len(reading.features) == order.count > 20
    right = (reading.guesses == reading.labels).double().mean().item()
    assert right == pytest.approx(order.accuracy)


def test_every_model_predicts_the_same_tokens(texts: AblationTexts) -> None:
    figures = measure_variant(a_model("fill-mask", "sentence-order"), "sop", texts, CPU)
    of_other = measure_variant(a_model("fill-mask"), "none", texts, CPU)
    assert figures["parameters"] == of_other["parameters"]
    for task in PAIR_TASKS:
        assert f"{task}_head_accuracy" in figures
        assert f"{task}_head_accuracy" not in of_other
        for name in (f"{task}_majority", f"{task}_pairs", f"{task}_lengths_accuracy"):
            assert figures[name] == of_other[name]
    accuracy, pairs = figures["sop_head_accuracy"], figures["sop_pairs"]
    binomial = math.sqrt(accuracy * (1 - accuracy) / pairs)
    assert figures["sop_head_accuracy_se"] == pytest.approx(binomial)


def test_an_ablation_writes_tables_and_repeats_no_run(
    vocab_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, output = tmp_path / "shards", tmp_path / "out"
    prepare([WIKI], vocab_dir / "tokenizer.json", corpus)
    command = [
        *("--shards", str(corpus), "--validation", str(corpus), "--tokenizer", str(vocab_dir)),
        *("--hidden-size", "16", "--layers", "2", "--heads", "2", "--embedding-size", "8"),
        *("--embedding-sizes", "8", "--length", "48", "--batch-size", "8", "--steps", "4"),
        *("--held-out-tokens", "3000", "--no-compile", "--device", "cpu", "--tables", "embedding"),
        *("--output", str(output)),
    ]
    assert main([*command, "--validation", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert not output.exists()
    assert main(command) == 0
    names = ["share-all-e8-sop-4-steps-seed0", "share-all-e16-sop-4-steps-seed0"]
    runs = [output / "runs" / name / "figures.json" for name in names]
    small, wide = (json.loads(file.read_bytes()) for file in runs)
    assert small["tokens"] == wide["tokens"] > 4 * 8 * 40
    # 800 words, 48 positions and 2 types of 8 more dimensions, their norm and their map to H.
    assert wide["parameters"] - small["parameters"] == 8 * (800 + 48 + 2) + 2 * 8 + 8 * 16
    table = (output / "ablations.md").read_text()
    loss, error = wide["masked_loss"], wide["masked_loss_se"]
    assert "| E = 8 |" in table
    assert f"| {loss:.3f} ± {error:.3f} |" in table

    files = sorted((output / "runs").rglob("*"))
    before = [file.stat().st_mtime_ns for file in files]
    assert main(command) == 0
    assert [file.stat().st_mtime_ns for file in files] == before
    assert main([*command, "--layers", "3"]) == 1
    assert "layers 2, not 3" in capsys.readouterr().err
    damaged = runs[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(command) == 1
    assert f"delete {damaged} to measure again" in capsys.readouterr().err
