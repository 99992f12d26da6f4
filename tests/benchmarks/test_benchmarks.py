"""Each benchmark gives both sides the same work, and they agree."""

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
from benchmarks.engine.tables import speed_ratio
from benchmarks.serve.__main__ import main as run_serve
from benchmarks.training.__main__ import main as run_training
from benchmarks.training.case import make_examples
from benchmarks.training.sides import pad_rows
from tests.training.support import REPOSITORY, WIKI
from training.data.collate import Collator
from training.data.examples import IGNORED, ExampleSettings
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.preparation import prepare

SHIPPED = REPOSITORY / "models" / "albert-small-en"
LENGTH = 48
LIMITS = {"int8": 0.1, "fp16": 0.02}  # of fp32 1e-5
IN_FP16 = ["transformers-fp16", "ours-fp16"]


@pytest.mark.parametrize(
    ("device", "who"),
    [
        ("cpu", ["pipeline-1", "ours-fp32", "ours-int8", "openvino-fp32"]),
        pytest.param("cpu", IN_FP16, marks=pytest.mark.extended),
        pytest.param("cuda", [*IN_FP16, "transformers-fp16-compiled"], marks=pytest.mark.gpu),
    ],
)
def test_contestants_are_measured_in_turns_and_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, who: list[str]
) -> None:
    amounts = ["--num-texts", "6", "--rounds", "2", "--turn", "0.01", "--threads", "1"]
    what = ["--preset", "small", "--contestants", "transformers-fp32", *who, "--shapes", "1x8"]
    what += ["--device", device]
    assert run_engine([*what, *amounts, "--output", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    results = {each["contestant"]["name"]: each for each in content["results"]}
    left_out = "openvino-fp32" in who and find_spec("openvino") is None
    assert len(results) == 1 + len(who) - left_out
    notes = content["notes"]
    assert any("openvino is left out" in note for note in notes) == left_out
    for name, result in results.items():
        assert not result["failure"]
        kinds = result["contestant"]["kinds"]
        cases = {{"shapes": "1x8", "texts": "texts"}[kind] for kind in kinds}
        assert {case: len(turns) for case, turns in result["turns"].items()} == dict.fromkeys(
            cases, 2
        )
        limit = next((limit for kind, limit in LIMITS.items() if kind in name), 1e-5)
        for case, (turn, *_) in result["turns"].items():
            expected = results["transformers fp32"]["turns"][case][0]["outputs"]
            np.testing.assert_allclose(turn["outputs"], expected, atol=limit)
            assert turn["rss_bytes"] > 1 << 20
    output = capsys.readouterr().out
    for precision in ("fp32", "fp16"):
        if (size := content["disk"].get(f"bundle-{precision}")) is not None:
            assert size > 30000 * 128 * {"fp32": 4, "fp16": 2}[precision]
            assert f"| **ours {precision}** |" in output


def test_ratios_are_medians_of_each_round() -> None:
    def turns(*seconds: float) -> list[EngineTurn]:
        return [EngineTurn(seconds=s, num_items=4, outputs=[]) for s in seconds]

    assert speed_ratio(turns(1.0, 4.0, 1.0), turns(2.0, 20.0, 4.0)) == 4


def test_both_services_are_measured_and_answer_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--preset", "small", "--num-requests", "12", "--levels", "2", "--precisions", "fp32"]
    short = ["--rounds", "1", "--level-time", "0.5", "--threads", "1"]
    assert run_serve([*what, *short, "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    peer, ours = content["results"]
    assert ours["service"]["name"] == "ours fp32"
    for one in (peer, ours):
        for run in one["levels"]["2"]:
            assert not run["failures"]
            assert len(run["latencies_s"]) % 12 == 0  # whole passes
    tables = capsys.readouterr().out
    assert "nan" not in tables
    for start in ("| 2 | ", "| BentoML over pipelines |"):
        assert f"\n{start}" in tables
    (row,) = [line for line in tables.splitlines() if line.startswith("| **ours fp32** |")]
    assert float(row.split(" | ")[5]) < 1e-5


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
        labels[batch.rows[: batch.counts["fill-mask"]]] = batch.targets[: batch.counts["fill-mask"]]
        torch.testing.assert_close(padded["labels"][0], labels)
        assert padded["sentence_order_label"][0] == batch.labels[0]


def test_both_sides_train_and_are_compared(tmp_path: Path) -> None:
    short = ["--no-compile", "--rounds", "1", "--turn", "1s", "--threads", "1", "--device", "cpu"]
    what = ["--shapes", "small", "--length", "32", "--batch-tokens", "128"]
    assert run_training([*what, *short, "--output", str(tmp_path)]) == 0
    tables = (tmp_path / "tables.md").read_text()
    for name in ("**ours**", "transformers (8 rows, sdpa)", "transformers (8 rows, eager, memory"):
        assert f"| {name}" in tables
    (results,) = json.loads((tmp_path / "results.json").read_text())["cases"].values()
    for result in results:
        assert not result["failure"]
        assert result["turns"][0]["num_tokens"] > 0
        assert result["turns"][0]["seconds"] >= 1
