"""ALBERT and BERT's shape are given the same, and BERT of `transformers` has that shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bert import main
from tests.training.conftest import one_thread  # noqa: F401 - a fixture
from tests.training.support import WIKI
from training.data.preparation import prepare

STEPS, HIDDEN, LENGTH = 4, 64, 48


@pytest.mark.extended
def test_both_shapes_are_measured_and_trained_once(vocab_dir: Path, tmp_path: Path) -> None:
    corpus, output = tmp_path / "shards", tmp_path / "out"
    prepare([WIKI], vocab_dir / "tokenizer.json", corpus)
    command = [
        *("--shards", str(corpus), "--validation", str(corpus), "--tokenizer", str(vocab_dir)),
        *("--models", f"{HIDDEN}x2@{STEPS}", "--length", str(LENGTH), "--batch-size", "4"),
        *("--held-out-tokens", "3000", "--rounds", "1", "--turn", "1s", "--threads", "1"),
        *("--no-compile", "--device", "cpu", "--output", str(output)),
    ]
    assert main(command) == 0
    folder = output / "runs" / f"{HIDDEN}x2"
    albert, bert, peer = json.loads((folder / "costs.json").read_bytes()).values()
    assert albert["parameters"] < bert["parameters"]
    # `transformers` has no map of equal widths.
    assert peer["parameters"] == bert["parameters"] - HIDDEN * (HIDDEN + 1)
    for costs in (albert, bert, peer):
        assert costs["bytes"] > 4 * costs["parameters"]
        assert all(value > 0 for value in costs.values())

    runs = [
        json.loads((folder / f"{HIDDEN}x2-share-{name}-steps-seed0" / "figures.json").read_bytes())
        for name in (f"all-e32-sop-{STEPS}", f"none-e{HIDDEN}-sop-{STEPS}")
    ]
    assert runs[0]["tokens"] == runs[1]["tokens"]
    longer = round(STEPS * runs[1]["cpu_s"] / runs[0]["cpu_s"])
    page = (output / "bert.md").read_text()
    assert f"| ALBERT, as long | {longer} |" in page
    files = {file: file.stat().st_mtime_ns for file in folder.rglob("*.json")}
    assert main(command) == 0
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.json")} == files


@pytest.mark.parametrize("text", ["base", "64", "0x2", "100x2", "64x0", "64x2@"])
def test_what_is_no_shape_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = [word for name in ("shards", "validation") for word in (f"--{name}", str(tmp_path))]
    assert main([*needed, "--models", text, "--output", str(tmp_path / "out")]) == 1
    assert f"--models {text}: write HIDDENxLAYERS" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
