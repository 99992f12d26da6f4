"""A bundle that is not whole is refused by the file's name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file as save_numpy

from albert_serve.bundle.manifest import (
    Bundle,
    Manifest,
    Verification,
    file_entry,
    read_manifest,
)
from albert_serve.bundle.weights import StoredTensor, check_shapes, expected_shapes, read_header
from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.errors import BundleCorruptError, BundleError, BundleMissingError

Change = Callable[[dict[str, Any]], object]
FILES = ["model.safetensors", "tokenizer.json", "encoder.onnx", "fill-mask.onnx"]


@pytest.fixture
def folder(bundle_dir: Path, tmp_path: Path) -> Path:
    """A copy of a bundle, to be damaged."""
    return Path(shutil.copytree(bundle_dir, tmp_path / "bundle"))


def change_manifest(folder: Path, change: Change) -> None:
    file = folder / "manifest.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_whole_bundle_is_opened(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert isinstance(bundle.config, AlbertConfig)
    assert bundle.encoder_file.is_file()
    assert bundle.tokenizer_file.is_file()
    assert bundle.weights_file.is_file()
    assert bundle.head_file("fill-mask") == folder / "fill-mask.onnx"


def test_the_manifest_survives_its_own_json(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert type(manifest).model_validate_json(manifest.model_dump_json()) == manifest


def test_a_bundle_without_adaptive_depth_keeps_its_revision() -> None:
    """The one that it had before manifests knew of adaptive depth."""
    entry = {
        "graph": "text-classification.onnx",
        "num_outputs": 2,
        "labels": ["no", "yes"],
        "problem_type": "single_label_classification",
    }
    content: dict[str, Any] = {
        "config": {"model_type": "albert"},
        "tasks": {"text-classification": entry},
        "files": {"encoder.onnx": {"sha256": "0" * 64, "size": 1}},
    }
    assert Manifest.model_validate(content).revision == "17782a842479"
    content["tasks"]["text-classification"] = {**entry, "adaptive_depth": {"patience": 2}}
    assert Manifest.model_validate(content).revision != "17782a842479"


@pytest.mark.parametrize("verify", ["hash", "size"])
@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_a_missing_file_is_named(folder: Path, name: str, verify: Verification) -> None:
    (folder / name).unlink()
    with pytest.raises(BundleMissingError, match=rf"{name} is not there.*python -m export"):
        Bundle.open(folder, verify=verify)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleMissingError, match="nowhere"):
        Bundle.open(tmp_path / "nowhere")


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_found(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    sha256 = file_entry(folder / name).sha256
    with pytest.raises(BundleCorruptError, match=f"{name} has SHA-256 {sha256}; the manifest says"):
        Bundle.open(folder)


@pytest.mark.parametrize("verify", ["hash", "size"])
@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_found(folder: Path, name: str, verify: Verification) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    message = f"{name} has {len(content) - 1} bytes; the manifest says {len(content)}"
    with pytest.raises(BundleCorruptError, match=message):
        Bundle.open(folder, verify=verify)


def test_verifying_sizes_reads_no_hash(folder: Path) -> None:
    change_manifest(folder, lambda m: m["files"]["encoder.onnx"].update(sha256="0" * 64))
    Bundle.open(folder, verify="size")
    with pytest.raises(BundleCorruptError, match=r"encoder\.onnx"):
        Bundle.open(folder)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, []])
def test_another_format_version(folder: Path, version: object) -> None:
    change_manifest(folder, lambda m: m.update(format_version=version))
    with pytest.raises(BundleError, match=r"format version .*; this package reads 2\."):
        Bundle.open(folder)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/b", "..", "", "..\\outside", "C:outside"]
)
def test_names_that_leave_the_folder_are_refused(folder: Path, name: str) -> None:
    entry = {"sha256": "0" * 64, "size": 1}
    change_manifest(folder, lambda m: m["files"].update({name: entry}))
    with pytest.raises(BundleCorruptError, match="no plain file name"):
        Bundle.open(folder)


def test_graphs_that_leave_the_folder_are_refused(folder: Path) -> None:
    change_manifest(folder, lambda m: m["tasks"]["fill-mask"].update(graph="../fill-mask.onnx"))
    with pytest.raises(BundleCorruptError, match="no plain file name"):
        Bundle.open(folder)


@pytest.mark.parametrize("name", FILES)
def test_every_file_must_be_listed(folder: Path, name: str) -> None:
    change_manifest(folder, lambda m: m["files"].pop(name))
    with pytest.raises(BundleCorruptError, match=f"lists no file {name}"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda m: m.pop("config"), "is no manifest", id="no-config"),
        pytest.param(lambda m: m.update(precision="fp64"), "is no manifest", id="precision"),
        pytest.param(
            lambda m: m["tasks"].update(chat=m["tasks"]["fill-mask"]), "is no manifest", id="task"
        ),
        pytest.param(
            lambda m: m["config"].update(model_type="bert"), "only 'albert'", id="architecture"
        ),
        pytest.param(
            lambda m: m["config"].update(embedding_size=31),
            r"word_embeddings.weight has shape \(1000, 32\); the config asks for \(1000, 31\)",
            id="embedding-size",
        ),
        pytest.param(
            lambda m: m["config"].update(num_hidden_groups=2),
            "no albert.encoder.albert_layer_groups.1",
            id="groups",
        ),
        pytest.param(
            lambda m: m["tasks"]["question-answering"].update(num_outputs=3),
            "the head for questions is independent and has 3 outputs",
            id="outputs",
        ),
        pytest.param(
            lambda m: m["tasks"]["text-classification"].update(labels=["a"]),
            "1 labels for 2 outputs",
            id="labels",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_or_the_weights(
    folder: Path, change: Change, message: str
) -> None:
    change_manifest(folder, change)
    with pytest.raises(BundleCorruptError, match=message):
        Bundle.open(folder)


@pytest.mark.parametrize("text", ["", "{", "\x00\xff", "[]", "3"])
def test_a_manifest_that_is_none(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Bundle.open(folder)


@pytest.mark.parametrize("preset", PRESETS)
def test_expected_shapes_hold_the_papers_parameter_counts(preset: str) -> None:
    config = PRESETS[preset]
    shapes = expected_shapes(config, {"sentence-order": 2})
    num_params = sum(_size(shape) for shape in shapes.values())
    assert num_params - 2 * (config.hidden_size + 1) == config.num_backbone_params


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        b"\x02" + b"\x00" * 7 + b"[]",
        b"\x02" + b"\x00" * 7 + b"{",
        b'\x08\x00\x00\x00\x00\x00\x00\x00{"a": 1}',
        b'\x36\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BundleCorruptError, match="is damaged"):
        read_header(tmp_path / "x")


def test_a_header_gives_each_tensors_place(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.zeros((), "<f4")}
    save_numpy(values, tmp_path / "x", {"format": "np"})
    content = (tmp_path / "x").read_bytes()

    header = read_header(tmp_path / "x")

    for name, value in values.items():
        place = header[name]
        assert (place.dtype, place.shape) == ("F32", value.shape)
        assert content[place.offset : place.offset + place.num_bytes] == value.tobytes()


def test_weights_of_another_type_are_refused() -> None:
    stored = {"w": StoredTensor(dtype="F16", shape=(2,), offset=0, num_bytes=4)}
    with pytest.raises(BundleCorruptError, match="w is F16"):
        check_shapes(stored, {"w": (2,)})


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for part in shape:
        size *= part
    return size


def nested(depth: int) -> str:
    return '{"a":' * depth + "0" + "}" * depth


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 100_000, id="nesting that never ends"),
        pytest.param(nested(100_000), id="deep nesting"),
        pytest.param('{"a":' + "1" * 5000 + "}", id="a large number"),
        *(
            pytest.param(f'"{key}": {nested(depth)}', id=f"{key} {depth} deep")
            for key in ("provenance", "config")
            for depth in (300, 900)
        ),
        pytest.param('"provenance": {"a": "\\ud800"}', id="half a character"),
        pytest.param('"config": {"hidden_act": []}', id="activation"),
        pytest.param('"config": {"num_hidden_layers": 1000000000}', id="layers"),
        pytest.param(
            '"config": {"num_hidden_layers": 100000, "inner_group_num": 10000}', id="inner layers"
        ),
    ],
)
def test_a_manifest_of_anything_is_one_clear_error(folder: Path, text: str) -> None:
    file = folder / "manifest.json"
    if text.startswith('"'):  # a key in place of the manifest's own
        key = text.split('"')[1]
        content = json.loads(file.read_text())
        del content[key]
        text = json.dumps(content)[:-1] + f", {text}}}"
    file.write_text(text)
    with pytest.raises(BundleCorruptError, match=r"manifest\.json") as caught:
        Bundle.open(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_manifest_that_is_no_file_is_refused_at_once(folder: Path) -> None:
    file = folder / "manifest.json"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BundleMissingError, match="is not a regular file"):
        Bundle.open(folder)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(BundleMissingError, match="is not a regular file"):
        Bundle.open(folder)


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"a":' * 100_000])
def test_a_header_that_nests_without_end_is_damaged(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BundleCorruptError, match="is damaged"):
        read_header(tmp_path / "x")
