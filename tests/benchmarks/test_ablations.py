"""An ablation compares like with like, says how sure it is, and loses nothing when stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.ablations.__main__ import main
from benchmarks.ablations.findings import Estimates, Result, Results, find_directions
from benchmarks.ablations.measure import (
    PAIR_TASKS,
    Texts,
    length_features,
    measure_variant,
    probe,
    read,
    segment_lengths,
    sequence_means,
)
from benchmarks.ablations.report import render
from benchmarks.ablations.tables import Base, Row, Table, Variant, distinct_variants
from tests.training.conftest import one_thread  # noqa: F401 - a fixture
from tests.training.support import REPOSITORY, WIKI, randomize
from training.data.examples import SentenceTask
from training.data.masking import NgramMasking, word_starts
from training.data.shards import Shards
from training.evaluation.validation import measure
from training.losses import Objective
from training.model.heads import AlbertForTasks, Task, head_sizes
from training.prepare import prepare

Capture = pytest.CaptureFixture[str]

CPU = torch.device("cpu")
BASE = Base(hidden_size=24, embedding_size=8, embedding_sizes=(8, 16), num_steps=5)


def all_tables(base: Base = BASE) -> list[Table]:
    return [base.table(name) for name in ("sentence", "sharing", "embedding")]


# --- what is compared ---------------------------------------------------------------------------


def test_a_model_of_several_tables_is_run_once() -> None:
    variants = distinct_variants(all_tables())
    assert len(variants) == len(set(variants)) == 4 + 3 + 2
    assert len({variant.name for variant in variants}) == len(variants)
    common = Variant(sharing="all", embedding_size=8, sentence_task="sop", num_steps=5)
    for table in all_tables():
        assert sum(row.variants == (common,) for row in table.rows) == 1, table.name


def test_rows_of_a_table_differ_in_one_thing_and_have_equal_steps() -> None:
    for table in all_tables():
        models = [row.variants[0] for row in table.rows if row.paper or table.name == "embedding"]
        differing = [
            name
            for name in ("sharing", "embedding_size", "sentence_task", "num_steps")
            if len({getattr(model, name) for model in models}) > 1
        ]
        assert len(differing) == 1, table.name
        assert differing != ["num_steps"]


def test_the_first_seed_of_all_models_comes_before_the_second_of_any() -> None:
    variants = distinct_variants(all_tables(replace(BASE, num_seeds=2)))
    assert [variant.seed for variant in variants] == [0] * 9 + [1] * 9


def test_rows_have_the_papers_figures() -> None:
    sentence, sharing, embedding = all_tables(replace(BASE, embedding_sizes=(64, 128)))
    assert {row.label: row.paper for row in sentence.rows}["sop trained"] == (
        *("54.0", "78.9", "86.5", "80.1"),
    )
    assert {row.label: row.paper for row in sharing.rows}["attention shared"] == ("64M", "81.7")
    assert {row.label: row.paper for row in embedding.rows} == {
        "E = 24": ("768", "79.8"),  # the hidden size, as 768 is the paper's
        "E = 64": ("64", "79.0"),
        "E = 128": ("128", "80.1"),
    }
    wide, unshared = (BASE.table(name) for name in ("sharing-wide", "embedding-unshared"))
    assert wide.rows[3].paper == ("108M", "82.3")
    assert {variant.embedding_size for variant in distinct_variants([wide])} == {24}
    assert {variant.sharing for variant in distinct_variants([unshared])} == {"none"}


# --- how it is measured -------------------------------------------------------------------------

packed = st.lists(
    st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2)),
    min_size=1,
    max_size=4,
)


def sequences_of(rows: Sequence[tuple[list[int], int]]) -> Tensor:
    """Each token's sequence within its row, of rows of sizes and padding; all are filled up."""
    length = max(sum(sizes) + padding for sizes, padding in rows)
    tokens = torch.full((len(rows), length), -1)
    for line, (sizes, _) in zip(tokens, rows, strict=True):
        numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        line[: len(numbers)] = numbers
    return tokens


@given(packed, st.integers(0, 100))
def test_means_and_lengths_are_of_each_sequence_alone(
    rows: list[tuple[list[int], int]], seed: int
) -> None:
    sequences = sequences_of(rows)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*sequences.shape, 3, generator=generator)
    types = torch.randint(0, 2, sequences.shape, generator=generator)
    means, lengths = [], []
    for line, (sizes, _) in enumerate(rows):
        for number in range(len(sizes)):
            own = sequences[line] == number
            means.append(hidden[line][own].mean(0))
            second = int(types[line][own].sum())
            lengths.append([sizes[number] - second, second])
    torch.testing.assert_close(sequence_means(hidden, sequences), torch.stack(means))
    assert segment_lengths(types, sequences).tolist() == lengths


def test_a_probe_learns_linear_labels_and_no_random_ones() -> None:
    rng = np.random.default_rng(0)
    features = torch.from_numpy(rng.normal(size=(1200, 6)) * [1, 1e3, 1e-3, 1, 1, 0] + 5)
    labels = (features[:, 1] - 5 + 1e6 * (features[:, 2] - 5) > 0).long()
    guesses = probe(features[:800], labels[:800], features[800:])
    assert (guesses == labels[800:]).double().mean() > 0.95
    noise = torch.from_numpy(rng.integers(0, 2, 1200))
    guesses = probe(features[:800], noise[:800], features[800:])
    assert abs((guesses == noise[800:]).double().mean() - 0.5) < 0.1


@given(st.integers(0, 1000), st.floats(0.01, 100), st.floats(-10, 10))
def test_a_probe_does_not_depend_on_a_features_unit(seed: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    labels = (features.sum(1) + torch.randn(60, generator=generator) > 0).long()
    changed = features * torch.tensor([scale, 1.0]) + torch.tensor([shift, 0.0])
    same = probe(features, labels, features) == probe(changed, labels, changed)
    assert same.double().mean() > 0.98  # what lies on the boundary may fall on either side


def test_lengths_tell_a_label_that_follows_from_them() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (800, 2), generator=generator)
    labels = (lengths[:, 0] > lengths[:, 1]).long()
    features = length_features(lengths)
    guesses = probe(features[:400], labels[:400], features[400:])
    assert (guesses == labels[400:]).double().mean() > 0.95


@pytest.fixture(scope="module")
def texts(shards: Shards, tokenizer: AlbertTokenizer) -> Texts:
    return Texts(
        training=shards,
        held_out=shards,
        masking=NgramMasking(word_starts=word_starts(tokenizer)),
        length=48,
        num_tokens=3000,
    )


def a_model(tasks: tuple[Task, ...]) -> AlbertForTasks:
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
def test_readings_agree_with_validation(texts: Texts, task: SentenceTask) -> None:
    tasks: tuple[Task, ...] = ("fill-mask", "sentence-order")
    model = a_model(tasks)
    batches = list(texts.batches(task, texts.held_out))
    tallies = measure(Objective(model, CPU), batches, tasks, CPU)
    assert tallies is not None
    reading = read(model, batches, CPU)
    masked, order = tallies["fill-mask"], tallies["sentence-order"]
    assert len(reading.losses) == masked.count
    assert reading.losses.mean().item() == pytest.approx(masked.loss, rel=1e-4)
    assert reading.is_right.double().mean().item() == pytest.approx(masked.accuracy)
    assert len(reading.labels) == len(reading.features) == order.count > 20
    right = (reading.guesses == reading.labels).double().mean().item()
    assert right == pytest.approx(order.accuracy)


def test_every_model_predicts_the_same_tokens(texts: Texts) -> None:
    with_head = measure_variant(a_model(("fill-mask", "sentence-order")), "sop", texts, CPU)
    without = measure_variant(a_model(("fill-mask",)), "none", texts, CPU)
    figures, of_other = with_head.figures(), without.figures()
    assert figures["masked_loss"] == figures["masked_loss_sop"]
    assert of_other["masked_loss"] == of_other["masked_loss_none"]
    assert figures["parameters"] == of_other["parameters"]
    for task in PAIR_TASKS:
        assert f"{task}_head_accuracy" in figures
        assert f"{task}_head_accuracy" not in of_other
        for name in (f"{task}_majority", f"{task}_pairs", f"{task}_lengths_accuracy"):
            assert figures[name] == of_other[name]
        name = f"masked_loss_{task}"
        assert with_head.predictions[name].shape == without.predictions[name].shape
    accuracy, pairs = figures["sop_head_accuracy"], figures["sop_pairs"]
    binomial = math.sqrt(accuracy * (1 - accuracy) / pairs)
    assert figures["sop_head_accuracy_se"] == pytest.approx(binomial)


# --- how sure it is -----------------------------------------------------------------------------


def a_result(**predictions: NDArray[np.float32]) -> Result:
    figures = {name: float(values.mean()) for name, values in predictions.items()}
    extra = {"parameters": 1e6, "tokens": 1e6}
    extra |= {"nsp_majority": 0.5, "sop_majority": 0.5, "nsp_pairs": 100, "sop_pairs": 100}
    extra |= {"nsp_lengths_accuracy": 0.5, "sop_lengths_accuracy": 0.5}
    return Result(
        figures={**extra, "masked_tokens": 1000.0, **figures},
        predictions=predictions,
    )


def coins(part: float, seed: int, count: int = 1000) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).random(count) < part).astype(np.float32)


def two_rows(base: Base = BASE) -> tuple[Row, Row]:
    rows = base.table("sharing").rows
    return rows[1], rows[2]


def test_predictions_of_the_same_tokens_are_compared_pairwise() -> None:
    row, other = two_rows()
    losses = np.random.default_rng(0).normal(6, 3, 1000).astype(np.float32)
    results = {
        row.variants[0]: a_result(masked_loss=losses),
        other.variants[0]: a_result(masked_loss=losses + np.float32(0.1)),
    }
    estimates = Estimates(results)
    difference = estimates.difference(other, "masked_loss", row, "masked_loss")
    assert difference is not None
    assert difference.mean == pytest.approx(0.1, abs=1e-6)
    assert difference.error < 1e-6
    alone = estimates.of(row, "masked_loss")
    assert alone is not None
    assert alone.error == pytest.approx(float(losses.std()) / math.sqrt(1000))


def test_predictions_of_other_tokens_are_compared_by_their_means() -> None:
    row, other = two_rows()
    results = {
        row.variants[0]: a_result(masked_loss=coins(0.5, 0, 400)),
        other.variants[0]: a_result(masked_loss=coins(0.5, 1, 900)),
    }
    difference = Estimates(results).difference(row, "masked_loss", other, "masked_loss")
    assert difference is not None
    assert difference.error == pytest.approx(math.hypot(0.5 / 20, 0.5 / 30), rel=1e-2)


def test_the_seeds_variance_is_pooled_and_counts_for_all_models() -> None:
    row, other = two_rows(replace(BASE, num_seeds=2))
    flat = np.ones(10, np.float32)
    results = {
        row.variants[0]: a_result(masked_loss=1 * flat),
        row.variants[1]: a_result(masked_loss=3 * flat),
        other.variants[0]: a_result(masked_loss=5 * flat),
    }
    estimates = Estimates(results)
    assert estimates.seed_variance("masked_loss") == pytest.approx(2.0)
    both, one = (estimates.of(each, "masked_loss") for each in (row, other))
    assert both is not None
    assert one is not None
    assert [both.mean, both.error] == pytest.approx([2.0, 1.0])
    assert [one.mean, one.error] == pytest.approx([5.0, math.sqrt(2)])
    difference = estimates.difference(other, "masked_loss", row, "masked_loss")
    assert difference is not None
    assert [difference.mean, difference.error] == pytest.approx([3.0, math.sqrt(3)])


def results_of(losses: dict[str, float]) -> Results:
    noise = np.random.default_rng(0).normal(0, 0.5, (4, 1000)).astype(np.float32)
    return {
        row.variants[0]: a_result(masked_loss=np.float32(losses[row.label]) + noise[index])
        for index, row in enumerate(BASE.table("sharing").rows)
    }


def test_a_direction_is_claimed_only_beyond_the_noise() -> None:
    as_in_paper = {
        "all shared": 6.5,
        "attention shared": 6.0,
        "FFN shared": 6.5,
        "nothing shared": 6.0,
    }
    findings = find_directions(all_tables(), results_of(as_in_paper))
    verdicts = [finding.verdict for finding in findings]
    assert verdicts == ["reproduces", "reproduces", "no better here either", "reproduces"]
    turned = {**as_in_paper, "attention shared": 6.5, "FFN shared": 6.0}
    verdicts = [each.verdict for each in find_directions(all_tables(), results_of(turned))]
    assert verdicts == ["reproduces", "not seen here", "does not reproduce", "the reverse"]


def test_a_sentence_task_is_solved_above_the_accuracy_without_text() -> None:
    table = BASE.table("sentence")
    rows = {row.label: row.variants[0] for row in table.rows}
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


# --- what is shown ------------------------------------------------------------------------------


def test_tables_show_every_row_and_missing_runs() -> None:
    results = dict(results_of(dict.fromkeys([r.label for r in BASE.table("sharing").rows], 6.0)))
    del results[BASE.table("sharing").rows[3].variants[0]]
    text = render([BASE.table("sharing")], results, ["What was run."])
    lines = text.splitlines()
    assert lines[2] == "What was run."
    (line,) = [line for line in lines if line.startswith("| attention shared")]
    losses = results[BASE.table("sharing").rows[1].variants[0]].predictions["masked_loss"]
    assert [cell.strip() for cell in line.split("|")[2:4]] == [
        "1.00M",
        f"{losses.mean():.3f} ± 0.016",
    ]
    assert line.endswith("| 64M | 81.7 |")
    (line,) = [line for line in lines if line.startswith("| nothing shared")]
    assert "not run" in line
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table[:6]}) == 1


# --- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(vocab_dir: Path, shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    corpus = tmp_path_factory.mktemp("ablations") / "shards"
    prepare([WIKI], vocab_dir / "tokenizer.json", corpus)
    return [
        *("--shards", str(corpus), "--validation", str(corpus), "--tokenizer", str(vocab_dir)),
        *("--hidden-size", "16", "--layers", "2", "--heads", "2", "--embedding-size", "8"),
        *("--embedding-sizes", "8", "--length", "48", "--batch-size", "8"),
        *("--held-out-tokens", "3000", "--no-compile", "--device", "cpu", "--tables", "embedding"),
    ]


@pytest.fixture(scope="module")
def ablation(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished ablation of two runs."""
    folder = tmp_path_factory.mktemp("ablation") / "out"
    assert main([*folders, "--steps", "4", "--output", str(folder)]) == 0
    return folder


def test_an_ablation_writes_results_and_tables(ablation: Path) -> None:
    results = json.loads((ablation / "results.json").read_text())
    names = ["share-all-e8-sop-4-steps-seed0", "share-all-e16-sop-4-steps-seed0"]
    assert list(results["runs"]) == names
    small, wide = (results["runs"][name] for name in names)
    assert small["tokens"] == wide["tokens"] > 4 * 8 * 40
    # 800 words, 48 positions and 2 types of 8 more dimensions, their norm and their map to H.
    assert wide["parameters"] - small["parameters"] == 8 * (800 + 48 + 2) + 2 * 8 + 8 * 16
    assert small["variant"]["embedding_size"] == 8
    assert "| E = 8 |" in (ablation / "ablations.md").read_text()


def test_runs_that_are_done_are_not_repeated(
    ablation: Path, folders: list[str], capsys: Capture
) -> None:
    files = sorted((ablation / "runs").rglob("*"))
    before = [(file, file.stat().st_mtime_ns) for file in files]
    capsys.readouterr()
    assert main([*folders, "--steps", "4", "--output", str(ablation)]) == 0
    assert [(file, file.stat().st_mtime_ns) for file in files] == before
    assert sorted((ablation / "runs").rglob("*")) == files
    assert "2 of 2 runs" in capsys.readouterr().out


def test_other_settings_in_the_same_folder_are_refused(
    ablation: Path, folders: list[str], capsys: Capture
) -> None:
    arguments = [*folders, "--steps", "4", "--output", str(ablation), "--layers", "3"]
    assert main(arguments) == 1
    assert "num_layers 2, not 3" in capsys.readouterr().err


def test_damaged_figures_are_refused(ablation: Path, folders: list[str], capsys: Capture) -> None:
    file = ablation / "runs" / "share-all-e8-sop-4-steps-seed0" / "figures.json"
    content = file.read_bytes()
    try:
        file.write_bytes(content[:100])
        assert main([*folders, "--steps", "4", "--output", str(ablation)]) == 1
        assert f"delete {file} to measure again" in capsys.readouterr().err
    finally:
        file.write_bytes(content)


def test_a_missing_corpus_is_refused_before_any_file_is_written(
    folders: list[str], tmp_path: Path, capsys: Capture
) -> None:
    arguments = [*folders, "--steps", "4", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--validation", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_reason_of_a_failed_run_is_reported(
    folders: list[str], tmp_path: Path, capsys: Capture
) -> None:
    arguments = [*folders, "--steps", "4", "--output", str(tmp_path / "out"), "--heads", "3"]
    assert main(arguments) == 1
    assert "hidden_size 16 is not a multiple of num_heads 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_ablation_is_resumed(folders: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.ablations", *folders, "--output", str(output)]
    command += ["--steps", "40"]
    ablation = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    run = output / "runs" / "share-all-e8-sop-40-steps-seed0"
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") > 3)
    os.kill(ablation.pid, signal.SIGKILL)
    ablation.wait()
    assert not (run / "figures.json").exists()
    second = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert "resuming from step" in second.stdout
    assert "2 of 2 runs" in second.stdout


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError
