"""Continued pretraining in a finetuning run: masked tokens, and sentence order in its own steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.training.support import read_metrics, run_command
from training.commands.finetune import FinetuneConfig, main
from training.data.streams import PackedStream
from training.finetuning.pretraining import ContinuedPretraining
from training.finetuning.settings import settle
from training.finetuning.start import Start
from training.loop.distributed import World

run = partial(run_command, main)


@pytest.fixture(scope="module")
def order_options(finetune_options: list[str]) -> list[str]:
    return [*finetune_options, "--weights", "1", "1", "6", "--order-share", "0.7", "--steps", "160"]


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


Streams: TypeAlias = Callable[..., Sequence[PackedStream]]


@pytest.fixture
def streams_of(pretrained: Path, easy_corpus: Path, tmp_path: Path) -> Streams:
    """Return the streams of masked rows and of pairs, 16 rows of 32 tokens."""

    def build(**values: Any) -> Sequence[PackedStream]:
        start = pretrained / "checkpoint"
        config = FinetuneConfig(
            initialize_from=str(start),
            output=tmp_path,
            pretraining=(easy_corpus,),
            length=32,
            seed=3,
            steps=1,
            **{"order_share": 0.5, **values},
        )
        config = settle(config)
        task = ContinuedPretraining.read(config, Start.open(start, config), World(), 16)
        return task.streams

    return build


def test_the_short_rate_makes_pairs_shorter(streams_of: Streams) -> None:
    def mean_size(rate: float) -> float:
        _, pairs = streams_of(order_sentences=1, order_short_rate=rate)
        rows = pairs.plan.epoch(0)
        sizes = [example.bounds[3] - example.bounds[0] for row in rows for example in row]
        return sum(sizes) / len(sizes)

    assert mean_size(1.0) < 0.8 * mean_size(0.0)


def test_rows_are_masked_at_the_higher_rate(streams_of: Streams) -> None:
    def fraction(*rates: float) -> float:
        masked, _ = streams_of(mask_rate=rates)
        batches = masked.step()
        return sum(each.counts["fill-mask"] for each in batches) / sum(
            each.num_tokens for each in batches
        )

    assert fraction() == pytest.approx(0.15, abs=0.03)
    assert fraction(0.1, 0.4) == pytest.approx(0.4, abs=0.03)
