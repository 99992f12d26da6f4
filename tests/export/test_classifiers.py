"""A checkpoint of several classifiers as one bundle: a graph, parity and quality for each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from albert_serve.bundle.manifest import Bundle, Precision, Quality, head_name, read_manifest
from albert_serve.bundle.weights import read_header
from albert_serve.errors import BundleCorruptError
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.base import EncoderInput
from albert_serve.tasks.description import read_quality
from export.__main__ import main
from export.source import read_source
from tests.export.exporting import export_bundle, randomize
from training.conversion.weight_files import restore_weights
from training.model.checkpoint import CheckpointError, load_checkpoint, read_config, save_checkpoint
from training.model.heads import AlbertForTasks
from training.tasks.engine import TorchEngine

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
CPU = RuntimeOptions(device="cpu", num_threads=1)
# Names that end as weights of the encoder do, whose matrices are stored in lower precision.
HEADS = ("text-classification", "text-classification/query", "text-classification/ffn")
TASKS = (*HEADS, "fill-mask", "question-answering")


@pytest.fixture(scope="module")
def checkpoint(real_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint with classifiers of two, three and one outputs, and their labels."""
    source = load_checkpoint(real_checkpoint)
    model = AlbertForTasks(source.config, {**source.tasks, HEADS[1]: 3, HEADS[2]: 1})
    randomize(model)
    folder = tmp_path_factory.mktemp("heads") / "checkpoint"
    labels = {
        "id2label": {"0": "negative", "1": "positive"},
        "albert_default_head": "sentiment",
        "albert_heads": {"query": {"id2label": {"0": "a", "1": "b", "2": "c"}}},
    }
    save_checkpoint(model.eval(), folder, tokenizer_from=real_checkpoint, extra_config=labels)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_bundle(checkpoint, tmp_path_factory.mktemp("bundles") / "heads").bundle


def inputs_of(bundle: Bundle, count: int = 20) -> list[EncoderInput]:
    """Inputs of all heads in turn, of any length."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, bundle.config.max_positions, count).tolist()
    return [
        EncoderInput(
            ids=rng.integers(5, 600, size).tolist(),
            types=[0] * size,
            task=TASKS[number % len(TASKS)],
            rows=[0],
        )
        for number, size in enumerate(sizes)
    ]


def test_each_head_has_a_graph_labels_and_parity(bundle: Bundle) -> None:
    heads = bundle.manifest.heads_of("text-classification")
    assert {head_name(*each): each[1].labels for each in heads.items()} == {
        "sentiment": ["negative", "positive"],
        "query": ["a", "b", "c"],
        "ffn": ["LABEL_0"],
    }
    assert heads[HEADS[2]].problem_type == "multi_label_classification"
    assert bundle.head_file(HEADS[1]).name == "text-classification-query.onnx"
    assert set(HEADS) <= bundle.manifest.heads.keys() == bundle.manifest.parity.keys() - {"encoder"}
    assert max(bundle.manifest.parity.values()) < 1e-4
    assert set(HEADS) <= bundle.manifest.cuda_parity.keys()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_inputs_of_all_heads_share_a_batch(
    checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    """As torch answers with the bundle's own weights; in int8, as each alone."""
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precision=precision).bundle
    stored = read_header(bundle.weights_file)
    assert all(stored[name].dtype == "F32" for name in stored if name.startswith("heads."))
    engine, inputs = Engine.open(bundle, CPU), inputs_of(bundle)
    together = engine.run_batch(inputs)
    assert [len(logits[0]) for logits in together[:3]] == [2, 3, 1]
    if precision == "int8":
        wanted = [engine.run_batch([item])[0] for item in inputs]
    else:
        restore_weights(bundle.weights_file, tmp_path / "model.safetensors")
        shutil.copyfile(checkpoint / "config.json", tmp_path / "config.json")
        wanted = TorchEngine(load_checkpoint(tmp_path)).run(inputs)
    for one, other in zip(together, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_bundle_in_fp32_is_a_checkpoint_of_all_heads(bundle: Bundle, checkpoint: Path) -> None:
    assert load_checkpoint(bundle.folder).tasks == load_checkpoint(checkpoint).tasks
    assert read_source(bundle.folder).heads == bundle.manifest.heads
    with torch.inference_mode():
        weights = (load_checkpoint(each).state_dict() for each in (bundle.folder, checkpoint))
        torch.testing.assert_close(*weights)


def test_each_is_measured_on_data_of_its_own(
    checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "two.csv").write_text("text,label\n" + "a good day,positive\nno,negative\n" * 4)
    (tmp_path / "three.csv").write_text("text,name\n" + "a good day,a\nno,b\nyes,c\n" * 4)
    (tmp_path / "evaluation.json").write_text(
        json.dumps(
            {
                "text_classification_accuracy": 0.5,
                "text_classification_texts": 8,
                "text_classification/query_accuracy": 0.25,
                "text_classification/query_texts": 12,
            }
        )
    )
    target = tmp_path / "bundle"
    words = [str(checkpoint), str(target), "--evaluation", str(tmp_path / "evaluation.json")]
    words += ["--head", "query", "--text-classification", str(tmp_path / "three.csv")]
    words += ["--label-column", "name", "--force"]
    words += ["--head", "sentiment", "--text-classification", str(tmp_path / "two.csv")]

    assert main(words) == 0

    manifest = read_manifest(target)
    assert {
        head: (entry.quality.metric, entry.quality.data)
        for head, entry in manifest.heads.items()
        if entry.quality
    } == {HEADS[0]: ("accuracy", ["two.csv"]), HEADS[1]: ("accuracy", ["three.csv"])}
    figure = read_quality(manifest, HEADS[1])
    assert figure is not None
    assert (figure.metric, figure.percent, figure.count) == ("accuracy", 25.0, 12)
    assert read_quality(manifest, HEADS[2]) is None
    card = (target / "README.md").read_text()
    assert "| text-classification/query |" in card
    assert card.count("      type: text-classification") == 2
    assert "value: 0.25" in card
    shown = capsys.readouterr().out
    assert "text-classification-query.onnx" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"zero": "a", "one": "b"}}, "names 2 labels; the classifier has 2 outputs"),
        ({"id2label": {"0": "a", "1": 7}}, "each by a text; it is"),
        ({"id2label": ["a", "b"]}, r"id2label of config.json is \['a', 'b'\], not an object"),
        ({"albert_heads": {"query": {"id2label": {"0": "a"}}}}, "names 1 labels"),
        ({"albert_heads": {"query": [1]}}, "albert_heads of config.json is"),
        ({"albert_heads": 3}, "albert_heads of config.json is 3, not an object"),
        ({"albert_default_head": "a/b"}, "albert_default_head of config.json is 'a/b'"),
    ],
)
def test_labels_that_do_not_fit(
    checkpoint: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (folder / "config.json").write_text(json.dumps({**read_config(checkpoint), **changes}))
    with pytest.raises(CheckpointError, match=message):
        read_source(folder)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({"sentiment": {"graph": "a.onnx", "num_outputs": 1}}, "two heads are named sentiment"),
        ({"../a": {"graph": "a.onnx", "num_outputs": 1}}, "should match pattern"),
        ({"a": {"graph": "missing.onnx", "num_outputs": 3}}, "lists no file missing.onnx"),
        ({"a": {"graph": "encoder.onnx", "num_outputs": 3}}, "no heads.a.classifier.weight"),
    ],
)
def test_a_manifest_whose_heads_are_wrong_is_refused(
    bundle: Bundle, tmp_path: Path, heads: dict[str, object], message: str
) -> None:
    shutil.copytree(bundle.folder, tmp_path / "bundle")
    file = tmp_path / "bundle/manifest.json"
    content = json.loads(file.read_text())
    named = {f"text-classification/{name}": entry for name, entry in heads.items()}
    content["heads"] |= named
    file.write_text(json.dumps(content))
    with pytest.raises(BundleCorruptError, match=message):
        Bundle.open(tmp_path / "bundle", verify="size")


def test_a_task_of_glue_is_measured_on_its_held_out_texts(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "a good day\t1\nno\t0\n" * 4)
    words = [str(checkpoint), str(tmp_path / "bundle")]
    assert main([*words, "--task", "SST-2", "--data", str(tmp_path)]) == 0
    quality = read_manifest(tmp_path / "bundle").heads["text-classification"].quality
    assert quality is not None
    assert (quality.metric, quality.data) == ("accuracy", ["dev.tsv"])


def test_a_manifest_of_version_2_is_read(bundle: Bundle, tmp_path: Path) -> None:
    """In which the entry of the default classifier has the others."""
    shutil.copytree(bundle.folder, tmp_path / "bundle")
    file = tmp_path / "bundle/manifest.json"
    content = json.loads(file.read_text()) | {"format_version": 2}
    content["tasks"] = heads = content.pop("heads")
    named = {name: heads.pop(f"text-classification/{name}") for name in ("query", "ffn")}
    default = heads["text-classification"]
    default |= {"head": default.pop("name"), "heads": named}
    quality = Quality(metric="F1", torch=90.5, bundle=90.0, count=200)
    content["quality"] = {"text-classification": quality.model_dump()}
    file.write_text(json.dumps(content))
    read = Bundle.open(tmp_path / "bundle").manifest.heads
    assert read["text-classification"].quality == quality
    read["text-classification"] = bundle.manifest.heads["text-classification"]
    assert read == bundle.manifest.heads
