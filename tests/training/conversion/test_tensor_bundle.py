"""Indices of TensorFlow's checkpoints that were made to be harmful end in an error at once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from training.conversion.tensor_bundle import TensorBundle
from training.model.checkpoint import CheckpointError

Entry = tuple[bytes, bytes]  # a name, and where its tensor is
HEADER: Final = (b"", b"\x08\x01")  # one data file
MAGIC: Final = struct.pack("<Q", 0xDB4775248B80FB57)


def varint(number: int) -> bytes:
    content = b""
    while number > 0x7F:
        content += bytes([number & 0x7F | 0x80])
        number >>= 7
    return content + bytes([number])


def message(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(name: str, shape: Sequence[int], num_bytes: int, offset: int = 0) -> Entry:
    """The entry of an fp32 tensor."""
    sizes = b"".join(message(2, b"\x08" + varint(size)) for size in shape)
    place = b"\x20" + varint(offset) + b"\x28" + varint(num_bytes)
    return name.encode(), b"\x08\x01" + message(2, sizes) + place


def block(entries: Sequence[Entry]) -> bytes:
    """Entries whose names share nothing, without restarts, and the mark of no compression."""
    lengths = ((varint(len(name)) + varint(len(value))) for name, value in entries)
    parts = zip(lengths, entries, strict=True)
    content = b"".join(b"\0" + sizes + name + value for sizes, (name, value) in parts)
    return content + struct.pack("<I", 0) + b"\0"


def table(entries: Sequence[Entry], times: int = 1) -> bytes:
    """An index whose entries are in one block, which it names so many times."""
    content = block([HEADER, *entries])
    handle = varint(0) + varint(len(content) - 1)
    top = block([(b"z", handle)] * times)
    footer = varint(0) * 2 + varint(len(content)) + varint(len(top) - 1)
    return content + top + footer.ljust(40, b"\0") + MAGIC


def open_index(folder: Path, content: bytes) -> TensorBundle:
    file = folder / "model.index"
    file.write_bytes(content)
    (folder / "model.data-00000-of-00001").write_bytes(np.arange(6, dtype=np.float32).tobytes())
    return TensorBundle(file)


def test_a_sound_index_is_read(tmp_path: Path) -> None:
    """Which shows that those below are refused for the one thing that is wrong with them."""
    entries = [tensor("a", (2, 2), 16), tensor("b", (2,), 8, offset=16)]
    bundle = open_index(tmp_path, table(entries))
    np.testing.assert_array_equal(bundle.read("a"), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(bundle.read("b"), [4, 5])


HARMFUL: Final[dict[str, tuple[bytes, str]]] = {
    "more dimensions than numpy has": (
        table([tensor("a", (1,) * 65, 4)]),
        "a shape has more than 8 dimensions",
    ),
    "a product of a million digits": (
        table([tensor("a", (2**63,) * 50_000, 4)]),
        "a shape has more than 8 dimensions",
    ),
    "a long name": (
        table([tensor("a" * 2000, (4,), 16)]),
        "a name has more than 1024 bytes",
    ),
    "the same bytes many times": (
        table([tensor(f"a{number}", (4,), 16) for number in range(100)]),
        "a1 overlaps another tensor",
    ),
    "the same block many times": (
        table([tensor("a", (4,), 16)], times=100),
        "its blocks are larger than the file",
    ),
    "a large index": (
        table([tensor(f"a{number}", (4,), 16, 16 * number) for number in range(50_000)]),
        "1048576",
    ),
}


@pytest.mark.parametrize(("content", "text"), HARMFUL.values(), ids=HARMFUL)
def test_harmful_indices_are_refused(tmp_path: Path, content: bytes, text: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot be read as the index .*{text}"):
        open_index(tmp_path, content)


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [((2**62, 4), 16), ((2**63, 2**63), 24), ((0, 2**63), 0), ((5,), 16)],
)
def test_a_shape_that_does_not_fit_its_bytes(
    tmp_path: Path, shape: tuple[int, ...], num_bytes: int
) -> None:
    bundle = open_index(tmp_path, table([tensor("a", shape, num_bytes)]))
    with pytest.raises(CheckpointError, match=r"is damaged: a of shape .* has \d+ bytes"):
        bundle.read("a")


def test_a_tensor_past_the_end_of_the_file(tmp_path: Path) -> None:
    bundle = open_index(tmp_path, table([tensor("a", (2**60,), 2**62, offset=2**63)]))
    with pytest.raises(CheckpointError, match="is truncated: a is not in it"):
        bundle.read("a")
