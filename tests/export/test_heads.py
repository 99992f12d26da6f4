"""The heads of a bundle: several classifiers, their data, and the selection of tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from albert_serve.bundle.manifest import Bundle, Quality, head_name, read_manifest
from albert_serve.bundle.weights import TaskName
from albert_serve.client import AlbertClient
from export.__main__ import main
from export.config import ExportError
from export.selection import select_tasks
from export.source import read_source
from tests.export.checkpoints import ALL_TASKS, change_config, write_checkpoint
from tests.export.exporting import export_bundle
from tests.training.support import randomize
from training.model.checkpoint import load_checkpoint, save_checkpoint
from training.model.heads import AlbertForTasks, Task
from training.model.provenance import record_stage

pytestmark = pytest.mark.process

CLASSIFIER: Final = "text-classification"
# "query" and "ffn" also end the names of the encoder's weights, which int8 bundles quantize.
HEADS: Final = (CLASSIFIER, f"{CLASSIFIER}/query", f"{CLASSIFIER}/ffn")


@pytest.fixture(scope="module")
def classifiers(real_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint with three classifiers, of two, three and one outputs."""
    source = load_checkpoint(real_checkpoint)
    model = AlbertForTasks(source.config, {**source.tasks, HEADS[1]: 3, HEADS[2]: 1})
    randomize(model, seed=0)
    folder = tmp_path_factory.mktemp("heads") / "checkpoint"
    labels = {
        "id2label": {"0": "negative", "1": "positive"},
        "albert_default_head": "sentiment",
        "albert_heads": {"query": {"id2label": {"0": "a", "1": "b", "2": "c"}}},
    }
    save_checkpoint(model.eval(), folder, tokenizer_from=real_checkpoint, extra_config=labels)
    return folder


@pytest.fixture(scope="module")
def classifiers_bundle(classifiers: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_bundle(classifiers, tmp_path_factory.mktemp("bundles") / "heads").bundle


def test_each_classifier_has_a_graph_and_labels_and_parity_and_fp32_weights(
    classifiers: Path, classifiers_bundle: Bundle, tmp_path: Path
) -> None:
    manifest = classifiers_bundle.manifest
    heads = manifest.heads_of(CLASSIFIER)
    assert {head_name(head, entry): entry.labels for head, entry in heads.items()} == {
        "sentiment": ["negative", "positive"],
        "query": ["a", "b", "c"],
        "ffn": ["LABEL_0"],
    }
    assert heads[HEADS[2]].problem_type == "multi_label_classification"
    assert classifiers_bundle.head_file(HEADS[1]).name == "text-classification-query.onnx"
    assert manifest.parity.keys() == manifest.cuda_parity.keys() == {*manifest.heads, "encoder"}
    bundle = export_bundle(classifiers, tmp_path / "int8", precision="int8").bundle
    tensors = load_file(bundle.weights_file)
    assert all(t.dtype == torch.float32 for name, t in tensors.items() if name.startswith("heads."))


def test_a_bundle_in_fp32_is_a_checkpoint_of_all_heads(
    classifiers: Path, classifiers_bundle: Bundle
) -> None:
    folder = classifiers_bundle.folder
    assert read_source(folder).heads == classifiers_bundle.manifest.heads
    torch.testing.assert_close(
        *(load_checkpoint(checkpoint).state_dict() for checkpoint in (folder, classifiers))
    )


def test_each_classifier_is_measured_on_its_own_data(classifiers: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "a good day\t1\nno\t0\n" * 4)
    (tmp_path / "three.csv").write_text("text,name\n" + "a good day,a\nno,b\nyes,c\n" * 4)
    target = tmp_path / "bundle"
    words = [str(classifiers), str(target), "--task", "SST-2", "--data", str(tmp_path), "--force"]
    words += ["--head", "query", "--text-classification", str(tmp_path / "three.csv")]

    assert main([*words, "--label-column", "name"]) == 0

    heads = read_manifest(target).heads
    qualities = {head: entry.quality for head, entry in heads.items() if entry.quality}
    assert {head: (quality.metric, quality.data) for head, quality in qualities.items()} == {
        HEADS[0]: ("accuracy", ["dev.tsv"]),
        HEADS[1]: ("accuracy", ["three.csv"]),
    }


def test_manifests_of_version_2_are_read(classifiers_bundle: Bundle, tmp_path: Path) -> None:
    """In version 2, the entry of the default classifier contains the other classifiers."""
    shutil.copytree(classifiers_bundle.folder, tmp_path / "bundle")
    file = tmp_path / "bundle/manifest.json"
    content = json.loads(file.read_text()) | {"format_version": 2}
    content["tasks"] = heads = content.pop("heads")
    additional = {name: heads.pop(f"{CLASSIFIER}/{name}") for name in ("query", "ffn")}
    heads[CLASSIFIER] |= {"head": heads[CLASSIFIER].pop("name"), "heads": additional}
    quality = Quality(metric="F1", torch=90.5, bundle=90.0, count=200)
    content["quality"] = {CLASSIFIER: quality.model_dump()}
    file.write_text(json.dumps(content))
    converted = Bundle.open(tmp_path / "bundle").manifest.heads
    assert converted[CLASSIFIER].quality == quality
    converted[CLASSIFIER] = classifiers_bundle.manifest.heads[CLASSIFIER]
    assert converted == classifiers_bundle.manifest.heads


def copy_after_run(
    checkpoint: Path, folder: Path, tasks: list[str], accuracy_before: float | None = None
) -> Path:
    """Copy the checkpoint, with the record of a last run that trained these tasks.

    Args:
        accuracy_before: accuracy of masked tokens in percent before that run. It is 13.5 % after.
    """
    shutil.copytree(checkpoint, folder)
    stage: dict[str, Any] = {"tasks": tasks}
    if accuracy_before is not None:
        metric = {"metric": "accuracy", "percent": accuracy_before, "count": 900}
        stage["before"] = {"fill-mask": metric}
        evaluation = {"masked_accuracy": 0.135, "masked_tokens": 900}
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    record_stage(folder, "albert-serve finetune", stage)
    return folder


@pytest.mark.parametrize(
    ("trained", "accuracy_before", "requested", "expected", "reason"),
    [
        (None, None, [], ALL_TASKS, ""),
        (
            ["text-classification/topic"],
            40.0,
            [],
            [CLASSIFIER],
            "did not train it: accuracy 40.0 % before it, 13.5 % after it",
        ),
        (["fill-mask"], 15.0, [], ["fill-mask"], ""),  # loses a tenth
        (["fill-mask"], 15.1, [], [], "lost 11 % of its"),
        (["fill-mask"], None, ["sentence-order"], ["sentence-order"], "not among --tasks"),
    ],
)
def test_the_tasks_of_the_last_run_or_the_requested_ones_are_exported(
    real_checkpoint: Path,
    tmp_path: Path,
    trained: list[str] | None,
    accuracy_before: float | None,
    requested: list[TaskName],
    expected: list[str],
    reason: str,
) -> None:
    folder = real_checkpoint
    if trained is not None:
        folder = copy_after_run(folder, tmp_path / "checkpoint", trained, accuracy_before)
    source, omitted = select_tasks(read_source(folder), requested)
    assert set(source.tasks) == set(expected)
    assert set(omitted) == set(ALL_TASKS) - set(expected)
    assert reason in omitted.get("fill-mask", "")
    with pytest.raises(ExportError, match="--tasks token-classification"):
        select_tasks(source, ["token-classification"])


def test_an_int8_bundle_contains_no_graph_and_no_weights_of_an_omitted_task(
    real_checkpoint: Path, tmp_path: Path
) -> None:
    folder = copy_after_run(real_checkpoint, tmp_path / "checkpoint", [CLASSIFIER])
    exported = export_bundle(folder, tmp_path / "bundle", precision="int8")
    assert list(exported.bundle.manifest.tasks) == [CLASSIFIER]
    assert set(exported.omitted) == set(ALL_TASKS) - {CLASSIFIER}
    assert exported.unused == []
    assert not (tmp_path / "bundle/fill-mask.onnx").exists()
    assert "predictions.bias" not in load_file(exported.bundle.weights_file)


def test_a_run_that_trained_only_embeddings_exports_a_bundle_without_heads(
    real_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_after_run(real_checkpoint, tmp_path / "checkpoint", [])
    assert main([str(folder), str(tmp_path / "bundle")]) == 0
    error = capsys.readouterr().err
    assert "The bundle has no head" in error
    assert "fill-mask" in error
    with AlbertClient.local(tmp_path / "bundle", num_threads=1) as albert:
        assert [task.name for task in albert.info().tasks] == ["feature-extraction"]
        assert len(albert.feature_extraction(["It rained.", "It was a run."])) == 2


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("sentence-order", {"albert_sentence_task": "nsp"}),
        ("multiple-choice", {"architectures": ["AlbertForMultipleChoice"]}),
    ],
)
def test_a_head_that_is_not_served_is_omitted(
    tmp_path: Path, task: Task, changes: dict[str, object]
) -> None:
    write_checkpoint(tmp_path / "checkpoint", tasks=("fill-mask", task))
    change_config(tmp_path / "checkpoint", **changes)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").bundle
    assert list(bundle.manifest.tasks) == ["fill-mask"]
