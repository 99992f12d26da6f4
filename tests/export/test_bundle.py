"""A bundle: its files, manifest and card, the tasks that it has, and what it replaces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from albert_serve.bundle.manifest import (
    Bundle,
    FileEntry,
    HeadEntry,
    Manifest,
    Precision,
    Quality,
    TaskExample,
    read_manifest,
)
from export.__main__ import main
from export.card import model_card
from export.config import ExportError
from export.source import read_source, with_threshold
from tests.export.exporting import (
    ALL_TASKS,
    TINY,
    export_bundle,
    write_checkpoint,
)
from training.tasks.question_answering.metrics import BEST_F1_THRESHOLD as KEY

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
TEXTS: Final = "text-classification"


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

    private = Path(shutil.copytree(checkpoint, checkpoint.with_name("private")))
    (private / "model.safetensors").chmod(0o600)
    precisions: tuple[Precision, ...] = ("int8", "fp32")
    for precision in precisions:
        export_bundle(private, target.with_name(precision), precision=precision)
        modes = {file.stat().st_mode & 0o777 for file in target.with_name(precision).iterdir()}
        assert modes == {0o644}
    monkeypatch.setattr("os.link", Mock(side_effect=OSError))
    export_bundle(checkpoint, target.with_name("copy"))
    for name in ("fp32", "copy"):
        assert Bundle.open(target.with_name(name)).manifest.files == bundle.manifest.files


def test_only_a_bundle_is_replaced_and_only_on_request(checkpoint: Path, target: Path) -> None:
    target.mkdir(parents=True)
    with pytest.raises(ExportError, match="already exists"):
        export_bundle(checkpoint, target)
    first = export_bundle(checkpoint, target, overwrite=True).bundle
    write_checkpoint(checkpoint, tasks=("fill-mask",))
    with pytest.raises(ExportError, match="already exists"):
        export_bundle(checkpoint, target)
    assert Bundle.open(target).manifest == first.manifest

    export_bundle(checkpoint, target, overwrite=True)

    assert list(Bundle.open(target).manifest.tasks) == ["fill-mask"]
    (target / "manifest.json").unlink()
    for other in (target, target / "tokenizer.json"):
        with pytest.raises(ExportError, match="is not a bundle"):
            export_bundle(checkpoint, other, overwrite=True)
        assert other.exists()
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint.parent / "manifest.json").write_text("{}")
    for other in (checkpoint, checkpoint.parent):
        with pytest.raises(ExportError, match="the checkpoint itself"):
            export_bundle(checkpoint, other, overwrite=True)
    assert (checkpoint / "model.safetensors").exists()


def test_the_command_prints_sizes_and_names_unused_weights(
    checkpoint: Path, target: Path, capsys: Capture
) -> None:
    weights = checkpoint / "model.safetensors"
    save_file({**load_file(weights), "klassifier.weight": torch.ones(1)}, weights)

    assert main([str(checkpoint), str(target), "--no-quality", "--precision", "int8"]) == 0

    printed = capsys.readouterr()
    assert "warning: " in printed.err
    assert ": klassifier.weight\n" in printed.err
    manifest = read_manifest(target)
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    graphs = sum(size for name, size in sizes.items() if name.endswith(".onnx"))
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert f"tokenizer.json {sizes['tokenizer.json']:,} bytes" in lines
    assert any(line.startswith(f"graphs {graphs:,} bytes") for line in lines)
    total = sum(sizes.values())
    share = total / weights.stat().st_size
    assert any(line.startswith(f"all {total:,} bytes, {share:.3f} ") for line in lines)
    for parity in (manifest.parity, manifest.cuda_parity):
        assert f"question-answering {parity['question-answering']:.1e}" in lines


def test_the_threshold_of_no_answer_is_the_first_of_four(checkpoint: Path, target: Path) -> None:
    """The option, --evaluation, the bundle that is exported again, the checkpoint's evaluation."""

    def threshold(source: Any, *values: Any) -> float | None:
        head: HeadEntry = with_threshold(source, *values).heads["question-answering"]
        return head.null_score_diff_threshold

    assert threshold(read_source(checkpoint), None) is None
    (checkpoint / "evaluation.json").write_text(json.dumps({KEY: -1.5}))
    (checkpoint / "training.json").write_text('{"steps": 3}')
    assert threshold(read_source(checkpoint), None) == -1.5
    words = [str(checkpoint), str(target), "--no-quality", "--null-score-diff-threshold=0"]
    assert main(words) == 0
    source = read_source(target)
    assert (source.evaluation, source.training) == ({KEY: -1.5}, {"steps": 3})
    assert threshold(source, None) == 0
    assert threshold(source, None, {KEY: -1.0}) == -1
    assert threshold(source, 2.5, {KEY: -1.0}) == 2.5


def test_a_bundle_that_is_exported_again_keeps_its_temperatures_and_examples(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "examples.json").write_text(
        json.dumps({"fill-mask": [{"inputs": "a [MASK]", "label": "One", "expected": ["b"]}]})
    )
    first = export_bundle(checkpoint, tmp_path / "fp32", examples=tmp_path / "examples.json").bundle
    assert first.manifest.examples == {"fill-mask": [TaskExample(inputs="a [MASK]", label="One")]}
    manifest = first.folder / "manifest.json"
    content = json.loads(manifest.read_text())
    content["heads"][TEXTS]["temperature"] = 1.75
    manifest.write_text(json.dumps(content))

    again = export_bundle(first.folder, tmp_path / "int8", precision="int8").bundle.manifest

    assert again.heads[TEXTS].temperature == 1.75
    assert again.examples == first.manifest.examples


def manifest(evaluation: dict[str, Any], num_characters: int = 1) -> Manifest:
    entry = HeadEntry(
        graph="a.onnx",
        num_outputs=2,
        labels=["a|b", "c" * num_characters],
        problem_type="multi_label_classification",
        quality=Quality(metric="accuracy", torch=71.2, bundle=70.8, count=2770),
    )
    return Manifest(
        config=TINY.to_hf(),
        heads={TEXTS: entry},
        precision="int8",
        files={"model.safetensors": FileEntry(size=1, sha256="0" * 64)},
        evaluation=evaluation,
    )


def test_the_hub_reads_the_metrics_of_the_card(tmp_path: Path) -> None:
    evaluation = {
        "text_classification_task": "RTE",
        "text_classification_accuracy": 0.71234567,
        "text_classification_classes": {"a|b": {"f1": 0.5}},
        "question_answering_f1": 88.5,
        "embeddings_spearman": 0.6254,
        "embeddings_mrr_at_10": 0.5,
    }
    (tmp_path / "README.md").write_text(model_card(manifest(evaluation), "rte"))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.model_name == "rte"
    results = [
        (result.task_type, result.dataset_name, result.metric_type, result.metric_value)
        for result in card.data.eval_results
    ]
    assert results == [
        (TEXTS, "RTE", "accuracy", 0.7123),
        ("question-answering", "held-out data", "f1", 88.5),
        ("sentence-similarity", "held-out data", "spearman", 0.6254),
        ("sentence-similarity", "held-out data", "mrr_at_10", 0.5),
    ]
    assert "| accuracy | 71.2000 | 70.8000 | 2,770 |" in card.text


def test_a_cell_of_the_card_has_at_most_300_characters() -> None:
    row = f"| multi\\_label\\_classification | a\\|b, {'c' * 295} |"
    assert row in model_card(manifest({}, 295), "rte")
    assert f"| a\\|b, {'c' * 292}... |" in model_card(manifest({}, 296), "rte")


def test_the_card_has_the_parameters_that_questions_were_measured_with() -> None:
    parameters = {"handle_impossible_answer": True, "max_answer_len": 30}
    evaluation = {"question_answering_parameters": parameters, KEY: -1.25}
    [line] = [
        line
        for line in model_card(manifest(evaluation), "squad").splitlines()
        if "Question answering" in line
    ]
    assert '`"parameters": {"handle_impossible_answer": true, "max_answer_len": 30}`' in line
    assert '`"null_score_diff_threshold": -1.25`' in line
    assert "Question answering" not in model_card(manifest({}), "squad")
