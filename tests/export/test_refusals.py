"""What cannot be exported is refused in one line that says what to do, and leaves nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from albert_serve.bundle.manifest import Bundle, TaskExample
from export.__main__ import main
from export.config import ExportError
from export.job import read_examples
from tests.export.exporting import write_checkpoint, write_tokenizer
from training.tasks.question_answering.metrics import BEST_F1_THRESHOLD

Change = Callable[[Path], Any]
FFN: Final = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.bias"


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def weights(**changes: torch.Tensor) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({**load_file(file), **changes}, file)

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def truncated(num_bytes: int) -> Change:
    return lambda folder: os.truncate(folder / "model.safetensors", num_bytes)


def nothing(folder: Path) -> None:
    """The options alone are wrong."""


REFUSALS: Final[dict[str, tuple[Change, list[str], str]]] = {
    "labels": (config(id2label={"0": "a"}), [], "the classifier has 2 outputs"),
    "problem": (config(problem_type="ranking"), [], "problem_type is 'ranking'"),
    "another head": (
        config(architectures=["AlbertForCausalLM"]),
        [],
        "the model is AlbertForCausalLM, which none of the tasks",
    ),
    "architecture": (config(model_type="bert"), [], "model_type is 'bert'; only 'albert'"),
    "sizes": (config(hidden_size=48), [], "the config asks for (48, 12)"),
    "groups": (config(num_hidden_groups=2), [], "no albert.encoder.albert_layer_groups.1"),
    "no weights": (removed("model.safetensors"), [], "has no weights"),
    "truncated": (truncated(5000), [], "5000 bytes"),
    "not finite": (weights(**{FFN: torch.full((40,), torch.nan)}), [], f"{FFN} hold NaN or inf"),
    "no tokenizer": (removed("tokenizer.json"), [], "neither tokenizer.json nor spiece.model"),
    "damaged tokenizer": (text("tokenizer.json", "{}"), [], "tokenizer.json cannot be read"),
    "another tokenizer": (
        lambda folder: write_tokenizer(folder, num_pieces=51),
        [],
        "has 51 pieces; the model has embeddings for 50",
    ),
    "figures": (text("evaluation.json", "[1]"), [], "should be an object"),
    "deep figures": (
        text("evaluation.json", '{"a":' * 300 + "1" + "}" * 300),
        [],
        "evaluation.json is not a JSON object: Invalid JSON: recursion",
    ),
    "threshold of the figures": (
        text("evaluation.json", f'{{"{BEST_F1_THRESHOLD}": "1"}}'),
        [],
        f"{BEST_F1_THRESHOLD} of the evaluation is '1', not a number",
    ),
    "parity": (nothing, ["--max-difference", "1e-12"], "differ from torch by encoder"),
    "parity on CUDA": (nothing, ["--max-cuda-difference", "1e-5"], "--max-cuda-difference raises"),
    "an evaluation": (nothing, ["--evaluation", "none.json"], "none.json is not there"),
    "examples": (nothing, ["--examples", "none.json"], "none.json is not there"),
    "a head": (
        nothing,
        ["--quality", "--head", "nobody", "--text-classification", "a.csv"],
        "the checkpoint has no classifier 'nobody'; it has default",
    ),
}


@pytest.mark.parametrize(("change", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_exported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Change,
    options: list[str],
    message: str,
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    change(tmp_path / "checkpoint")
    target = tmp_path / "bundles" / "first"
    assert main([str(tmp_path / "checkpoint"), str(target), "--no-quality", *options]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not target.parent.exists() or list(target.parent.iterdir()) == []


def test_a_threshold_without_a_head_for_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the evaluation is passed over."""
    write_checkpoint(tmp_path / "checkpoint", tasks=("fill-mask",))
    text("evaluation.json", json.dumps({BEST_F1_THRESHOLD: 1.0}))(tmp_path / "checkpoint")
    options = [str(tmp_path / "checkpoint"), str(tmp_path / "bundle"), "--no-quality"]
    assert main([*options, "--null-score-diff-threshold", "1"]) == 1
    assert "the bundle has fill-mask, --tasks names others" in capsys.readouterr().err
    assert main(options) == 0


def test_examples_go_into_the_manifest_if_the_bundle_has_their_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "checkpoint", tasks=("fill-mask",))
    arguments = [str(tmp_path / "checkpoint"), str(tmp_path / "bundle"), "--no-quality"]
    file = tmp_path / "examples.json"
    file.write_text('{"text-classification": [{"inputs": "a"}]}')
    assert main([*arguments, "--examples", str(file)]) == 1
    assert (
        "has examples of text-classification, but the bundle has fill-mask"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "bundle").exists()
    file.write_text('{"fill-mask": [{"inputs": "a [MASK]", "label": "One", "expected": ["b"]}]}')
    assert main([*arguments, "--examples", str(file)]) == 0
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert manifest.examples == {"fill-mask": [TaskExample(inputs="a [MASK]", label="One")]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"translation": [{"inputs": "a"}]},
            "has examples of translation, but the bundle has fill-mask",
        ),
        ({"fill-mask": []}, "must be a list of 1 to 20 examples"),
        ({"fill-mask": [{"label": "a"}]}, r"fill-mask\[0\]: inputs is missing"),
        ({"fill-mask": [{"inputs": 3}]}, r"fill-mask\[0\]: inputs must be a valid string"),
        ({"fill-mask": [{"inputs": ["a"]}]}, r"fill-mask\[0\]: inputs is a list"),
        (
            {"question-answering": [{"inputs": {"question": "a"}}]},
            r"question-answering\[0\]: inputs.context is missing",
        ),
    ],
)
def test_an_example_that_the_task_would_refuse_is_named(
    tmp_path: Path, content: Any, message: str
) -> None:
    file = tmp_path / "examples.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ExportError, match=message):
        read_examples(file, ["fill-mask", "question-answering"])
