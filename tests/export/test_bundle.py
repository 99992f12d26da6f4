"""Bundles: their files, manifest and card, replacing a bundle, and the errors of an export."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from albert_serve.bundle import manifest as manifests
from albert_serve.bundle.manifest import Bundle, HeadEntry, Manifest
from export.__main__ import main
from export.card import model_card
from export.config import ExportError
from export.job import read_examples
from export.source import read_source, with_threshold
from tests.export import exporting
from tests.export.exporting import ALL_TASKS, TINY, change_config, export_bundle, write_checkpoint
from training.tasks.question_answering.metrics import BEST_F1_THRESHOLD as KEY

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
Change = Callable[[Path], Any]
CLASSIFIER: Final = "text-classification"
FFN: Final = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "bundles/first"


def test_a_bundle_is_complete_reproducible_and_readable(
    checkpoint: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "evaluation.json").write_text('{"accuracy": 0.9, "loss": 2}')
    (checkpoint / "training.json").write_text('{"steps": 3}')
    results = checkpoint.with_name("results.json")
    results.write_text('{"accuracy": 0.8, "f1": 0.7}')

    exported = export_bundle(checkpoint, target, evaluation=results)

    bundle = Bundle.open(target)  # verifies the size and hash of each file
    assert bundle == exported.bundle
    assert bundle.config == TINY
    assert set(bundle.manifest.tasks) == set(ALL_TASKS)
    assert bundle.manifest.parity.keys() == {"encoder", *ALL_TASKS}
    assert bundle.manifest.evaluation == {"accuracy": 0.8, "loss": 2, "f1": 0.7}
    assert bundle.manifest.provenance["training"] == {"steps": 3}
    files = {file.name for file in target.iterdir()}
    assert files == {*bundle.manifest.files, "manifest.json", "README.md"}
    assert (target / "model.safetensors").samefile(checkpoint / "model.safetensors")
    assert [folder.name for folder in target.parent.iterdir()] == ["first"]

    monkeypatch.setattr("os.link", Mock(side_effect=OSError))
    export_bundle(checkpoint, target.with_name("copy"))
    assert Bundle.open(target.with_name("copy")).manifest.files == bundle.manifest.files


def test_only_bundles_are_replaced_and_only_with_overwrite(checkpoint: Path, target: Path) -> None:
    target.mkdir(parents=True)
    with pytest.raises(ExportError, match="already exists"):
        export_bundle(checkpoint, target)
    export_bundle(checkpoint, target, overwrite=True)
    write_checkpoint(checkpoint, tasks=("fill-mask",))
    with pytest.raises(ExportError, match="already exists"):
        export_bundle(checkpoint, target)
    assert set(Bundle.open(target).manifest.tasks) == set(ALL_TASKS)

    export_bundle(checkpoint, target, overwrite=True)

    assert list(Bundle.open(target).manifest.tasks) == ["fill-mask"]
    (target / "manifest.json").unlink()
    with pytest.raises(ExportError, match="is not a bundle"):
        export_bundle(checkpoint, target, overwrite=True)
    assert target.exists()
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(ExportError, match="the checkpoint itself"):
        export_bundle(checkpoint, checkpoint, overwrite=True)
    assert (checkpoint / "model.safetensors").exists()


def test_exporting_a_bundle_again_preserves_its_threshold_temperatures_and_examples(
    checkpoint: Path, target: Path
) -> None:
    """The threshold is: the option, --evaluation's, the bundle's, the checkpoint's evaluation's."""

    def threshold(source: Any, *values: Any) -> float | None:
        head: HeadEntry = with_threshold(source, *values).heads["question-answering"]
        return head.null_score_diff_threshold

    assert threshold(read_source(checkpoint), None) is None
    (checkpoint / "evaluation.json").write_text(json.dumps({KEY: -1.5}))
    assert threshold(read_source(checkpoint), None) == -1.5
    example = {"inputs": "a [MASK]", "label": "One"}
    file = checkpoint / "examples.json"
    file.write_text(json.dumps({"fill-mask": [{**example, "expected": ["b"]}]}))
    words = [str(checkpoint), str(target), "--no-quality", "--examples", str(file)]
    assert main([*words, "--null-score-diff-threshold=0"]) == 0
    content = json.loads((target / "manifest.json").read_text())
    content["heads"][CLASSIFIER]["temperature"] = 1.75
    (target / "manifest.json").write_text(json.dumps(content))

    source = read_source(target)
    assert threshold(source, None) == 0
    assert threshold(source, None, {KEY: -1.0}) == -1
    assert threshold(source, 2.5, {KEY: -1.0}) == 2.5
    exported = export_bundle(target, target.with_name("int8"), precision="int8")
    manifest = exported.bundle.manifest
    assert manifest.heads["question-answering"].null_score_diff_threshold == 0
    assert manifest.heads[CLASSIFIER].temperature == 1.75
    assert manifest.examples == {"fill-mask": [manifests.TaskExample(**example)]}


def test_the_hub_reads_the_metrics_of_the_card(tmp_path: Path) -> None:
    evaluation = {
        "text_classification_task": "RTE",
        "text_classification_accuracy": 0.71234567,
        "text_classification_classes": {"a|b": {"f1": 0.5}},
        "question_answering_f1": 88.5,
        "question_answering_parameters": {"top_k": 2},
        KEY: 1.5,
        "embeddings_spearman": 0.6254,
        "embeddings_mrr_at_10": 0.5,
        "single_sentence_order_accuracy": 0.58,
    }
    quality = manifests.Quality(metric="accuracy", torch=71.2, bundle=70.8, count=2770)
    entry = HeadEntry(
        graph="a.onnx",
        num_outputs=2,
        labels=["a", "b's"],
        problem_type="single_label_classification",
        quality=quality,
    )
    manifest = Manifest(
        config=TINY.to_hf(),
        heads={CLASSIFIER: entry},
        files={"model.safetensors": manifests.FileEntry(size=1, sha256="0" * 64)},
        evaluation=evaluation,
    )
    (tmp_path / "README.md").write_text(model_card(manifest, "rte"))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.model_name == "rte"
    results = [
        (result.task_type, result.dataset_name, result.metric_type, result.metric_value)
        for result in card.data.eval_results
    ]
    assert results == [
        (CLASSIFIER, "RTE", "accuracy", 0.7123),
        ("question-answering", "held-out data", "f1", 88.5),
        ("sentence-similarity", "held-out data", "spearman", 0.6254),
        ("sentence-similarity", "held-out data", "mrr_at_10", 0.5),
    ]
    assert "| accuracy | 71.2000 | 70.8000 | 2,770 |" in card.text
    best = 'its best F1 with `"null_score_diff_threshold": 1.5`.'
    assert f'requests with `"parameters": {{"top_k": 2}}`, and {best}' in card.text
    assert f"| {CLASSIFIER} | single\\_label\\_classification | a, b's |" in card.text
    assert "| sentence-order: accuracy, single sentences | 0.5800 |" in card.text


def set_ffn_weight(value: float) -> Change:
    """Return a change that sets one weight of the feed-forward part, and the others to zero."""

    def change(folder: Path) -> None:
        matrix = torch.zeros(TINY.ffn_size, TINY.hidden_size)
        matrix[3, 5] = value
        file = folder / "model.safetensors"
        save_file({**load_file(file), FFN: matrix}, file)

    return change


FP16: Final = ("--precision", "fp16", "--cuda-precision", "fp32")
ERRORS: Final[list[tuple[Change | None, tuple[str, ...], str]]] = [
    (lambda folder: change_config(folder, id2label={"0": "a"}), (), "The classifier has 2 outputs"),
    (lambda folder: change_config(folder, hidden_size=48), (), "the config requires (48, 12)"),
    (lambda folder: os.truncate(folder / "model.safetensors", 5000), (), "5000 bytes"),
    (set_ffn_weight(torch.inf), (), f"{FFN} contains NaN or infinite"),
    (set_ffn_weight(-65505), FP16, "--keep-fp32 ffn"),
    (lambda folder: (folder / "tokenizer.json").unlink(), (), "neither tokenizer.json nor spiece"),
    (lambda folder: exporting.write_tokenizer(folder, 51), (), "has 51 pieces; the model has embe"),
    (lambda f: write_checkpoint(f, tasks=("multiple-choice",)), (), "multiple choice is not serve"),
    (None, ("--max-difference", "1e-12"), "differ from torch by encoder"),
    (None, ("--evaluation", "none.json"), "none.json"),
    (None, ("--quality", "--token-classification", "a.conll"), "but the checkpoint has fill-mask"),
]


@pytest.mark.parametrize(("change", "options", "message"), ERRORS)
def test_a_failed_export_prints_an_error_and_leaves_no_files(
    checkpoint: Path, target: Path, capsys: Capture, change: Any, options: Any, message: str
) -> None:
    if change is not None:
        change(checkpoint)
    assert main([str(checkpoint), str(target), "--no-quality", *options]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not target.parent.is_dir() or list(target.parent.iterdir()) == []


def test_the_largest_number_of_fp16_and_a_tokenizer_with_all_pieces_are_exported(
    checkpoint: Path, target: Path
) -> None:
    set_ffn_weight(-65504)(checkpoint)
    exporting.write_tokenizer(checkpoint, 50)
    assert main([str(checkpoint), str(target), "--no-quality", *FP16]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"text-classification": [{"inputs": "a"}]}, "the bundle has fill-mask"),
        ({"fill-mask": [{"inputs": "a"}, {"label": "a"}]}, r"fill-mask\[1\]: inputs is missing"),
        ({"fill-mask": [{"inputs": ["a"]}]}, r"fill-mask\[0\]: inputs is a list"),
        ({"fill-mask": []}, "fill-mask must be a list of 1 to 20 examples"),
        ({"fill-mask": [{"inputs": "a"}] * 21}, "fill-mask must be a list of 1 to 20 examples"),
    ],
)
def test_the_error_names_the_rejected_example(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "examples.json"
    file.write_text(json.dumps({"fill-mask": [{"inputs": "a"}] * 20}))
    assert len(read_examples(file, ["fill-mask"])["fill-mask"]) == 20
    file.write_text(json.dumps(content))
    with pytest.raises(ExportError, match=message):
        read_examples(file, ["fill-mask"])
