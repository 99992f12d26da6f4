"""Layers of any encoder are compared as in the paper's Figure 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.layers import main, measure_layers
from tests.training.distillation.teachers import make_bert
from training.model.albert import ModelInputs
from training.model.checkpoint import load_checkpoint

TEXT = "The river rises in the mountains and flows to the sea."


def test_an_encoder_of_transformers_has_the_figures_of_ours(checkpoint_dir: Path) -> None:
    ids = AlbertTokenizer.from_file(checkpoint_dir / "tokenizer.json").encode(TEXT).ids
    batch = ModelInputs(ids=torch.tensor([ids]), types=torch.zeros(1, len(ids), dtype=torch.long))
    with torch.no_grad():
        states = torch.cat(list(load_checkpoint(checkpoint_dir).eval().albert.states(batch)))
    before, after = states[:-1].double(), states[1:].double()
    angles = torch.rad2deg(torch.acos(torch.cosine_similarity(before, after, dim=-1)))
    measured = measure_layers(checkpoint_dir, [TEXT], length=64)
    assert measured.distance == pytest.approx((after - before).norm(dim=-1).mean(-1), rel=1e-4)
    assert measured.angle_degrees == pytest.approx(angles.mean(-1), rel=1e-4)


def test_albert_and_bert_are_drawn_together(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bert(tmp_path / "bert")
    picture = tmp_path / "layers.png"
    command = [f"ours={checkpoint_dir}", str(tmp_path / "bert"), "--num-texts", "2"]
    assert main([*command, "--length", "16", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.count("| ours |") == printed.count(f"| {tmp_path / 'bert'} |") == 2
    assert main([str(tmp_path), "--output", str(picture)]) == 1
    assert "no encoder that transformers reads" in capsys.readouterr().err
