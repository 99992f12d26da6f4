"""The description of a bundle, against torch, onnx, safetensors and the file system; its text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from albert_serve.bundle.manifest import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.doctor.description import describe_bundle
from albert_serve.doctor.layout import content_text
from export.bundle import export_bundle
from export.verify import external_tensors
from training.model.checkpoint import load_checkpoint, save_checkpoint
from training.model.heads import AlbertForTasks


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


def torch_params(config: AlbertConfig, bundle: Bundle) -> int:
    heads = {head: entry.num_outputs for head, entry in bundle.manifest.heads.items()}
    model = AlbertForTasks(config, heads)
    return sum(parameter.numel() for parameter in model.parameters())


def test_sharing_is_that_of_torch_and_of_the_graphs(any_dir: Path) -> None:
    bundle = Bundle.open(any_dir)
    unshared = replace(bundle.config, sharing="none")
    graphs = [external_tensors(file) for file in any_dir.glob("*.onnx")]
    num_ffns = 3 if bundle.config.sharing == "attention" else 1
    assert describe_bundle(bundle)["sharing"] == {
        "num_layers_applied": 3,
        "num_attentions_stored": 1,
        "num_ffns_stored": num_ffns,
        "num_params": torch_params(bundle.config, bundle),
        "num_params_unshared": torch_params(unshared, bundle),
        "num_params_unused": 0,
        "num_graphs": len(graphs),
        "num_ranges": len({place for graph in graphs for place in graph.values()}),
    }


def test_sizes_are_those_on_disk(any_dir: Path) -> None:
    sizes = describe_bundle(Bundle.open(any_dir))["sizes"]
    on_disk = {file.name: file.stat().st_size for file in any_dir.iterdir()}
    graphs_bytes = sum(size for name, size in on_disk.items() if name.endswith(".onnx"))
    assert sizes == {
        "weights_bytes": on_disk["model.safetensors"],
        "tokenizer_bytes": on_disk["tokenizer.json"],
        "graphs_bytes": graphs_bytes,
        "manifest_bytes": on_disk["manifest.json"],
        "bundle_bytes": sum(on_disk.values()),
        "bundle_over_weights": sum(on_disk.values()) / on_disk["model.safetensors"],
        "files": on_disk,
    }


def test_bytes_by_type_are_those_that_safetensors_reads(int8_dir: Path) -> None:
    expected = {"int8": 0, "float32": 0}
    with safe_open(int8_dir / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_tensor(name)
            expected[str(tensor.dtype)] += tensor.nbytes
    bytes_by_dtype = describe_bundle(Bundle.open(int8_dir))["bytes_by_dtype"]
    assert bytes_by_dtype == {"I8": expected["int8"], "F32": expected["float32"]}


def test_the_manifest_is_described_in_full(bundle_dir: Path, tmp_path: Path) -> None:
    """A head that is missing leaves its weights unused."""
    folder = Path(shutil.copytree(bundle_dir, tmp_path / "b"))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["tasks"]["fill-mask"]
    figures = {"metric": "accuracy", "torch": 91.25, "bundle": 90.5, "count": 8720, "data": ["a"]}
    manifest["quality"] = {"text-classification": figures}
    manifest["evaluation"] = {"f1": 12.3456}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    described = json.loads(json.dumps(describe_bundle(Bundle.open(folder))))
    assert list(described) == [
        *("folder", "format_version", "config", "sizes", "sharing", "precision", "kept_fp32"),
        *("bytes_by_dtype", "tasks", "sentence_vectors"),
        *("quality", "parity", "evaluation", "provenance"),
    ]
    # Its map from 64 to 32 with a bias, a norm of 32, a bias of 1,000.
    assert described["sharing"]["num_params_unused"] == 64 * 32 + 32 + 2 * 32 + 1000
    assert described["tasks"]["text-classification"] == {
        "graph": "text-classification.onnx",
        "num_outputs": 2,
        "pairs": False,
        "labels": ["negative", "positive"],
        "problem_type": "single_label_classification",
        "null_score_diff_threshold": None,
        "head": None,
    }
    assert described["quality"] == {"text-classification": {**figures, "cost": 0.75}}
    for part in ("parity", "evaluation", "provenance"):
        assert described[part] == manifest[part]


def test_text_has_all_that_is_not_empty() -> None:
    content = {
        "folder": "models/base",
        "num_workers": 2,
        "labels": ["no", "yes"],
        "footprint": None,
        "sizes": {"weights_bytes": 47_271_792, "files": {"spiece_x.model": 760_289}},
        "tasks": {"fill-mask": {"labels": None, "num_outputs": 30000}},
        "speeds": [{"num_tokens": 8, "median_ms": 1.25}, {"num_tokens": 128, "median_ms": 1234.5}],
        "provenance": {"stages": [{"steps": 3858, "corpus": ["a", "b"]}, {"steps": 2}]},
    }
    assert content_text(content).splitlines() == [
        "folder       models/base",
        "num workers  2",
        "",
        "labels",
        "  no, yes",
        "",
        "sizes",
        "  weights  47.3 MB",
        "  files",
        "    spiece_x.model  760,289",
        "",
        "tasks",
        "  fill-mask",
        "    num outputs  30,000",
        "",
        "speeds",
        "  num tokens  median ms",
        "           8       1.25",
        "         128      1,234",
        "",
        "provenance",
        "  stages",
        "    1",
        "      steps   3,858",
        "      corpus  a, b",
        "    2",
        "      steps  2",
    ]


def test_text_escapes_the_control_characters_of_labels() -> None:
    content = {"tasks": {"a\x1b[2J": {"labels": ["\x1b]0;x\x07", "é\n\x9b"]}}}
    assert content_text(content).splitlines()[-3:] == [
        "tasks",
        r"  a\x1b[2J",
        r"    labels  \x1b]0;x\x07, é\n\x9b",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (892_637_752, "893 MB"), (-2500, "-2.50 kB")],
)
def test_sizes_have_three_digits(size: float, text: str) -> None:
    assert content_text({"weights_bytes": size}) == f"weights  {text}"
