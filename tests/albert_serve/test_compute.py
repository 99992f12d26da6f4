"""The paper's parameters and BERT's, and FLOPs of layers as often as they are applied."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from albert_serve.cli import main
from albert_serve.compute import PretrainingSize, compare_compute
from albert_serve.config import preset

# Table 1 of the paper, in millions; the released xxlarge has 223.
PAPER = {
    "base": 12,
    "large": 18,
    "xlarge": 60,
    "xxlarge": 235,
    "base as BERT": 108,
    "large as BERT": 334,
    "xlarge as BERT": 1270,
}


def compute(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert main(["info", "--json", "--compute", *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["compute"]
    return {row["model"]: row for row in rows}


def test_the_named_sizes_are_those_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compute(capsys)
    for name, millions in PAPER.items():
        assert rows[name]["num_parameters"] / 1e6 == pytest.approx(millions, rel=0.06), name
    tokens = 125_000 * 4096 * 512
    for row in rows.values():
        # Backward takes twice as much as forward; heads are a small part.
        passes = row["total_exaflops"] * 1e18 / (3e6 * row["forward_megaflops_per_token"] * tokens)
        assert 1 < passes < 1.2
        assert row["fp32_bytes"] == 4 * row["num_parameters"]


def test_bert_is_that_of_transformers() -> None:
    config = preset("base")
    _, bert = compare_compute("base", config, PretrainingSize())
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(vocab_size=config.vocab_size))
    assert bert.num_parameters == model.num_parameters()


def test_shared_layers_are_stored_once_and_computed_each_time() -> None:
    size, config = PretrainingSize(length=64), preset("small")
    shared, *_ = compare_compute("", config, size)
    deeper, *_ = compare_compute("", replace(config, num_layers=2 * config.num_layers), size)
    assert deeper.num_parameters == shared.num_parameters
    layer = 2 * (4 * 256**2 + 2 * 256 * 1024 + 2 * 256 * 64)
    added = deeper.forward_megaflops_per_token - shared.forward_megaflops_per_token
    assert added == pytest.approx(config.num_layers * layer / 1e6)


def test_a_models_own_sizes_and_extent_are_taken(
    bundle_dir: Path, checkpoint_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extent = ["--steps", "10", "--batch-size", "2", "--length", "8"]
    folders = [str(bundle_dir), str(checkpoint_dir), str(checkpoint_dir / "config.json")]
    rows = compute(capsys, *folders, *extent)
    figures = [{**rows[folder], "model": ""} for folder in folders]
    assert figures[0] == figures[1] == figures[2]
    step, total = figures[0]["step_teraflops"], figures[0]["total_exaflops"]
    assert total == pytest.approx(10 * step / 1e6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["huge"], "give base, large, xlarge, xxlarge, small, or a model's folder"),
        (["README.md"], "--compute README.md: "),
    ],
)
def test_what_is_no_model_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--compute", *arguments]) == 1
    assert message in capsys.readouterr().err
