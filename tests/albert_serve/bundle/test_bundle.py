"""A bundle that is not whole is refused by the file's name."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file as save_numpy

from albert_serve.bundle.manifest import Bundle, Verification, file_entry
from albert_serve.bundle.weights import StoredTensor, check_shapes, read_header
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


@pytest.mark.parametrize("verify", ["hash", "size"])
@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_a_missing_file_is_named(folder: Path, name: str, verify: Verification) -> None:
    (folder / name).unlink()
    with pytest.raises(BundleMissingError, match=rf"{name} is not there.*albert-serve export"):
        Bundle.open(folder, verify=verify)


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


@pytest.mark.parametrize("version", [0, 1, 4, "2", None, []])
def test_another_format_version(folder: Path, version: object) -> None:
    change_manifest(folder, lambda m: m.update(format_version=version))
    with pytest.raises(BundleError, match=r"format version .*; this package reads 2 and 3\."):
        Bundle.open(folder)


ENTRY = {"sha256": "0" * 64, "size": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (lambda m, name=name: m["files"].update({name: ENTRY}), "match pattern")
            for name in ("../outside", "/etc/passwd", "a/b", "..", "", "..\\outside", "C:outside")
        ),
        (
            lambda m: m["heads"]["fill-mask"].update(graph="../fill-mask.onnx"),
            "match pattern",
        ),
        *((lambda m, n=name: m["files"].pop(n), f"lists no file {name}") for name in FILES),
        (lambda m: m.pop("config"), "is no manifest"),
        (lambda m: m.update(precision="fp64"), "is no manifest"),
        (lambda m: m["heads"].update(chat=m["heads"]["fill-mask"]), "is no manifest"),
        (lambda m: m["config"].update(model_type="bert"), "only 'albert'"),
        (lambda m: m["config"].update(hidden_act=[]), "hidden_act is"),
        (lambda m: m["config"].update(num_hidden_layers=10**9), "no ALBERT has so many"),
        (
            lambda m: m["config"].update(embedding_size=31),
            r"word_embeddings.weight has shape \(1000, 32\); the config asks for \(1000, 31\)",
        ),
        (
            lambda m: m["config"].update(num_hidden_groups=2),
            "no albert.encoder.albert_layer_groups.1",
        ),
        (
            lambda m: m["heads"]["text-classification"].update(labels=["a"]),
            "1 labels for 2 outputs",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_or_the_weights(
    folder: Path, change: Change, message: str
) -> None:
    change_manifest(folder, change)
    with pytest.raises(BundleCorruptError, match=message):
        Bundle.open(folder)


@pytest.mark.parametrize("text", ["", "{", "\x00\xff", "[]", "3", "[" * 100_000])
def test_a_manifest_that_is_none(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=r"manifest\.json") as caught:
        Bundle.open(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        b"\x02" + b"\x00" * 7 + b"[]",
        b"\x02" + b"\x00" * 7 + b"{",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        b'\x08\x00\x00\x00\x00\x00\x00\x00{"a": 1}',
        b'\x36\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BundleCorruptError, match="is damaged"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([3] * 1_000_000, "1000000 dimensions; at most 8 are read"),
        ([-1, -1], "no whole number"),
        ([1.0], "no whole number"),
        ([10**4000], "no whole number"),
    ],
    ids=["many", "negative", "float", "huge"],
)
def test_a_shape_that_no_tensor_has_is_refused(
    tmp_path: Path, shape: list[float], message: str
) -> None:
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
    header = json.dumps({"a": tensor}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(BundleCorruptError, match=message):
        read_header(tmp_path / "x")


@pytest.mark.parametrize("offsets", [[0.0, 4.0], [False, 4], ["0", "4"], [None, 4], [0, math.nan]])
def test_offsets_that_are_not_integers_are_refused(tmp_path: Path, offsets: list[object]) -> None:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    header = json.dumps({"a": tensor}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(BundleCorruptError, match="data_offsets must be two integers; got "):
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
