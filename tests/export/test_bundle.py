"""A bundle appears whole or not at all, and is the checkpoint byte for byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from albert_serve.bundle.manifest import Bundle, Precision
from albert_serve.runtime.engine import Engine
from albert_serve.tasks import EncoderInput, QuestionAnswering, load_tasks
from albert_serve.tokenizer import AlbertTokenizer
from export.__main__ import main
from export.config import ExportError
from tests.export.exporting import ALL_TASKS, TINY, export_bundle, write_checkpoint
from training.model.checkpoint import CheckpointError, load_checkpoint
from training.tasks.question_answering.metrics import BEST_F1_THRESHOLD as KEY

pytestmark = pytest.mark.process

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "bundles/first"


def folders(target: Path) -> list[str]:
    """The names beside the target: no other file may be left there."""
    return [each.name for each in target.parent.iterdir()] if target.parent.exists() else []


def test_the_bundle_is_whole(checkpoint: Path, target: Path) -> None:
    (checkpoint / "evaluation.json").write_text('{"accuracy": 0.9, "loss": 2}')
    (checkpoint / "training.json").write_text('{"steps": 3}')

    results = checkpoint.with_name("results.json")
    results.write_text('{"accuracy": 0.8, "f1": 0.7}')
    exported = export_bundle(checkpoint, target, evaluation=results)

    bundle = Bundle.open(target)
    assert bundle == exported.bundle
    assert exported.unused == []
    assert bundle.config == TINY
    assert set(bundle.manifest.tasks) == set(ALL_TASKS)
    assert bundle.manifest.parity.keys() == {"encoder", *ALL_TASKS}
    assert bundle.manifest.evaluation == {"accuracy": 0.8, "loss": 2, "f1": 0.7}
    assert bundle.manifest.provenance["training"] == {"steps": 3}
    files = {each.name for each in target.iterdir()}
    assert files == {*bundle.manifest.files, "manifest.json", "README.md"}
    for name, entry in bundle.manifest.files.items():
        content = (target / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry.size, entry.sha256)
    assert (target / "model.safetensors").samefile(checkpoint / "model.safetensors")
    assert folders(target) == ["first"]


def test_a_bundle_is_replaced_on_request_only(checkpoint: Path, target: Path) -> None:
    first = export_bundle(checkpoint, target).bundle
    write_checkpoint(checkpoint, tasks=("fill-mask",))

    with pytest.raises(ExportError, match="already exists"):
        export_bundle(checkpoint, target)
    assert Bundle.open(target).manifest == first.manifest

    export_bundle(checkpoint, target, overwrite=True)
    assert list(Bundle.open(target).manifest.tasks) == ["fill-mask"]
    assert folders(target) == ["first"]


def test_what_is_no_bundle_is_never_replaced(checkpoint: Path, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="is not a bundle"):
        export_bundle(checkpoint, target, overwrite=True)
    assert (target / "thesis.txt").exists()


@pytest.mark.parametrize("where", [".", ".."])
def test_the_checkpoint_is_never_replaced(checkpoint: Path, where: str) -> None:
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint.parent / "manifest.json").write_text("{}")
    with pytest.raises(ExportError, match="holds the checkpoint itself"):
        export_bundle(checkpoint, checkpoint / where, overwrite=True)
    assert (checkpoint / "model.safetensors").exists()


def test_the_command_line(
    checkpoint: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = target.parent.parent / "results.json"
    results.write_text('{"f1": 0.5}')

    status = main([str(checkpoint), str(target), "--no-quality", "--evaluation", str(results)])

    output = capsys.readouterr()
    assert (status, output.err) == (0, "")
    assert "which hold no weight" in output.out
    assert "question-answering" in output.out
    assert json.loads((target / "manifest.json").read_text())["evaluation"] == {"f1": 0.5}


@pytest.mark.parametrize(
    ("evaluation", "option", "expected"),
    [({}, [], None), ({KEY: -1.5}, [], -1.5), ({KEY: -1.5}, ["2"], 2.0), ({}, ["-3.5"], -3.5)],
)
def test_the_threshold_of_no_answer_is_the_services_default(
    checkpoint: Path,
    target: Path,
    evaluation: dict[str, float],
    option: list[str],
    expected: float | None,
) -> None:
    """From the checkpoint's evaluation, or from the command line."""
    (checkpoint / "evaluation.json").write_text(json.dumps(evaluation))
    options = [f"--null-score-diff-threshold={value}" for value in option]
    assert main([str(checkpoint), str(target), "--no-quality", *options]) == 0
    bundle = Bundle.open(target)
    assert bundle.manifest.heads["question-answering"].null_score_diff_threshold == expected
    assert bundle.manifest.heads["fill-mask"].null_score_diff_threshold is None
    task = load_tasks(bundle)["question-answering"]
    assert isinstance(task, QuestionAnswering)
    assert task.null_score_diff_threshold == expected


def test_a_bundle_that_is_exported_again_keeps_what_its_manifest_sets(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The threshold, a temperature and examples; options stand before them."""
    (tmp_path / "examples.json").write_text('{"fill-mask": [{"inputs": "a [MASK]"}]}')
    first = export_bundle(
        checkpoint,
        tmp_path / "fp32",
        null_score_diff_threshold=2.5,
        examples=tmp_path / "examples.json",
    ).bundle
    manifest = first.folder / "manifest.json"
    content = json.loads(manifest.read_text())
    content["heads"]["text-classification"]["temperature"] = 1.75
    manifest.write_text(json.dumps(content))

    again = export_bundle(first.folder, tmp_path / "int8", precision="int8").bundle.manifest

    assert again.heads["question-answering"].null_score_diff_threshold == 2.5
    assert again.heads["text-classification"].temperature == 1.75
    assert again.examples == first.manifest.examples != {}
    (tmp_path / "results.json").write_text(json.dumps({KEY: -1.0}))
    for options, expected in (
        ({"evaluation": tmp_path / "results.json"}, -1.0),
        ({"null_score_diff_threshold": 0.5}, 0.5),
    ):
        other = export_bundle(first.folder, tmp_path / f"{expected}", **options).bundle.manifest
        assert other.heads["question-answering"].null_score_diff_threshold == expected


def test_the_command_line_names_unused_weights(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "checkpoint", tasks=("text-classification",))
    config = tmp_path / "checkpoint/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"problem_type": "regression"}))
    file = tmp_path / "checkpoint/model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"classifier.', b'"klassifier.'))

    assert main([str(tmp_path / "checkpoint"), str(target), "--no-quality"]) == 0

    error = capsys.readouterr().err
    assert "warning" in error
    assert "klassifier.weight" in error
    assert "albert.pooler.weight" in error


def test_an_fp32_bundle_is_a_checkpoint_of_transformers(
    real_checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "bundle"
    export_bundle(real_checkpoint, target)

    text = "the [MASK] of the city"
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForMaskedLM.from_pretrained(target).eval()
    encoded = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**encoded).logits[0]

    bundle = Bundle.open(target)
    ids = AlbertTokenizer.from_file(bundle.tokenizer_file).encode(text).ids
    assert ids == encoded["input_ids"][0].tolist()
    mask = ids.index(tokenizer.mask_token_id)
    masked = EncoderInput(ids=ids, types=[0] * len(ids), task="fill-mask", rows=[mask])
    (ours,) = Engine.open(bundle).run([masked])
    np.testing.assert_allclose(ours[0], logits[mask].numpy(), atol=1e-4)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_bundle_of_a_lower_precision_says_that_it_cannot_be_trained_on(
    precision: Precision, real_checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "bundle"
    export_bundle(real_checkpoint, target, precision=precision)
    with pytest.raises(CheckpointError, match=f"bundle in {precision}.*fp32 bundle"):
        load_checkpoint(target)


def test_googles_checkpoint_is_exported_with_its_head_for_sentence_order(
    real_checkpoint: Path, tmp_path: Path
) -> None:
    """That of TensorFlow, whose bundle computes what TensorFlow did."""
    source = Path(shutil.copytree(DATA / "albert_tensorflow", tmp_path / "albert_base"))
    shutil.copy(real_checkpoint / "spiece.model", source / "30k-clean.model")

    bundle = export_bundle(source, tmp_path / "bundle").bundle

    assert bundle.manifest.provenance["checkpoint"] == "albert_base"
    assert bundle.manifest.heads.keys() == {"fill-mask", "sentence-order"}
    outputs = np.load(source / "outputs.npz")
    inputs = [
        EncoderInput(ids=ids.tolist(), types=types.tolist(), task="sentence-order", rows=[0])
        for ids, types in zip(outputs["ids"], outputs["types"], strict=True)
    ]
    logits = torch.from_numpy(np.concatenate(Engine.open(bundle).run(inputs)))
    np.testing.assert_allclose(logits.log_softmax(-1), outputs["order"], atol=1e-5)
