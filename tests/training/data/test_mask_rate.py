"""A mask rate that falls: masks of the higher rate, of which later steps take some back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import (
    read_metrics,
    run_command,
    same_weights,
    stop_at,
)
from training.commands.pretrain import main
from training.data.batch import PretrainBatch
from training.data.collate import Collator
from training.data.examples import IGNORED, ExampleSettings
from training.data.mask_rate import MaskRates
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan, Position
from training.data.shards import Shards

pytestmark = pytest.mark.process


def batch_at(shards: Shards, tokenizer: AlbertTokenizer, rate: float) -> PretrainBatch:
    masking = NgramMasking(word_starts=word_starts(tokenizer), rate=rate)
    settings = ExampleSettings(length=128)
    rows = next(Plan(shards=shards, settings=settings, seed=1).steps(32, Position())).rows
    return Collator(shards=shards, masking=masking, length=128, seed=1)(rows)


def thinned(batch: PretrainBatch, rate: float) -> PretrainBatch:
    """The batch at the end of a run whose rate has fallen to this one."""
    fewer = MaskRates(first=0.3, last=rate).thin(batch, 1.0)
    assert isinstance(fewer, PretrainBatch)
    return fewer


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


def test_the_rate_is_linear_in_progress(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    rates = MaskRates(first=0.3, last=0.15)
    assert rates.highest == 0.3
    assert rates.mean == pytest.approx(0.225)
    whole = batch_at(shards, tokenizer, rates.highest)
    for done, rate in ((0.0, 0.3), (0.5, 0.225), (1.0, 0.15)):
        fewer = rates.thin(whole, done)
        assert isinstance(fewer, PretrainBatch)
        assert fewer.targets.equal(thinned(whole, rate).targets)


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
