"""The benchmarks: both sides do the same work, and their outputs agree."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.engine.__main__ import main as run_engine
from benchmarks.engine.contestants import EngineTurn
from benchmarks.harness.page import ratios
from benchmarks.serve.__main__ import main as run_serve
from benchmarks.training.__main__ import main as run_training
from benchmarks.training.case import make_examples
from benchmarks.training.sides import pad_rows
from tests.devices import each_device
from tests.training.support import REPOSITORY, WIKI
from training.data.collate import Collator
from training.data.examples import IGNORED, ExampleSettings
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.preparation import prepare

SHIPPED = REPOSITORY / "models" / "albert-small-en"
LENGTH = 48
TOLERANCES = {"int8": 0.1, "fp16": 0.02, "": 1e-5}


CONTESTANTS = {
    "cpu": ["pipeline-1", "ours-fp32", "ours-int8", "score-int8", "openvino-fp32"],
    "cuda": ["transformers-fp16", "ours-fp16", "transformers-fp16-compiled"],
}


@each_device
def test_contestants_are_measured_in_turns_and_their_outputs_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    contestants = CONTESTANTS[device]
    words = ["--num-texts", "6", "--rounds", "2", "--turn", "0.01", "--threads", "1"]
    words += ["--preset", "small", "--contestants", "transformers-fp32", *contestants]
    words += ["--shapes", "1x8", "--device", device, "--output", str(tmp_path)]
    assert run_engine(words) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    results = {result["contestant"]["name"]: result for result in content["results"]}
    lacks_openvino = "openvino-fp32" in contestants and find_spec("openvino") is None
    assert len(results) == 1 + len(contestants) - lacks_openvino
    for name, result in results.items():
        assert not result["failure"]
        cases = [kind.replace("shapes", "1x8") for kind in result["contestant"]["kinds"]]
        num_turns = {case: len(turns) for case, turns in result["turns"].items()}
        assert num_turns == dict.fromkeys(cases, 2)
        tolerance = next(value for precision, value in TOLERANCES.items() if precision in name)
        for case, (turn, *_) in result["turns"].items():
            expected = results["transformers fp32"]["turns"][case][0]["outputs"]
            np.testing.assert_allclose(turn["outputs"], expected, atol=tolerance)
            assert turn["rss_bytes"] > 1 << 20
    if device == "cpu":
        assert content["disk"]["bundle-fp32"] > 30000 * 128 * 4
        assert "| **ours fp32** |" in capsys.readouterr().out


def test_ratios_compare_turns_of_the_same_round() -> None:
    def rates(*seconds: float) -> list[float]:
        return [EngineTurn(seconds=s, num_items=4, outputs=[]).items_per_s for s in seconds]

    assert ratios(rates(1.0, 4.0, 1.0), rates(2.0, 20.0, 4.0)) == [2, 5, 4]


def test_both_services_are_measured_and_their_answers_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset", "small", "--num-requests", "12", "--levels", "2", "--precisions", "fp32"]
    words += ["--rounds", "1", "--level-time", "0.5", "--threads", "1", "--output", str(tmp_path)]
    words += ["--texts-per-request", "2"]
    assert run_serve(words) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    peer, ours = content["results"]
    assert ours["service"]["name"] == "ours fp32"
    for result in (peer, ours):
        for run in result["levels"]["2"]:
            assert not run["failures"]
            assert len(run["latencies_s"]) % 12 == 0  # complete passes
    tables = capsys.readouterr().out
    assert "nan" not in tables
    (row,) = [line for line in tables.splitlines() if line.startswith("| **ours fp32** |")]
    assert float(row.split(" | ")[5]) < 1e-5


def test_both_sides_pretrain_on_the_same_tokens_masks_and_labels(tmp_path: Path) -> None:
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
        labels[batch.rows[: batch.counts["fill-mask"]]] = batch.targets[: batch.counts["fill-mask"]]
        torch.testing.assert_close(padded["labels"][0], labels)
        assert padded["sentence_order_label"][0] == batch.labels[0]


def test_both_sides_pretrain_and_finetune_and_are_in_the_tables(tmp_path: Path) -> None:
    words = ["--no-compile", "--rounds", "1", "--turn", "1s", "--threads", "1", "--device", "cpu"]
    words += ["--shapes", "small", "--length", "32", "--batch-tokens", "128"]
    texts = REPOSITORY / "tests" / "data" / "banking77" / "train.csv"
    assert run_training([*words, "--finetune", str(texts), "--output", str(tmp_path)]) == 0
    tables = (tmp_path / "tables.md").read_text()
    settings = ("8 rows, sdpa", "8 rows, eager, memory kept", "32 rows, sdpa")
    grouped = "32 rows, eager, memory kept, grouped by length"
    names = [f"transformers ({setting})" for setting in (*settings, grouped)]
    for name in ("**ours**", *names):
        assert f"| {name} |" in tables
    cases = json.loads((tmp_path / "results.json").read_text())["cases"].values()
    assert len(cases) == 2
    for result in (result for results in cases for result in results):
        assert not result["failure"]
        assert result["turns"][0]["num_tokens"] > 0
        assert result["turns"][0]["seconds"] >= 1
