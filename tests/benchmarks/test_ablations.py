"""Runs of several shapes compare like with like, and lose nothing when stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bert
from benchmarks.ablations import main
from tests.training.support import WIKI
from training.data.preparation import prepare


def test_an_ablation_writes_tables_and_repeats_no_run(
    vocab_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, output = tmp_path / "shards", tmp_path / "out"
    prepare([WIKI], vocab_dir / "tokenizer.json", corpus)
    command = [
        *("--shards", str(corpus), "--validation", str(corpus), "--tokenizer", str(vocab_dir)),
        *("--hidden-size", "16", "--layers", "2", "--heads", "2", "--embedding-size", "8"),
        *("--embedding-sizes", "8", "--length", "48", "--batch-size", "8", "--steps", "4"),
        *("--held-out-tokens", "3000", "--no-compile", "--device", "cpu"),
        *("--output", str(output), "--seeds", "0", "1"),
    ]
    embedding = [*command, "--tables", "embedding"]
    assert main([*embedding, "--validation", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert not output.exists()
    assert main(embedding) == 0
    names = ["16x2-share-all-e8-sop-4-steps-seed0", "16x2-share-all-e16-sop-4-steps-seed0"]
    runs = [output / "runs" / name / "figures.json" for name in names]
    small, wide = (json.loads(file.read_bytes()) for file in runs)
    assert small["tokens"] == wide["tokens"] > 4 * 8 * 40
    # 800 words, 48 positions and 2 types of 8 more dimensions, their norm and their map to H.
    assert wide["parameters"] - small["parameters"] == 8 * (800 + 48 + 2) + 2 * 8 + 8 * 16
    table = (output / "ablations.md").read_text()
    assert "| E = 8 | 2 |" in table
    again = json.loads(
        (output / "runs" / names[1].replace("seed0", "seed1") / "figures.json").read_bytes()
    )
    accuracies = [100 * run["sop_accuracy"] for run in (wide, again)]
    spread = f"({min(accuracies):.1f} to {max(accuracies):.1f})"
    assert f"| {sum(accuracies) / 2:.1f} {spread} |" in table
    assert wide["nsp_count"] > 20
    assert small["masked_count"] == wide["masked_count"] > 100

    files = sorted((output / "runs").rglob("*"))
    before = [file.stat().st_mtime_ns for file in files]
    assert main(embedding) == 0
    assert [file.stat().st_mtime_ns for file in files] == before
    assert main([*embedding, "--batch-size", "4"]) == 1
    assert "batch_size 8, not 4" in capsys.readouterr().err
    damaged = runs[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(embedding) == 1
    assert f"delete {damaged} to measure again" in capsys.readouterr().err

    # Depth and width differ in nothing else, and sentence tasks go on from a checkpoint.
    shapes = ["--tables", "depth", "width", "--depths", "1", "--widths", "8", "--steps", "2"]
    assert main([*command, *shapes]) == 0
    table = (output / "ablations.md").read_text()
    assert "| 1 layers | 2 |" in table
    assert "| H = 8 | 2 |" in table
    start = ["--initialize-from", str(runs[1].parent / "checkpoint"), "--output"]
    assert main([*command, *start, str(tmp_path / "pairs"), "--seeds", "0"]) == 1
    assert "give --tables sentence" in capsys.readouterr().err
    pairs = [*command, "--tables", "sentence", *start, str(tmp_path / "pairs"), "--seeds", "0"]
    assert main(pairs) == 0
    assert "| nsp trained | 1 |" in (tmp_path / "pairs" / "ablations.md").read_text()


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
    assert bert.main(command) == 0
    folder = output / "runs" / f"{HIDDEN}x2"
    albert, other, peer = json.loads((folder / "costs.json").read_bytes()).values()
    assert albert["parameters"] < other["parameters"]
    # `transformers` has no map of equal widths.
    assert peer["parameters"] == other["parameters"] - HIDDEN * (HIDDEN + 1)
    for costs in (albert, other, peer):
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
    assert bert.main(command) == 0
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.json")} == files
