"""A bundle has the tasks that were trained last, those with data, or those that are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.weights import TaskName
from albert_serve.client import AlbertClient
from albert_serve.errors import NotFoundError
from export.__main__ import main
from export.config import ExportError
from export.selection import select_tasks
from export.source import read_source
from tests.export.exporting import ALL_TASKS, export_bundle, write_checkpoint
from training.model.provenance import record_stage

FIGURES = {"masked_accuracy": 0.13, "masked_tokens": 900, "masked_data": "wiki.jsonl"}


def trained(checkpoint: Path, folder: Path, tasks: list[str], before: float | None = None) -> Path:
    """A copy of the checkpoint whose last run trained these tasks.

    Args:
        before: the accuracy of masked tokens before that run, in percent.
    """
    shutil.copytree(checkpoint, folder)
    stage: dict[str, Any] = {"tasks": tasks}
    if before is not None:
        figure = {"metric": "accuracy", "percent": before, "count": 900, "data": "wiki.jsonl"}
        stage["before"] = {"fill-mask": figure}
        (folder / "evaluation.json").write_text(json.dumps(FIGURES))
    record_stage(folder, "albert-serve finetune", stage)
    return folder


@pytest.mark.parametrize(
    ("last", "before", "asked", "measured", "kept", "why"),
    [
        (None, None, [], [], ALL_TASKS, ""),
        (
            ["text-classification/topic"],
            40.0,
            [],
            [],
            ["text-classification"],
            "did not train it: accuracy 40.0 % before it, 13.0 % after it",
        ),
        (["fill-mask"], 40.0, [], [], [], "lost 68 % of its figure in the last run"),
        (["fill-mask"], 13.2, [], [], ["fill-mask"], ""),
        (["fill-mask"], 40.0, [], ["fill-mask"], ["fill-mask"], ""),
        (["fill-mask"], None, ["sentence-order"], [], ["sentence-order"], "not among --tasks"),
    ],
)
def test_which_tasks_are_exported(
    real_checkpoint: Path,
    tmp_path: Path,
    last: list[str] | None,
    before: float | None,
    asked: list[TaskName],
    measured: list[TaskName],
    kept: list[str],
    why: str,
) -> None:
    folder = real_checkpoint
    if last is not None:
        folder = trained(real_checkpoint, tmp_path / "checkpoint", last, before)
    source, left_out = select_tasks(read_source(folder), asked, measured)
    assert set(source.tasks) == set(kept)
    assert set(left_out) == set(ALL_TASKS) - set(kept)
    assert why in left_out.get("fill-mask", "")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_left_out_task_is_no_part_of_the_bundle(
    real_checkpoint: Path, tmp_path: Path, precision: Any
) -> None:
    folder = trained(real_checkpoint, tmp_path / "checkpoint", ["text-classification"])
    exported = export_bundle(folder, tmp_path / "bundle", precision=precision)
    assert set(exported.bundle.manifest.tasks) == {"text-classification"}
    assert set(exported.left_out) == set(ALL_TASKS) - {"text-classification"}
    assert exported.unused == []
    assert not (tmp_path / "bundle" / "fill-mask.onnx").exists()
    again = export_bundle(
        folder,
        tmp_path / "both",
        precision=precision,
        tasks=["text-classification", "question-answering"],
    )
    assert set(again.bundle.manifest.tasks) == {"text-classification", "question-answering"}


def test_a_run_of_embeddings_alone_gives_a_bundle_that_answers_them(
    real_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(real_checkpoint, tmp_path / "checkpoint", [])
    assert main([str(folder), str(tmp_path / "bundle")]) == 0
    told = capsys.readouterr().err
    assert "the bundle has no head: it answers embeddings only" in told
    assert "measuring" not in told
    with AlbertClient.local(tmp_path / "bundle", num_threads=1) as albert:
        assert [task.name for task in albert.info().tasks] == ["feature-extraction"]
        assert len(albert.feature_extraction(["It rained.", "It was a run."])) == 2
        with pytest.raises(NotFoundError, match=r"no fill-mask\. It has feature-extraction"):
            albert.fill_mask("It [MASK].")


def test_a_task_that_the_checkpoint_lacks_is_refused(real_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--tasks token-classification: the checkpoint has"):
        export_bundle(real_checkpoint, tmp_path / "bundle", tasks=["token-classification"])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_every_user_can_read_a_bundle(
    real_checkpoint: Path, tmp_path: Path, precision: Any
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(real_checkpoint, folder)
    (folder / "model.safetensors").chmod(0o600)
    export_bundle(folder, tmp_path / "bundle", precision=precision, tasks=["text-classification"])
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "bundle").iterdir()}
    assert set(modes.values()) == {0o644}, modes
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o600


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_head_for_the_next_sentence_is_not_one_for_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    change_config(tmp_path, albert_sentence_task="sop")
    assert "sentence-order" in read_source(tmp_path).tasks
    change_config(tmp_path, albert_sentence_task="nsp")
    assert set(read_source(tmp_path).tasks) == set(ALL_TASKS) - {"sentence-order"}


def test_one_output_is_what_the_architecture_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tasks=("multiple-choice",))
    change_config(tmp_path, architectures=["AlbertForSequenceClassification"])
    entry = read_source(tmp_path).heads["text-classification"]
    assert (entry.num_outputs, entry.problem_type) == (1, "multi_label_classification")


def test_multiple_choice_is_left_out_and_alone_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is trained, but not served."""
    both, alone = tmp_path / "both", tmp_path / "alone"
    write_checkpoint(both, tasks=("fill-mask", "multiple-choice"))
    write_checkpoint(alone, tasks=("multiple-choice",))
    for folder in (both, alone):
        change_config(folder, architectures=["AlbertForMultipleChoice"])

    assert main([str(both), str(tmp_path / "bundle"), "--no-quality"]) == 0
    assert "multiple-choice is left out: it is not served" in capsys.readouterr().err
    assert list(Bundle.open(tmp_path / "bundle").manifest.tasks) == ["fill-mask"]

    assert main([str(alone), str(tmp_path / "other"), "--no-quality"]) == 1
    told = capsys.readouterr().err
    assert "multiple choice is not served, and no other head is exported" in told
    assert "albert-serve evaluate --multiple-choice" in told
    assert not (tmp_path / "other").exists()
