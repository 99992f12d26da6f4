"""Both sides of training are given the same, and turns are counted as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch

from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.training.__main__ import main
from benchmarks.training.case import make_examples
from benchmarks.training.sides import Stopwatch, pad_rows
from tests.training.support import REPOSITORY, WIKI
from training.data.collate import Collator
from training.data.examples import IGNORED, ExampleSettings
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.preparation import prepare

SHIPPED = REPOSITORY / "models" / "albert-small-en"
LENGTH = 48


def test_transformers_pretrains_on_the_tokens_masks_and_labels_of_ours(tmp_path: Path) -> None:
    shards = prepare([WIKI], SHIPPED / "tokenizer.json", tmp_path / "shards")
    rows = make_examples(shards, SHIPPED, length=LENGTH, num_examples=60)
    plan = Plan(shards=shards, settings=ExampleSettings(length=LENGTH), seed=0)
    tokenizer = AlbertTokenizer.from_file(SHIPPED / "tokenizer.json")
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    collate = Collator(shards=shards, masking=masking, length=LENGTH, seed=0)
    examples = [example for row in plan.epoch(0) for example in row][:60]
    for example, row in zip(examples, rows, strict=True):
        batch, padded = collate([[example]]), pad_rows([row], LENGTH)
        assert batch.num_tokens == padded["attention_mask"].sum()
        torch.testing.assert_close(padded["input_ids"][0], batch.tokens.ids[0])
        torch.testing.assert_close(padded["token_type_ids"][0], batch.tokens.types[0])
        labels = torch.full((LENGTH,), IGNORED)
        labels[batch.rows[: batch.num_masked]] = batch.targets[: batch.num_masked]
        torch.testing.assert_close(padded["labels"][0], labels)
        assert padded["sentence_order_label"][0] == batch.labels[0]


class Turns:
    """A parent that asks for these turns and keeps the answers."""

    def __init__(self, turns: list[float | None]) -> None:
        self.turns, self.answers = turns, list[Any]()

    def recv(self) -> float | None:
        return self.turns.pop(0)

    def send(self, message: Any) -> None:
        self.answers.append(message)


def test_a_turn_counts_the_steps_after_the_warm_up_alone() -> None:
    turns, num_tokens = Turns([0.0, 0.0, None]), 0
    watch = Stopwatch(cast("Any", turns), torch.device("cpu"), lambda: num_tokens)
    goes_on = []
    for step in range(1, 6):
        num_tokens += step
        goes_on.append(watch.step_is_done())
    assert goes_on == [True, True, True, True, False]
    warm_up_s, *measured = turns.answers
    assert warm_up_s > 0
    assert [turn.num_tokens for turn in measured] == [4, 5]


def test_both_sides_train_and_are_compared(tmp_path: Path) -> None:
    short = ["--no-compile", "--rounds", "1", "--turn", "1s", "--threads", "1", "--device", "cpu"]
    what = ["--shapes", "small", "--length", "32", "--batch-tokens", "128"]
    assert main([*what, *short, "--output", str(tmp_path)]) == 0
    tables = (tmp_path / "tables.md").read_text()
    for name in ("**ours**", "transformers (8 rows, sdpa)", "transformers (8 rows, eager, memory"):
        assert f"| {name}" in tables
    (results,) = json.loads((tmp_path / "results.json").read_text())["cases"].values()
    for result in results:
        assert not result["failure"]
        assert result["turns"][0]["num_tokens"] > 0
        assert result["turns"][0]["seconds"] >= 1
