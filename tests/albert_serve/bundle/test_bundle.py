"""Damaged bundles and weight files are rejected with an error that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from albert_serve.bundle.manifest import Bundle, Verification, file_entry
from albert_serve.bundle.weights import StoredTensor, check_shapes, read_header
from albert_serve.errors import BundleCorruptError, BundleError, BundleMissingError

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(bundle_dir: Path, tmp_path: Path) -> Path:
    """A copy of a bundle, to be damaged."""
    return Path(shutil.copytree(bundle_dir, tmp_path / "bundle"))


@pytest.mark.parametrize("verify", ["hash", "size"])
@pytest.mark.parametrize("name", ["model.safetensors", "encoder.onnx"])
def test_a_missing_changed_or_truncated_file_is_an_error_that_names_it(
    folder: Path, name: str, verify: Verification
) -> None:
    """Only `verify="hash"` detects a change that keeps the size."""
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if verify == "size":
        Bundle.open(folder, verify="size")
    else:
        sha256 = file_entry(folder / name).sha256
        with pytest.raises(BundleCorruptError, match=f"{name} has SHA-256 {sha256}; the manifest"):
            Bundle.open(folder)
    (folder / name).write_bytes(content[:-1])
    message = f"{name} has {len(content) - 1} bytes; the manifest says {len(content)}"
    with pytest.raises(BundleCorruptError, match=message):
        Bundle.open(folder, verify=verify)
    (folder / name).unlink()
    with pytest.raises(BundleMissingError, match=f"{name} does not exist"):
        Bundle.open(folder, verify=verify)


ENTRY = {"sha256": "0" * 64, "size": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"].update({"../outside": ENTRY}), "match pattern"),
        (lambda m: m["files"].update({"/etc/passwd": ENTRY}), "match pattern"),
        (lambda m: m["heads"]["fill-mask"].update(graph="../fill-mask.onnx"), "match pattern"),
        (lambda m: m["files"].pop("encoder.onnx"), "file encoder.onnx"),
        (lambda m: m.pop("config"), "config: Field required"),
        (lambda m: m["config"].update(model_type="bert"), "only 'albert'"),
        (lambda m: m["config"].update(embedding_size=31), r"shape \(1000, 32\); .* \(1000, 31\)"),
        (lambda m: m["heads"]["sentence-order"].update(labels=["a"]), "1 labels for 2 outputs"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_the_weights_is_rejected(
    folder: Path, change: Change, message: str
) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorruptError, match=message):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "is not JSON") for content in (b"", b"{", b"\xff")),
        *((content, "has format version None") for content in (b"[]", b"{}")),
        (b'{"format_version": 1}', r"has format version 1; .* 2 and 3\."),
        (b'{"format_version": 4}', r"has format version 4; .* 2 and 3\."),
    ],
)
def test_a_manifest_that_is_not_an_object_of_a_supported_version_is_rejected(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match=rf"manifest\.json {message}") as caught:
        Bundle.open(tmp_path)
    assert "\n" not in str(caught.value)


def header_of(tensor: Mapping[str, object], num_bytes: int = 4) -> bytes:
    """Return the content of a safetensors file with one tensor."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **tensor}
    header = json.dumps({"a": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00" * 7, "7 bytes"),
        ((16 << 20).to_bytes(8, "little"), "8 bytes"),
        (((16 << 20) + 1).to_bytes(8, "little"), "16777217 bytes"),
        (b"\x02" + b"\x00" * 7 + b"{]", "header"),
        (header_of({}, num_bytes=3), "bytes"),
        (header_of({}, num_bytes=5), "bytes"),
        (header_of({"shape": [2]}), "bytes 0 to 4"),
        (header_of({"data_offsets": [-4, 0]}), "bytes -4 to 0"),
        (header_of({"dtype": "F9"}), "F9"),
        (header_of({"shape": [-1, -1]}), "size"),
        (header_of({"shape": [1] * 9}), "9 dimensions; at most 8 "),
        (header_of({"data_offsets": [0, "4"]}), "two integers"),
    ],
)
def test_damaged_safetensors_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(header_of({"shape": [1] * 8}))
    assert read_header(tmp_path / "x").keys() == {"a"}
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BundleCorruptError, match=rf"x is damaged: .*{message}"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    ("stored", "expected", "message"),
    [
        ({"w": ("F32", (2,))}, (2,), None),
        ({"w": ("F16", (2, 3))}, (2, 3), None),
        ({"w": ("BF16", (2, 3))}, (2, 3), "w is BF16"),
        ({"w": ("I8", (3, 2)), "w_scale": ("F32", (2,))}, (2, 3), None),
        ({"w": ("I8", (2, 3)), "w_scale": ("F32", (2,))}, (2, 3), r"w has shape \(2, 3\)"),
        ({"w": ("I8", (3, 2))}, (2, 3), "w_scale"),
    ],
)
def test_weights_with_unsupported_types_or_shapes_are_rejected(
    stored: dict[str, tuple[str, tuple[int, ...]]], expected: tuple[int, ...], message: str | None
) -> None:
    tensors = {
        name: StoredTensor(dtype=dtype, shape=shape, offset=0, num_bytes=0)
        for name, (dtype, shape) in stored.items()
    }
    if message is None:
        check_shapes(tensors, {"w": expected})
        return
    with pytest.raises(BundleCorruptError, match=message):
        check_shapes(tensors, {"w": expected})
