"""The heads of a bundle: several classifiers, their data, and the selection of tasks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from albert_serve.bundle.manifest import Bundle, Quality, head_name, read_manifest
from albert_serve.client import AlbertClient
from export.__main__ import main
from export.config import ExportError
from export.selection import select_tasks
from export.source import read_source
from tests.export.exporting import ALL_TASKS, change_config, export_bundle, write_checkpoint
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


def test_each_classifier_has_a_graph_labels_parity_and_the_weights_of_the_checkpoint_in_fp32(
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
    # A bundle in fp32 is a checkpoint, too.
    assert read_source(classifiers_bundle.folder).heads == manifest.heads
    weights = load_checkpoint(classifiers).state_dict()
    torch.testing.assert_close(load_checkpoint(classifiers_bundle.folder).state_dict(), weights)
    bundle = export_bundle(classifiers, tmp_path / "int8", precision="int8").bundle
    tensors = load_file(bundle.weights_file)
    assert all(t.dtype == torch.float32 for name, t in tensors.items() if name.startswith("heads."))


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


def copy_after_run(checkpoint: Path, folder: Path, **stage: Any) -> Path:
    """Copy the checkpoint, with the record of a last run. It has 13.5 % of masked tokens right."""
    shutil.copytree(checkpoint, folder)
    evaluation = {"masked_accuracy": 0.135, "masked_tokens": 900}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    record_stage(folder, "albert-serve finetune", stage)
    return folder


@pytest.mark.parametrize(
    ("trained", "percent", "expected", "reason"),
    [
        (["text-classification/topic"], 40.0, [CLASSIFIER], "did not train it: accuracy 40.0 %"),
        (["fill-mask"], 15.0, ["fill-mask"], ""),  # loses a tenth
        (["fill-mask"], 0.0, ["fill-mask"], ""),
        (["fill-mask"], 15.1, [], "lost 11 % of its.* 15.1 % before it, 13.5 % after it"),
        (["fill-mask"], 54.0, [], "lost 75 % of its metric"),
    ],
)
def test_the_tasks_of_the_last_run_are_exported_unless_it_made_them_worse(
    real_checkpoint: Path, tmp_path: Path, trained: Any, percent: float, expected: Any, reason: str
) -> None:
    before = {"fill-mask": {"metric": "accuracy", "percent": percent, "count": 900}}
    folder = tmp_path / "checkpoint"
    source = read_source(copy_after_run(real_checkpoint, folder, tasks=trained, before=before))
    selected, omitted = select_tasks(source, [])
    assert selected.tasks == expected
    assert set(omitted) == set(ALL_TASKS) - set(expected)
    assert re.search(reason, omitted.get("fill-mask", ""))
    assert select_tasks(source, ["sentence-order"])[0].tasks == ["sentence-order"]


def test_the_requested_tasks_are_exported_or_all_without_a_record(real_checkpoint: Path) -> None:
    source = read_source(real_checkpoint)
    assert select_tasks(source, []) == (source, {})
    requested, omitted = select_tasks(source, ["sentence-order"])
    assert requested.tasks == ["sentence-order"]
    assert omitted == dict.fromkeys({*ALL_TASKS} - {*requested.tasks}, "it is not among --tasks")
    with pytest.raises(ExportError, match="fill-mask: the checkpoint has only sentence-order"):
        select_tasks(requested, ["fill-mask"])


def test_an_int8_bundle_contains_no_graph_and_no_weights_of_an_omitted_task(
    real_checkpoint: Path, tmp_path: Path
) -> None:
    folder = copy_after_run(real_checkpoint, tmp_path / "checkpoint", tasks=[CLASSIFIER])
    exported = export_bundle(folder, tmp_path / "bundle", precision="int8")
    assert list(exported.bundle.manifest.tasks) == [CLASSIFIER]
    assert set(exported.omitted) == set(ALL_TASKS) - {CLASSIFIER}
    assert exported.unused == []
    assert not (tmp_path / "bundle/fill-mask.onnx").exists()
    assert "predictions.bias" not in load_file(exported.bundle.weights_file)


def test_a_run_that_trained_only_embeddings_exports_a_bundle_without_heads(
    real_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_after_run(real_checkpoint, tmp_path / "checkpoint", tasks=[])
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
def test_a_head_that_is_not_served_is_omitted(tmp_path: Path, task: Task, changes: Any) -> None:
    write_checkpoint(tmp_path / "checkpoint", tasks=("fill-mask", task))
    change_config(tmp_path / "checkpoint", **changes)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").bundle
    assert list(bundle.manifest.tasks) == ["fill-mask"]
