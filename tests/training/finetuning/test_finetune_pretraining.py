"""Continued pretraining in a finetuning run: masked tokens, and sentence order in its own steps."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import read_metrics, refusal, run_command, same_weights, stop_at
from training.data.feeds import PlannedFeed
from training.data.shards import SHARDS_FILE
from training.finetune import main
from training.finetuning.pretraining import add_pretraining, pretraining_feeds
from training.loop.distributed import World

run = partial(run_command, main)


@pytest.fixture(scope="module")
def order_options(finetune_options: list[str]) -> list[str]:
    return [*finetune_options, "--weights", "1", "1", "6", "--order-share", "0.7", "--steps", "48"]


@pytest.fixture(scope="module")
def ordered(order_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run with these options. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("ordered") / "run"
    assert run(order_options, folder) == 0
    return folder


def test_pairs_in_both_orders_are_learnt_beside_the_tasks(ordered: Path) -> None:
    first, *_, last = (line for line in read_metrics(ordered) if "paired-order/loss" in line)
    assert last["paired-order/loss"] < 0.9 * first["paired-order/loss"]
    assert last["sentence-order/loss"] < first["sentence-order/loss"]
    (stage,) = json.loads((ordered / "checkpoint" / "training.json").read_text())["stages"][-1:]
    assert stage["settings"]["order_share"] == "0.7"
    assert stage["settings"]["sentence_weight"] == "1.0"


def test_a_run_that_is_stopped_goes_on_to_the_same_weights(
    ordered: Path, order_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 21, signal.SIGTERM)
        assert run(order_options, tmp_path) == 143
    assert run(order_options, tmp_path) == 0
    assert same_weights(tmp_path, ordered)


def test_runs_of_several_seeds_share_the_prepared_text(
    finetune_options: list[str], labelled: Path, tmp_path: Path
) -> None:
    words = [*finetune_options, "--validation", str(labelled), "--seeds", "2"]
    words += ["--steps", "1", "--validate-every", "1"]
    run(words, tmp_path / "runs")  # a single step leads to chance, which is an error
    assert (tmp_path / "runs" / "seed-1" / "checkpoint").is_dir()
    assert list(tmp_path.rglob(SHARDS_FILE)) == [tmp_path / "runs" / "shards" / SHARDS_FILE]


def test_the_share_divides_the_steps_of_pretraining(
    order_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With nearly all of them on pairs, masked rows are not drawn, and the task is as before."""
    more = ("--weights", "1", "1", "1", "--order-share", "0.999999", "--steps", "12")
    assert run(order_options, tmp_path, *more) == 0
    batches = capsys.readouterr().out.splitlines()[-1]
    assert "of sentence-order" in batches
    assert "of text-classification" in batches
    assert "of pretraining" not in batches


def test_pairs_have_about_as_many_tokens_as_masked_rows(
    order_options: list[str], tmp_path: Path
) -> None:
    """4 masked rows of 64 tokens, and 2 rows of pairs, each in both orders."""
    more = ("--weights", "1e-9", "1e-9", "1", "--steps", "20", "--report-every", "1")
    assert run(order_options, tmp_path, *more) == 0
    tokens = [0, *(line["tokens"] for line in read_metrics(tmp_path))]
    lines = read_metrics(tmp_path)
    sizes = [after - before for before, after in pairwise(tokens)]
    of_pairs = [
        size for size, line in zip(sizes, lines, strict=True) if "paired-order/loss" in line
    ]
    masked = [size for size, line in zip(sizes, lines, strict=True) if "fill-mask/loss" in line]
    assert of_pairs
    assert masked
    assert max(*of_pairs, *masked) <= 4 * 64
    assert min(*of_pairs, *masked) > 2 * 64


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--order-share", "1"], "--order-share 1 leaves no step to masked tokens; give less"),
        (
            ["--order-length", "65"],
            "--order-length 65: a pair has from 8 tokens to the model's 64 positions",
        ),
        (["--order-length", "7"], "--order-length 7: a pair has from 8 tokens"),
    ],
)
def test_impossible_options_are_refused(
    order_options: list[str],
    tmp_path: Path,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(order_options, tmp_path / "run", *more) == 1
    assert message in refusal(capsys, tmp_path / "run")


def test_pairs_have_as_many_sentences_a_side_as_asked_for(
    order_options: list[str], tmp_path: Path
) -> None:
    """64 tokens hold pairs of single sentences, and none of nine sentences a side."""
    more = ("--weights", "1e-9", "1e-9", "1", "--steps", "9", "--report-every", "1")
    assert run(order_options, tmp_path / "one", *more, "--order-sentences", "1") == 0
    assert any("paired-order/loss" in line for line in read_metrics(tmp_path / "one"))
    assert run(order_options, tmp_path / "nine", *more, "--order-sentences", "9") == 1


@pytest.fixture
def feeds_of(
    pretrained: Path, easy_corpus: Path, tmp_path: Path
) -> Callable[..., list[PlannedFeed]]:
    """Return the streams of masked rows and of pairs, 16 rows of 32 tokens, with options."""

    def build(*words: str, micro_batch_size: int | None = None) -> list[PlannedFeed]:
        parser = argparse.ArgumentParser()
        parser.set_defaults(initialize_from=pretrained / "checkpoint", output=tmp_path)
        parser.set_defaults(length=32, seed=3, seeds=None, micro_batch_size=micro_batch_size)
        add_pretraining(parser)
        words = ("--pretraining", str(easy_corpus), "--order-share", "0.5", *words)
        tokenizer = AlbertTokenizer.from_file(pretrained / "checkpoint" / "tokenizer.json")
        options = parser.parse_args(words)
        return pretraining_feeds(options, tokenizer, 16, World(), max_positions=64)

    return build


@pytest.mark.parametrize(("micro_batch_size", "rows"), [(None, 4), (16, 4), (8, 2), (4, 1), (1, 1)])
def test_pairs_take_no_more_tokens_a_pass_than_masked_rows(
    feeds_of: Callable[..., list[PlannedFeed]], micro_batch_size: int | None, rows: int
) -> None:
    """A row of pairs is 128 tokens in both orders, as 4 rows of 32."""
    _, pairs = feeds_of("--order-length", "64", micro_batch_size=micro_batch_size)
    assert (pairs.slicing.num_rows, pairs.slicing.rows_a_batch) == (4, rows)


def test_the_short_rate_makes_pairs_shorter(feeds_of: Callable[..., list[PlannedFeed]]) -> None:
    def mean_size(rate: str) -> float:
        _, pairs = feeds_of("--order-sentences", "1", "--order-short-rate", rate)
        rows = pairs.plan.epoch(0)
        sizes = [example.bounds[3] - example.bounds[0] for row in rows for example in row]
        return sum(sizes) / len(sizes)

    assert mean_size("1") < 0.8 * mean_size("0")


@pytest.mark.parametrize(
    "option",
    [
        ("--order-share", "0.5"),
        ("--order-length", "32"),
        ("--order-sentences", "1"),
        ("--order-short-rate", "0"),
    ],
)
def test_pairs_need_text(
    pretrained: Path,
    labelled: Path,
    tmp_path: Path,
    option: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [
        "--initialize-from",
        str(pretrained / "checkpoint"),
        "--steps",
        "2",
        "--length",
        "32",
    ]
    options += ["--text-classification", str(labelled), *option]
    assert run(options, tmp_path / "run") == 1
    message = "--order-share is a fraction of the steps on --pretraining; give its text"
    assert message in refusal(capsys, tmp_path / "run")


def test_rows_are_masked_at_the_higher_rate(feeds_of: Callable[..., list[PlannedFeed]]) -> None:
    def fraction(*words: str) -> float:
        masked, _ = feeds_of(*words)
        batches = masked.step()
        return sum(each.counts["fill-mask"] for each in batches) / sum(
            each.num_tokens for each in batches
        )

    assert fraction() == pytest.approx(0.15, abs=0.03)
    assert fraction("--mask-rate", "0.1", "0.4") == pytest.approx(0.4, abs=0.03)


def test_a_run_whose_mask_rate_falls_goes_on_to_the_same_weights(
    finetune_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*finetune_options, "--weights", "1", "1", "6", "--steps", "12", "--mask-rate", "0.4"]
    assert run(options, tmp_path / "constant") == 0
    options.append("0.1")
    assert run(options, tmp_path / "whole") == 0
    assert not same_weights(tmp_path / "whole", tmp_path / "constant")
    with monkeypatch.context() as patch:
        stop_at(patch, 7, signal.SIGTERM)
        assert run(options, tmp_path / "run") == 143
    assert run(options, tmp_path / "run") == 0
    assert same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("pretraining", "rates", "message"),
    [
        (False, ("0.3",), "--mask-rate is of the masked rows of --pretraining; give its text"),
        (True, ("0.3", "0.2", "0.1"), "--mask-rate takes one rate, or the first and the last"),
    ],
)
def test_mask_rates_without_a_use_are_refused(
    pretrained: Path,
    labelled: Path,
    easy_corpus: Path,
    tmp_path: Path,
    pretraining: bool,
    rates: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--initialize-from", str(pretrained / "checkpoint"), "--steps", "2"]
    options += ["--length", "32", "--text-classification", str(labelled), "--mask-rate", *rates]
    options += ["--pretraining", str(easy_corpus)] if pretraining else []
    assert run(options, tmp_path / "run") == 1
    assert message in refusal(capsys, tmp_path / "run")
