"""Reader of TensorFlow's checkpoint files, `PREFIX.index` and `PREFIX.data-00000-of-00001`.

The index is a table in LevelDB's format
(https://github.com/google/leveldb/blob/main/doc/table_format.md), which maps names to the ranges of
tensors in the data files. Its values are messages that are defined in
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/protobuf/tensor_bundle.proto.
Checksums are not verified, but every range is checked to be within its file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from training.model.checkpoint import CheckpointError

_MAGIC: Final = struct.pack("<Q", 0xDB4775248B80FB57)
_FOOTER_BYTES: Final = 48
# NumPy's dtypes of weights, by TensorFlow's type number.
_DTYPES: Final[dict[int, str]] = {1: "<f4", 2: "<f8", 19: "<f2"}
# Fields of BundleHeaderProto and BundleEntryProto that this module reads.
_PROTOCOL: Final = """
name: "tensor_bundle.proto" syntax: "proto3"
message_type { name: "Header"
  field { name: "num_shards" number: 1 type: TYPE_INT32 }
  field { name: "endianness" number: 2 type: TYPE_INT32 } }
message_type { name: "Dimension" field { name: "size" number: 1 type: TYPE_INT64 } }
message_type { name: "Shape"
  field { name: "dim" number: 2 type: TYPE_MESSAGE type_name: "Dimension" label: LABEL_REPEATED } }
message_type { name: "Entry"
  field { name: "dtype" number: 1 type: TYPE_INT32 }
  field { name: "shape" number: 2 type: TYPE_MESSAGE type_name: "Shape" }
  field { name: "shard" number: 3 type: TYPE_INT32 }
  field { name: "offset" number: 4 type: TYPE_INT64 }
  field { name: "num_bytes" number: 5 type: TYPE_INT64 }
  field { name: "slices" number: 7 type: TYPE_BYTES label: LABEL_REPEATED } }
"""


class TensorBundle:
    """A TensorFlow checkpoint, whose tensors `read` maps from its data files.

    Attributes:
        entries: entry of each tensor in the index, by name.
    """

    def __init__(self, index: Path) -> None:
        """Read an index."""
        self._index = index
        try:
            table = dict(_read_table(index.read_bytes()))
            if b"" not in table:
                raise ValueError("the header is missing")
            header = _parse("Header", table.pop(b""))
            if header.endianness:
                raise ValueError("big-endian numbers are not supported")
            self._num_shards = header.num_shards
            self.entries = {name.decode(): _parse("Entry", value) for name, value in table.items()}
        except (OSError, ValueError, IndexError, struct.error, DecodeError) as error:
            raise CheckpointError(
                f"{index} is not an intact index of a TensorFlow checkpoint: {error}. "
                "Copy the file again."
            ) from error

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in its own shape, memory-mapped."""
        entry = self.entries[name]
        if entry.dtype not in _DTYPES or entry.slices:
            raise CheckpointError(
                f"{self._index}: {name} has TensorFlow's type {entry.dtype} or is sliced. "
                "Save it as fp32, fp64 or fp16, in one slice."
            )
        dtype, shape = np.dtype(_DTYPES[entry.dtype]), tuple(dim.size for dim in entry.shape.dim)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes != entry.num_bytes or num_bytes <= 0 or entry.offset < 0:
            raise CheckpointError(
                f"{self._index} is damaged: {name} has shape {shape}. Copy the file again."
            )
        suffix = f".data-{entry.shard:05}-of-{self._num_shards:05}"
        file = self._index.with_name(self._index.name.removesuffix(".index") + suffix)
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist, but {self._index.name} lists it.")
        if entry.offset + num_bytes > file.stat().st_size:
            raise CheckpointError(f"{file} ends before {name}. Copy the file again.")
        return np.memmap(file, dtype, "r", entry.offset, shape)


@cache
def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    pool.Add(text_format.Parse(_PROTOCOL, FileDescriptorProto()))
    return pool


def _parse(message: str, content: bytes) -> Any:
    """Parse a message of `_PROTOCOL`."""
    return GetMessageClass(_pool().FindMessageTypeByName(message)).FromString(content)


def _read_table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table."""
    footer = content[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or footer[-len(_MAGIC) :] != _MAGIC:
        raise ValueError("the table's footer is missing")
    _, _, position = _handle(footer, 0)  # the block of statistics is not needed
    offset, size, _ = _handle(footer, position)
    for _, value in _read_block(content, offset, size):
        offset, size, _ = _handle(value, 0)
        yield from _read_block(content, offset, size)


def _read_block(content: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of a block, whose keys store only differences from the previous key."""
    if content[offset + size]:
        raise ValueError("compressed blocks are not supported")
    block = content[offset : offset + size]
    (num_restarts,) = struct.unpack_from("<I", block, size - 4)
    end = size - 4 - 4 * num_restarts
    position, key = 0, b""
    while position < end:
        num_shared, position = _varint(block, position)
        num_added, position = _varint(block, position)
        num_value, position = _varint(block, position)
        key = key[:num_shared] + block[position : position + num_added]
        position += num_added
        yield key, block[position : position + num_value]
        position += num_value


def _handle(content: bytes, position: int) -> tuple[int, int, int]:
    """Return a block's offset and size, and the position after them."""
    offset, position = _varint(content, position)
    size, position = _varint(content, position)
    return offset, size, position


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return a number that is stored in 7 bits per byte, and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("a number has more than 64 bits")
