"""An ablation compares like with like, says how sure it is, and loses nothing when stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.ablations import main
from tests.training.conftest import one_thread  # noqa: F401 - a fixture
from tests.training.support import WIKI
from training.prepare import prepare


def test_an_ablation_writes_tables_and_repeats_no_run(
    vocab_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, output = tmp_path / "shards", tmp_path / "out"
    prepare([WIKI], vocab_dir / "tokenizer.json", corpus)
    command = [
        *("--shards", str(corpus), "--validation", str(corpus), "--tokenizer", str(vocab_dir)),
        *("--hidden-size", "16", "--layers", "2", "--heads", "2", "--embedding-size", "8"),
        *("--embedding-sizes", "8", "--length", "48", "--batch-size", "8", "--steps", "4"),
        *("--held-out-tokens", "3000", "--no-compile", "--device", "cpu", "--tables", "embedding"),
        *("--output", str(output)),
    ]
    assert main([*command, "--validation", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert not output.exists()
    assert main(command) == 0
    names = ["share-all-e8-sop-4-steps-seed0", "share-all-e16-sop-4-steps-seed0"]
    runs = [output / "runs" / name / "figures.json" for name in names]
    small, wide = (json.loads(file.read_bytes()) for file in runs)
    assert small["tokens"] == wide["tokens"] > 4 * 8 * 40
    # 800 words, 48 positions and 2 types of 8 more dimensions, their norm and their map to H.
    assert wide["parameters"] - small["parameters"] == 8 * (800 + 48 + 2) + 2 * 8 + 8 * 16
    table = (output / "ablations.md").read_text()
    assert "| E = 8 |" in table
    accuracy, pairs = wide["sop_accuracy"], wide["sop_count"]
    error = math.sqrt(accuracy * (1 - accuracy) / pairs)
    assert f"| {100 * accuracy:.1f} ± {100 * error:.1f} |" in table
    assert wide["nsp_count"] > 20
    assert small["masked_count"] == wide["masked_count"] > 100

    files = sorted((output / "runs").rglob("*"))
    before = [file.stat().st_mtime_ns for file in files]
    assert main(command) == 0
    assert [file.stat().st_mtime_ns for file in files] == before
    assert main([*command, "--layers", "3"]) == 1
    assert "layers 2, not 3" in capsys.readouterr().err
    damaged = runs[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(command) == 1
    assert f"delete {damaged} to measure again" in capsys.readouterr().err
