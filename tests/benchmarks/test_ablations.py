"""An ablation compares like with like, says how sure it is, and loses nothing when stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.ablations.__main__ import main
from benchmarks.ablations.findings import VariantResult, VariantResults, find_directions
from benchmarks.ablations.measure import (
    PAIR_TASKS,
    AblationTexts,
    length_features,
    measure_variant,
    probe,
    read,
)
from benchmarks.ablations.tables import AblationBase, AblationTable, distinct_variants
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
BASE = AblationBase(hidden_size=24, embedding_size=8, embedding_sizes=(8, 16), num_steps=5)


def all_tables() -> list[AblationTable]:
    return [BASE.table(name) for name in ("sentence", "sharing", "embedding")]


def test_rows_of_a_table_differ_in_one_thing_and_models_are_run_once() -> None:
    variants = distinct_variants(all_tables())
    assert len({variant.name for variant in variants}) == len(variants) == 4 + 3 + 2
    for table in all_tables():
        models = [row.variant for row in table.rows if row.paper or table.name == "embedding"]
        names = ("sharing", "embedding_size", "sentence_task", "num_steps")
        differing = [name for name in names if len({getattr(each, name) for each in models}) > 1]
        assert len(differing) == 1, table.name
        assert differing != ["num_steps"]


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
    with_head = measure_variant(a_model("fill-mask", "sentence-order"), "sop", texts, CPU)
    figures = with_head.figures()
    of_other = measure_variant(a_model("fill-mask"), "none", texts, CPU).figures()
    assert figures["masked_loss"] == figures["masked_loss_sop"]
    assert figures["parameters"] == of_other["parameters"]
    for task in PAIR_TASKS:
        assert f"{task}_head_accuracy" in figures
        assert f"{task}_head_accuracy" not in of_other
        for name in (f"{task}_majority", f"{task}_pairs", f"{task}_lengths_accuracy"):
            assert figures[name] == of_other[name]
    accuracy, pairs = figures["sop_head_accuracy"], figures["sop_pairs"]
    binomial = math.sqrt(accuracy * (1 - accuracy) / pairs)
    assert figures["sop_head_accuracy_se"] == pytest.approx(binomial)


def a_result(**predictions: NDArray[np.float32]) -> VariantResult:
    figures = {name: float(values.mean()) for name, values in predictions.items()}
    return VariantResult(figures={"sop_majority": 0.5, **figures}, predictions=predictions)


def coins(part: float, seed: int) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).random(1000) < part).astype(np.float32)


def losses_of(**by_label: float) -> VariantResults:
    noise = np.random.default_rng(0).normal(0, 0.5, (4, 1000)).astype(np.float32)
    return {
        row.variant: a_result(masked_loss=np.float32(by_label[row.label.split()[0]]) + noise[index])
        for index, row in enumerate(BASE.table("sharing").rows)
    }


def test_a_direction_is_claimed_only_beyond_the_noise() -> None:
    as_in_paper = losses_of(all=6.5, attention=6.0, FFN=6.5, nothing=6.0)
    verdicts = [each.verdict for each in find_directions(all_tables(), as_in_paper)]
    assert verdicts == ["reproduces", "reproduces", "no better here either", "reproduces"]
    turned = losses_of(all=6.5, attention=6.5, FFN=6.0, nothing=6.0)
    verdicts = [each.verdict for each in find_directions(all_tables(), turned)]
    assert verdicts == ["reproduces", "not seen here", "does not reproduce", "the reverse"]


def test_a_sentence_task_is_solved_above_the_accuracy_without_text() -> None:
    table = BASE.table("sentence")
    rows = {row.label: row.variant for row in table.rows}
    good, by_lengths = coins(0.8, 0), coins(0.57, 1)
    results = {
        rows["sop trained"]: a_result(sop_head_accuracy=good, sop_lengths_accuracy=by_lengths),
        rows["nsp trained"]: a_result(
            sop_head_accuracy=coins(0.57, 2), sop_lengths_accuracy=by_lengths
        ),
    }
    solved, not_solved = find_directions([table], results)
    assert solved.verdict == "reproduces"
    assert solved.ahead.mean == pytest.approx(good.mean() - by_lengths.mean())
    assert not_solved.verdict == "no better here either"


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
    results = json.loads((output / "results.json").read_text())
    names = ["share-all-e8-sop-4-steps-seed0", "share-all-e16-sop-4-steps-seed0"]
    assert list(results["runs"]) == names
    small, wide = (results["runs"][name] for name in names)
    assert small["tokens"] == wide["tokens"] > 4 * 8 * 40
    # 800 words, 48 positions and 2 types of 8 more dimensions, their norm and their map to H.
    assert wide["parameters"] - small["parameters"] == 8 * (800 + 48 + 2) + 2 * 8 + 8 * 16
    table = (output / "ablations.md").read_text()
    assert "| E = 8 |" in table
    assert "not run" not in table

    files = sorted((output / "runs").rglob("*"))
    before = [file.stat().st_mtime_ns for file in files]
    assert main(command) == 0
    assert [file.stat().st_mtime_ns for file in files] == before
    assert main([*command, "--layers", "3"]) == 1
    assert "num_layers 2, not 3" in capsys.readouterr().err
    damaged = output / "runs" / names[0] / "figures.json"
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(command) == 1
    assert f"delete {damaged} to measure again" in capsys.readouterr().err
