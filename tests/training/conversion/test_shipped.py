"""The model of the wheel, which finetuning starts from where no checkpoint is named."""

from __future__ import annotations

from pathlib import Path

import torch

from albert_serve.default_bundle import shipped_bundle
from tests.albert_serve.support import ROOT
from training.conversion.shipped import write_from_int8
from training.conversion.source import open_checkpoint
from training.model.checkpoint import read_config, read_weights
from training.model.labels import read_labels

PACKAGED = ROOT / "albert_serve/models/albert-small-en"


def test_the_checkpoint_of_the_wheel_is_the_model_that_ships_but_for_rounding(
    tmp_path: Path,
) -> None:
    write_from_int8(PACKAGED, tmp_path / "checkpoint")
    with open_checkpoint(None) as shipped, open_checkpoint(tmp_path / "checkpoint") as packaged:
        assert shipped.folder == shipped_bundle()
        exact, rounded = read_weights(shipped.folder), read_weights(packaged.folder)
        assert exact.keys() == rounded.keys()
        for name, weight in exact.items():
            step = float(weight.abs().max()) / 127
            # Two adjacent weights share the steps, which doubles them at most. Smoothed matrices
            # have larger steps where an input is an outlier.
            worst = 5 if any(part in name for part in ("ffn", "pooler")) else 1.01
            torch.testing.assert_close(rounded[name], weight, rtol=0, atol=worst * step)
        configs = [read_config(each.folder) for each in (shipped, packaged)]
        labels = [read_labels(config, 2, "text-classification") for config in configs]
    assert labels[0] == labels[1]
