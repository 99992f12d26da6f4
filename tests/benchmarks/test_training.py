"""Both sides of training are given the same, and turns and FLOPs are counted as they should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from albert_serve.compute import train_flops_per_token
from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks import finetune, pretrain
from benchmarks.finetune import FinetuningCase, FinetuningTask
from benchmarks.harness.flops import data_sheet_flops
from benchmarks.harness.hf_trainer import PadRows
from benchmarks.harness.process import Channel
from benchmarks.harness.trainers import Stopwatch, TrainerJob, sized_config
from benchmarks.pretrain import make_examples
from tests.training.support import REPOSITORY, TINY, WIKI, our_model
from training.data.batch import ExampleBatch
from training.data.collate import Collator
from training.data.examples import IGNORED, ExampleSettings
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.preparation import prepare
from training.model.albert import ModelInputs

SHIPPED = REPOSITORY / "models" / "albert-small-en"
LENGTH = 48
FILES: dict[FinetuningTask, Path] = {
    "text-classification": REPOSITORY / "tests/data/banking77/train.csv",
    "question-answering": REPOSITORY / "tests/data/squad.json",
}


def test_transformers_pretrains_on_the_tokens_masks_and_labels_of_ours(tmp_path: Path) -> None:
    shards = prepare([WIKI], SHIPPED / "tokenizer.json", tmp_path / "shards")
    rows = make_examples(shards, SHIPPED, length=LENGTH, num_examples=60)
    plan = Plan(shards=shards, settings=ExampleSettings(length=LENGTH), seed=0)
    tokenizer = AlbertTokenizer.from_file(SHIPPED / "tokenizer.json")
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    collate = Collator(shards=shards, masking=masking, length=LENGTH, seed=0)
    examples = [example for row in plan.epoch(0) for example in row][:60]
    for example, row in zip(examples, rows, strict=True):
        batch, padded = collate([[example]]), PadRows(LENGTH, is_full=True)([row])
        assert batch.num_tokens == padded["attention_mask"].sum()
        torch.testing.assert_close(padded["input_ids"][0], batch.tokens.ids[0])
        torch.testing.assert_close(padded["token_type_ids"][0], batch.tokens.types[0])
        labels = torch.full((LENGTH,), IGNORED)
        labels[batch.rows[: batch.num_masked]] = batch.targets[: batch.num_masked]
        torch.testing.assert_close(padded["labels"][0], labels)
        assert padded["sentence_order_label"][0] == batch.labels[0]
    lengths = [len(row["input_ids"]) for row in rows]
    chosen = sorted(range(60), key=lengths.__getitem__)[:8]
    padded = PadRows(LENGTH, is_full=False)([rows[index] for index in chosen])
    longest = lengths[chosen[-1]]
    assert longest <= padded["labels"].shape[1] < longest + 8
    assert padded["attention_mask"].sum(1).tolist() == [lengths[index] for index in chosen]


@pytest.mark.parametrize("task", list(FILES))
def test_both_sides_finetune_the_same_model_on_the_same_tokens(task: FinetuningTask) -> None:
    tokenizer = AlbertTokenizer.from_file(SHIPPED / "tokenizer.json")
    examples = finetune.read_examples(task, [FILES[task]], tokenizer, length=LENGTH, num_examples=4)
    case = FinetuningCase(
        task=task,
        config=sized_config("small", LENGTH),
        length=LENGTH,
        batch_size=4,
        examples=examples,
    )
    job = TrainerJob(title="", case=case, hf=None, device="cpu", num_threads=1, compiles=False)
    run = case.build_ours(job)
    sizes = [
        sum(each.numel() for each in model.parameters())
        for model in (case.make_hf_model("sdpa"), run.model)
    ]
    assert sizes[0] == sizes[1]
    theirs = PadRows(LENGTH, is_full=True)(case.hf_rows())
    [ours] = run.mixture.streams[0].step()
    assert isinstance(ours, ExampleBatch)
    flat = ours.tokens.ids.flatten().tolist()
    spans = zip(ours.firsts.tolist(), ours.sizes.tolist(), strict=True)
    own = [flat[begin : begin + size] for begin, size in spans]
    names = ("labels",) if "labels" in theirs else ("start_positions", "end_positions")
    targets = torch.stack([theirs[name] for name in names], 1).tolist()
    given = [
        row[:end].tolist()
        for row, end in zip(theirs["input_ids"], theirs["attention_mask"].sum(1), strict=True)
    ]
    mine = ours.targets.reshape(4, -1).tolist()
    assert sorted(zip(given, targets, strict=True)) == sorted(zip(own, mine, strict=True))


class Turns(Channel):
    """A parent that asks for these turns and keeps the answers."""

    def __init__(self, turns: list[float]) -> None:
        self.turns, self.answers = turns, list[Any]()

    def receive(self) -> float | None:
        return self.turns.pop(0) if self.turns else None

    def send(self, message: Any) -> None:
        self.answers.append(message)


def test_a_turn_counts_the_steps_after_the_warm_up_alone() -> None:
    channel, num_tokens = Turns([0.0, 0.0]), 0
    watch = Stopwatch(channel, torch.device("cpu"), lambda: num_tokens)
    goes_on = []
    for step in range(1, 6):
        num_tokens += step
        goes_on.append(watch.step_is_done())
    assert goes_on == [True, True, True, True, False]
    warm_up_s, *turns = channel.answers
    assert warm_up_s > 0
    assert [(turn.num_tokens, turn.num_steps) for turn in turns] == [(4, 1), (5, 1)]


@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_both_sides_train_and_are_compared(
    command: Literal["pretrain", "finetune"], tmp_path: Path
) -> None:
    short = ["--no-compile", "--rounds", "1", "--turn", "1s", "--threads", "1", "--device", "cpu"]
    if command == "pretrain":
        what = ["--cases", "small@32", "--batch-tokens", "128", "--against", "eager-kept"]
        assert pretrain.main([*what, *short, "--output", str(tmp_path)]) == 0
        assert "transformers (8 rows, eager" in (tmp_path / "tables.md").read_text()
    else:
        page = tmp_path / "page.md"
        marks = [f"<!-- written by make bench-finetune: {word} -->" for word in ("begin", "end")]
        page.write_text("before\n{}\nold\n{}\nafter\n".format(*marks))
        what = ["--tasks", "text-classification", "--shapes", "small", "--batch-size", "4"]
        assert finetune.main([*what, *short, "--output", str(tmp_path), "--write", str(page)]) == 0
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "old" not in text
        assert "| **ours (not compiled)** |" in text
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert len(case["results"]) == (2 if command == "pretrain" else 3)
    for result in case["results"]:
        assert result["turns"][0]["num_tokens"] > 0
        assert result["turns"][0]["seconds"] >= 1


CONFIGS: dict[str, AlbertConfig] = {
    "shared": TINY,
    "narrow feed-forward": replace(TINY, ffn_size=8),
    "inner": replace(TINY, num_inner_layers=3),
    "groups": replace(TINY, num_groups=2, num_inner_layers=2),
    "sharing nothing": replace(TINY, sharing="none"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("length", "num_masked"), [(16, 3), (7, 7), (1, 1)])
def test_the_flops_of_a_token_are_those_that_torch_counts(
    config: AlbertConfig, length: int, num_masked: int
) -> None:
    """In a forward and backward pass over one sequence."""
    model: Any = our_model(config, ("fill-mask", "sentence-order")).train()
    ids = torch.arange(length)[None] % config.vocab_size
    with FlopCounterMode(display=False) as counter:
        hidden_BSH = model(ModelInputs(ids=ids, types=torch.zeros_like(ids)))
        loss = model.logits("fill-mask", hidden_BSH[0, :num_masked]).sum()
        (loss + model.logits("sentence-order", hidden_BSH[:, 0]).sum()).backward()
    formula = train_flops_per_token(config, length=length, masked_rate=num_masked / length)
    assert formula * length == pytest.approx(counter.get_total_flops(), rel=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_last_layer_is_paid_for_the_tokens_that_are_read(config: AlbertConfig) -> None:
    model: Any = our_model(config, ("fill-mask",)).train()
    ids = torch.arange(16)[None]
    with FlopCounterMode(display=False) as counter:
        hidden_RH = model(
            ModelInputs(ids=ids, types=torch.zeros_like(ids)), torch.tensor([2, 5, 9, 0])
        )
        model.logits("fill-mask", hidden_RH).sum().backward()
    formula = train_flops_per_token(
        config, length=16, masked_rate=0.25, num_sentence_outputs=0, read_rate=0.25
    )
    assert formula * 16 == pytest.approx(counter.get_total_flops(), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peaks_of_data_sheets(name: str, teraflops: float | None) -> None:
    flops = data_sheet_flops(name)
    assert flops == (None if teraflops is None else pytest.approx(teraflops * 1e12))
