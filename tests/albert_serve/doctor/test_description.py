"""The description of a bundle, against torch, onnx, safetensors and the file system."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from albert_serve.bundle.manifest import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.doctor.description import describe_bundle
from albert_serve.doctor.layout import in_bytes
from albert_serve.doctor.overview import description_text
from export.bundle import export_bundle
from export.source import HUGGING_FACE_FILES
from export.verify import external_tensors
from training.model.checkpoint import load_checkpoint, save_checkpoint
from training.model.heads import AlbertForTasks


@pytest.fixture(scope="module")
def int8_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("int8") / "tiny-int8"
    exported = export_bundle(
        checkpoint_dir, target, precision="int8", kept_fp32=["embeddings", "heads"]
    )
    return exported.bundle.folder


@pytest.fixture(scope="module")
def attention_shared_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only attention is shared; a bundle of the encoder and one head."""
    folder = tmp_path_factory.mktemp("attention")
    config = replace(load_checkpoint(checkpoint_dir).config, sharing="attention")
    model = AlbertForTasks(config, {"question-answering": 2})
    save_checkpoint(model, folder / "checkpoint", tokenizer_from=checkpoint_dir)
    return export_bundle(folder / "checkpoint", folder / "bundle").bundle.folder


@pytest.fixture(params=["bundle_dir", "int8_dir", "attention_shared_dir"])
def any_dir(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


def with_manifest(bundle_dir: Path, folder: Path, changes: Mapping[str, Any]) -> Bundle:
    """A copy of a bundle whose manifest says other things."""
    shutil.copytree(bundle_dir, folder)
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | changes))
    return Bundle.open(folder)


def torch_params(config: AlbertConfig, bundle: Bundle) -> int:
    heads = {head: entry.num_outputs for head, entry in bundle.manifest.heads.items()}
    model = AlbertForTasks(config, heads)
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_are_those_of_torch_with_and_without_sharing(any_dir: Path) -> None:
    bundle = Bundle.open(any_dir)
    sharing = describe_bundle(bundle).sharing
    assert sharing.num_params == torch_params(bundle.config, bundle)
    unshared = replace(bundle.config, sharing="none")
    assert sharing.num_params_unshared == torch_params(unshared, bundle)
    assert sharing.num_params_unused == 0


def test_ranges_are_those_that_the_graphs_refer_to(any_dir: Path) -> None:
    sharing = describe_bundle(Bundle.open(any_dir)).sharing
    graphs = [external_tensors(file) for file in any_dir.glob("*.onnx")]
    ranges = {place for graph in graphs for place in graph.values()}
    assert sharing.num_ranges == len(ranges)
    assert sharing.num_graphs == len(graphs) > 2


def test_sizes_are_those_on_disk(any_dir: Path) -> None:
    sizes = describe_bundle(Bundle.open(any_dir)).sizes
    on_disk = {file.name: file.stat().st_size for file in any_dir.iterdir()}
    assert sizes.files == on_disk
    assert sizes.bundle_bytes == sum(on_disk.values())
    parts = (sizes.weights_bytes, sizes.tokenizer_bytes, sizes.graphs_bytes, sizes.manifest_bytes)
    others = [size for name, size in sizes.files.items() if name in HUGGING_FACE_FILES]
    assert sum(parts) + sum(others) == sizes.bundle_bytes
    assert sizes.weights_bytes == on_disk["model.safetensors"]
    assert sizes.bundle_over_weights == sizes.bundle_bytes / sizes.weights_bytes


def test_bytes_by_type_are_those_that_safetensors_reads(int8_dir: Path) -> None:
    described = describe_bundle(Bundle.open(int8_dir))
    expected = {"int8": 0, "float32": 0}
    with safe_open(int8_dir / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_tensor(name)
            expected[str(tensor.dtype)] += tensor.nbytes
    assert described.bytes_by_dtype == {"I8": expected["int8"], "F32": expected["float32"]}
    assert (described.precision, described.kept_fp32) == ("int8", ["embeddings", "heads"])
    text = description_text(described)
    assert "\n  int8, but fp32: embeddings, heads\n" in text


@pytest.mark.parametrize(
    ("fixture", "line"),
    [
        ("bundle_dir", "layer stored once, applied 3 times"),
        ("attention_shared_dir", "1 attention and 3 feed-forward blocks stored, 3 layers applied"),
    ],
)
def test_sharing_in_words(fixture: str, line: str, request: pytest.FixtureRequest) -> None:
    bundle = Bundle.open(request.getfixturevalue(fixture))
    assert f"\n  {line}\n" in description_text(describe_bundle(bundle))


def test_unused_weights_are_reported(bundle_dir: Path, tmp_path: Path) -> None:
    tasks = json.loads((bundle_dir / "manifest.json").read_text())["tasks"]
    del tasks["fill-mask"]
    described = describe_bundle(with_manifest(bundle_dir, tmp_path / "b", {"tasks": tasks}))
    # Its map from 64 to 32 with a bias, a norm of 32, a bias of 1,000.
    unused = 64 * 32 + 32 + 2 * 32 + 1000
    assert described.sharing.num_params_unused == unused
    assert f"{unused:,} parameters in the file that no task needs" in description_text(described)


def test_the_keys_are_stable_and_the_description_survives_json(bundle_dir: Path) -> None:
    described = json.loads(json.dumps(asdict(describe_bundle(Bundle.open(bundle_dir)))))
    assert list(described) == [
        *("folder", "format_version", "config", "sizes", "sharing", "precision", "kept_fp32"),
        *("bytes_by_dtype", "tasks", "quality", "parity", "evaluation", "provenance"),
    ]
    assert set(described["sharing"]) == {
        *("num_layers_applied", "num_attentions_stored", "num_ffns_stored", "num_params"),
        *("num_params_unshared", "num_params_unused", "num_graphs", "num_ranges"),
    }
    assert described["tasks"]["text-classification"] == {
        "graph": "text-classification.onnx",
        "num_outputs": 2,
        "labels": ["negative", "positive"],
        "problem_type": "single_label_classification",
        "null_score_diff_threshold": None,
    }
    assert described["tasks"]["fill-mask"]["labels"] is None


def test_quality_and_evaluation_are_reported_in_full(bundle_dir: Path, tmp_path: Path) -> None:
    long = "a label of many words " * 20 + "end"
    figures = {"metric": "accuracy", "torch": 91.25, "bundle": 90.5, "count": 8720}
    tasks = json.loads((bundle_dir / "manifest.json").read_text())["tasks"]
    tasks["text-classification"]["labels"] = ["no", long]
    changes = {
        "tasks": tasks,
        "quality": {"text-classification": {**figures, "data": ["dev.tsv", "more.tsv"]}},
        "evaluation": {"f1": 12.3456},
        "provenance": {"stages": [{"steps": 3858, "corpus": ["a.txt", "b.txt"]}, {"steps": 2}]},
    }
    described = describe_bundle(with_manifest(bundle_dir, tmp_path / "b", changes))
    assert described.quality["text-classification"]["cost"] == 0.75
    lines = description_text(described).splitlines()
    assert any(long in line for line in lines)
    at = lines.index("quality on real text, in percent")
    assert lines[at + 1].split() == [
        *("task", "metric", "torch", "bundle", "cost", "predictions", "data")
    ]
    assert lines[at + 2].split() == [
        *("text-classification", "accuracy", "91.25", "90.50", "0.75", "8,720"),
        *("dev.tsv,", "more.tsv"),
    ]
    at = lines.index("provenance")
    assert [line.strip() for line in lines[at + 1 :]] == [
        *("stages", "1", "steps   3,858", "corpus  a.txt, b.txt", "2", "steps  2")
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (47_271_792, "47.3 MB"),
        (892_637_752, "893 MB"),
        (1.7e9, "1.70 GB"),
        (-2500, "-2.50 kB"),
    ],
)
def test_sizes_have_three_digits(size: float, text: str) -> None:
    assert in_bytes(size) == text
