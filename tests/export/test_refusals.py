"""A checkpoint that cannot be exported is rejected in one line, and nothing is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.__main__ import main
from export.config import ExportError
from export.job import read_examples
from tests.export.exporting import TINY, change_config, write_checkpoint, write_tokenizer
from training.tasks.question_answering.metrics import BEST_F1_THRESHOLD

Change = Callable[[Path], Any]
FFN: Final = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"


def config(**changes: Any) -> Change:
    return lambda folder: change_config(folder, **changes)


def weights(**changes: torch.Tensor) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({**load_file(file), **changes}, file)

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def only(*tasks: Any) -> Change:
    def change(folder: Path) -> None:
        write_checkpoint(folder, tasks=tasks)
        change_config(folder, architectures=["AlbertForMultipleChoice"])

    return change


def one_weight(value: float) -> torch.Tensor:
    matrix = torch.zeros(TINY.ffn_size, TINY.hidden_size)
    matrix[3, 5] = value
    return matrix


NOT_FINITE: Final = {"weight": one_weight(torch.inf), "bias": torch.full((40,), torch.nan)}
REFUSALS: Final[dict[str, tuple[Change | None, list[str], str]]] = {
    "labels": (config(id2label={"0": "a"}), [], "The classifier has 2 outputs"),
    "a label": (config(id2label={"0": "a", "1": 7}), [], 'so give "0" to "1"'),
    "a head's name": (config(albert_default_head="a/b"), [], "albert_default_head"),
    "sizes": (config(hidden_size=48), [], "the config requires (48, 12)"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), [], "contain weights"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 5000), [], "5000 bytes"),
    "not finite": (
        weights(**{f"{FFN}.{name}": tensor for name, tensor in NOT_FINITE.items()}),
        [],
        f"{FFN}.weight and 1 more contain NaN or infinite",
    ),
    "one not finite": (weights(**{f"{FFN}.bias": NOT_FINITE["bias"]}), [], "ffn.bias contain NaN"),
    "a file": (lambda folder: folder.with_name("bundles").touch(), [], "cannot be written"),
    "fp16": (
        weights(**{f"{FFN}.weight": one_weight(-65505)}),
        ["--precision", "fp16", "--cuda-precision", "fp32"],
        "--keep-fp32 ffn",
    ),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        [],
        "neither tokenizer.json nor spiece.model",
    ),
    "damaged tokenizer": (text("tokenizer.json", "{}"), [], "tokenizer.json cannot be read"),
    "another tokenizer": (
        lambda folder: write_tokenizer(folder, num_pieces=51),
        [],
        "has 51 pieces; the model has embeddings for 50",
    ),
    "metrics": (text("evaluation.json", "[1]"), [], "evaluation.json is not a JSON object"),
    "deep metrics": (
        text("evaluation.json", '{"a":' * 300 + "1" + "}" * 300), [], "Invalid JSON: recursion",
    ),
    "threshold": (
        text("evaluation.json", json.dumps({BEST_F1_THRESHOLD: "1"})),
        [],
        f"{BEST_F1_THRESHOLD} of the evaluation is '1', not a number",
    ),
    "no questions": (only("fill-mask"), ["--null-score-diff-threshold", "1"], "has fill-mask"),
    "only multiple choice": (only("multiple-choice"), [], "multiple choice is not served"),
    "parity": (None, ["--max-difference", "1e-12"], "differ from torch by encoder"),
    "parity on CUDA": (None, ["--max-cuda-difference", "1e-5"], "--max-cuda-difference"),
    "evaluation": (None, ["--evaluation", "none.json"], "none.json"),
    "examples": (None, ["--examples", "none.json"], "none.json"),
    "RACE": (None, ["--quality", "--task", "RACE", "--data", "."], "--task RACE"),
    "texts": (only("fill-mask"), ["--quality", "--text-classification", "a.csv"], "is data for"),
    "GLUE": (only("fill-mask"), ["--quality", "--task", "RTE", "--data", "."], "is data for"),
    "entities": (None, ["--quality", "--token-classification", "a.conll"], "token-classification"),
    "a head": (
        None,
        ["--quality", "--head", "nobody", "--text-classification", "a.csv"],
        "The checkpoint has no classifier 'nobody'. Choose one of default",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_exported(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    change: Change | None,
    options: list[str],
    message: str,
) -> None:
    if change is not None:
        change(checkpoint)
    target = checkpoint.with_name("bundles") / "first"
    assert main([str(checkpoint), str(target), "--no-quality", *options]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not target.parent.is_dir() or list(target.parent.iterdir()) == []


def test_fp16_stores_its_largest_number_and_a_tokenizer_may_be_smaller(checkpoint: Path) -> None:
    weights(**{f"{FFN}.weight": one_weight(-65504)})(checkpoint)
    write_tokenizer(checkpoint, num_pieces=50)
    options = ["--no-quality", "--precision", "fp16", "--cuda-precision", "fp32"]
    assert main([str(checkpoint), str(checkpoint.with_name("bundle")), *options]) == 0


def test_the_threshold_of_an_evaluation_needs_no_head(checkpoint: Path) -> None:
    write_checkpoint(checkpoint, tasks=("fill-mask",))
    text("evaluation.json", json.dumps({BEST_F1_THRESHOLD: 1.0}))(checkpoint)
    assert main([str(checkpoint), str(checkpoint.with_name("bundle")), "--no-quality"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"text-classification": [{"inputs": "a"}]}, "the bundle has fill-mask"),
        ({"fill-mask": []}, "a list of 1 to 20 examples"),
        ({"fill-mask": [{"inputs": "a"}] * 21}, "a list of 1 to 20 examples"),
        ({"fill-mask": [{"inputs": "a"}, {"label": "a"}]}, r"fill-mask\[1\]: inputs is missing"),
        ({"fill-mask": [{"inputs": ["a"]}]}, r"fill-mask\[0\]: inputs is a list"),
        (
            {"question-answering": [{"inputs": {"question": "a"}}]},
            r"question-answering\[0\]: inputs.context is missing",
        ),
    ],
)
def test_an_example_that_the_task_would_reject_is_named(
    tmp_path: Path, content: Any, message: str
) -> None:
    file = tmp_path / "examples.json"
    file.write_text(json.dumps({"fill-mask": [{"inputs": "a"}] * 20}))
    assert len(read_examples(file, ["fill-mask"])["fill-mask"]) == 20
    file.write_text(json.dumps(content))
    with pytest.raises(ExportError, match=message):
        read_examples(file, ["fill-mask", "question-answering"])
