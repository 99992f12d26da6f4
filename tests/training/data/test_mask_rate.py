"""A mask rate that falls: masks of the higher rate, of which later steps take some back."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import (
    read_metrics,
    refusal,
    run_command,
    same_weights,
    stop_at,
)
from training.data.batch import PretrainBatch
from training.data.collate import Collator
from training.data.examples import IGNORED, ExampleSettings
from training.data.mask_rate import MaskRates, thinned
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan, Position
from training.data.shards import Shards
from training.pretrain import main

Capture = pytest.CaptureFixture[str]


def batch_at(shards: Shards, tokenizer: AlbertTokenizer, rate: float) -> PretrainBatch:
    masking = NgramMasking(word_starts=word_starts(tokenizer), rate=rate)
    settings = ExampleSettings(length=128)
    rows = next(Plan(shards=shards, settings=settings, seed=1).steps(32, Position())).rows
    return Collator(shards=shards, masking=masking, length=128, seed=1)(rows)


def original(batch: PretrainBatch) -> torch.Tensor:
    ids = batch.tokens.ids.flatten().clone()
    is_real = batch.targets != IGNORED
    ids[batch.rows[is_real]] = batch.targets[is_real]
    return ids


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.225])
def test_a_thinned_batch_has_a_part_of_the_masks(
    shards: Shards, tokenizer: AlbertTokenizer, rate: float
) -> None:
    whole = batch_at(shards, tokenizer, 0.3)
    fewer = thinned(whole, rate)
    assert original(fewer).equal(original(whole))
    kept = fewer.rows[fewer.targets != IGNORED]
    assert set(kept.tolist()) < set(whole.rows[whole.targets != IGNORED].tolist())
    assert fewer.num_masked == len(kept)
    assert fewer.num_masked / fewer.num_tokens == pytest.approx(rate, abs=0.01)
    places = torch.ones(fewer.tokens.ids.numel(), dtype=torch.bool)
    places[kept] = False
    assert fewer.tokens.ids.flatten()[places].equal(original(whole)[places])
    assert fewer.tokens.ids.flatten()[kept].equal(whole.tokens.ids.flatten()[kept])
    assert len(fewer.rows) == len(fewer.targets) == len(fewer.rates)
    assert len(fewer.rows) % 64 == 0


def test_whole_words_stay_masked(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    starts = torch.from_numpy(word_starts(tokenizer))
    fewer = thinned(batch_at(shards, tokenizer, 0.3), 0.15)
    is_masked = torch.zeros(fewer.tokens.ids.numel(), dtype=torch.bool)
    is_masked[fewer.rows[fewer.targets != IGNORED]] = True
    ids = original(fewer)
    # A piece that goes on with the word before it has that piece's fate.
    goes_on = ~starts[ids[1:]] & (ids[1:] > 4) & (ids[:-1] > 4)
    assert goes_on.sum() > 100
    assert is_masked[1:][goes_on].equal(is_masked[:-1][goes_on])


def test_at_its_own_rate_a_batch_stays_as_it_is(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    whole = batch_at(shards, tokenizer, 0.3)
    same = thinned(whole, 0.3)
    assert same.tokens.ids.equal(whole.tokens.ids)
    assert same.targets.equal(whole.targets)
    assert same.num_masked == whole.num_masked


def test_each_sequence_keeps_a_mask(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    fewer = thinned(batch_at(shards, tokenizer, 0.3), 0.0)
    firsts = np.unique(fewer.firsts.numpy())
    of_mask = np.searchsorted(firsts, fewer.rows[fewer.targets != IGNORED].numpy(), "right")
    assert len(np.unique(of_mask)) == len(firsts)


def test_the_rate_is_linear_in_progress(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    rates = MaskRates(first=0.3, last=0.15)
    assert rates.highest == 0.3
    assert rates.mean == pytest.approx(0.225)
    whole = batch_at(shards, tokenizer, rates.highest)
    for done, rate in ((0.0, 0.3), (0.5, 0.225), (1.0, 0.15)):
        fewer = rates.thin(whole, done)
        assert isinstance(fewer, PretrainBatch)
        assert fewer.targets.equal(thinned(whole, rate).targets)
    other = replace(whole.tokens)
    assert other.ids.equal(whole.tokens.ids)


def test_a_run_with_workers_that_is_stopped_goes_on_to_the_same_weights(
    tiny_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers mask batches before their step is known."""
    options = [*tiny_options, "--mask-rate", "0.5", "0.1"]
    assert run_command(main, options, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert run_command(main, options, tmp_path / "run", "--workers", "1") != 0
    assert run_command(main, options, tmp_path / "run", "--workers", "1") == 0
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    assert len(read_metrics(tmp_path / "run")) == 8


def test_three_rates_are_refused(tiny_options: list[str], tmp_path: Path, capsys: Capture) -> None:
    rates = ("--mask-rate", "0.3", "0.2", "0.1")
    assert run_command(main, tiny_options, tmp_path / "run", *rates) == 1
    assert "--mask-rate takes one rate, or the first and the last" in refusal(
        capsys, tmp_path / "run"
    )


def test_a_changed_rate_is_another_run(
    tiny_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    short = ("--steps", "1", "--mask-rate", "0.3")
    assert run_command(main, tiny_options, tmp_path, *short, "0.1") == 0
    assert run_command(main, tiny_options, tmp_path, *short, "0.2") == 1
    assert "final_mask_rate 0.1, not 0.2" in capsys.readouterr().err
