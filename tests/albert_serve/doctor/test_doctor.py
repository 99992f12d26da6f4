"""The doctor's measurements on this machine, and a bundle's description."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from albert_serve.bundle.manifest import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.doctor.description import describe_bundle
from albert_serve.doctor.footprint import measure_footprint
from albert_serve.doctor.layout import content_text
from albert_serve.doctor.measurement import Measurement, measure_bundle
from albert_serve.errors import EngineError
from albert_serve.settings import RuntimeOptions
from export.bundle import export_bundle
from export.verify import external_tensors
from training.model.checkpoint import load_checkpoint, save_checkpoint
from training.model.heads import AlbertForTasks

NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is told by Linux only")


@pytest.fixture(scope="module")
def measured(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """One worker, and two that share a cache."""
    options = RuntimeOptions(
        device="cpu",
        num_threads=1,
        prepack="cache",
        cache_folder=tmp_path_factory.mktemp("cache"),
    )
    return measure_bundle(Bundle.open(bundle_dir), options, num_workers=2)


@NEEDS_LINUX
def test_memory_is_that_of_all_processes_while_all_are_alive(measured: Measurement) -> None:
    one, two = measured.footprint, measured.workers_footprint
    assert one is not None
    assert two is not None
    assert (one.num_processes, two.num_processes) == (1, 2)
    for footprint in (one, two):
        assert footprint.sessions_s > 0
        for memory in (footprint.before, footprint.after):
            assert 0 < memory.anonymous_bytes < memory.pss_bytes < memory.peak_bytes
            assert memory.pss_bytes <= memory.private_bytes + memory.shared_bytes
        assert footprint.weights_over_file > 0.5
    # What two have in private is theirs; the pages of the libraries are common, and divided.
    assert one.after.anonymous_bytes < two.after.anonymous_bytes
    assert two.after.pss_bytes < two.after.private_bytes + two.after.shared_bytes


@NEEDS_LINUX
def test_an_error_of_a_process_is_raised(bundle_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for file in bundle_dir.iterdir():
        (folder / file.name).hardlink_to(file)
    bundle = Bundle.open(folder)
    (folder / "encoder.onnx").unlink()
    with pytest.raises(EngineError, match=r"encoder\.onnx is not there"):
        measure_footprint(bundle, RuntimeOptions(device="cpu", num_threads=1), 1)


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
    entry = described["tasks"]["text-classification"]
    assert (entry["num_outputs"], entry["labels"]) == (2, ["negative", "positive"])
    assert entry["problem_type"] == "single_label_classification"
    assert described["quality"] == {"text-classification": {**figures, "cost": 0.75}}
    for part in ("parity", "evaluation", "provenance"):
        assert described[part] == manifest[part]


def test_lists_of_like_values_are_tables_in_the_text() -> None:
    content = {
        "sizes": {"weights_bytes": 47_271_792, "files": {"spiece_x.model": 760_289, "a_bytes": 9}},
        "speeds": [{"num_tokens": 8, "median_ms": 1.25}, {"num_tokens": 128, "median_ms": 1234.5}],
        "stages": [{"steps": 3858, "corpus": ["a", "b"]}, {"steps": 2}],
    }
    assert content_text(content).splitlines() == [
        "sizes",
        "  weights  47.3 MB",
        "  files",
        "    spiece_x.model  760,289",
        "    a               9 B",
        "",
        "speeds",
        "  num tokens  median ms",
        "           8       1.25",
        "         128      1,234",
        "",
        "stages",
        "  1",
        "    steps   3,858",
        "    corpus  a, b",
        "  2",
        "    steps  2",
    ]


def test_text_escapes_the_control_characters_of_labels() -> None:
    content = {"tasks": {"a\x1b[2J": {"labels": ["\x1b]0;x\x07", "é\n\x9b"]}}}
    assert content_text(content).splitlines()[-3:] == [
        "tasks",
        r"  a\x1b[2J",
        r"    labels  \x1b]0;x\x07, é\n\x9b",
    ]
