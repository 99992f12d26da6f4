"""Reader of TensorFlow's checkpoint files, `PREFIX.index` and `PREFIX.data-00000-of-00001`.

The index is a table of LevelDB's format
(https://github.com/google/leveldb/blob/main/doc/table_format.md) from names to the places of
tensors in the data files, as the messages of
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/protobuf/tensor_bundle.proto.
Checksums are not verified, as none are in a safetensors file: each place is checked to be in its
file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from training.model.checkpoint import CheckpointError

_MAGIC: Final = struct.pack("<Q", 0xDB4775248B80FB57)
_FOOTER_BYTES: Final = 48
# TensorFlow's numbers of the types that weights have.
_DTYPES: Final[dict[int, str]] = {1: "<f4", 2: "<f8", 19: "<f2"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Numbers of the fields of BundleHeaderProto and BundleEntryProto.
_NUM_SHARDS, _ENDIANNESS = 1, 2
_DTYPE, _SHAPE, _SHARD, _OFFSET, _SIZE, _SLICES = 1, 2, 3, 4, 5, 7


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """The place of a tensor.

    Attributes:
        dtype: TensorFlow's number of the type.
        shard: the number of its data file.
        offset: bytes from the beginning of that file.
    """

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    num_bytes: int


class TensorBundle:
    """A checkpoint of TensorFlow.

    Attributes:
        places: the place of each tensor by name.
    """

    def __init__(self, index: Path) -> None:
        """Read an index.

        Raises:
            CheckpointError: it is damaged, or no index.
        """
        self._index = index
        try:
            table = dict(_read_table(index.read_bytes()))
            if b"" not in table:
                raise ValueError("it has no header")
            header = dict(_fields(table.pop(b"")))
            self._num_shards = _number(header, _NUM_SHARDS)
            if _number(header, _ENDIANNESS):
                raise ValueError("its numbers are big-endian")
            self.places = {name.decode(): _place(value) for name, value in table.items()}
        except (OSError, ValueError, IndexError, struct.error) as error:
            raise CheckpointError(
                f"{index} cannot be read as the index of a TensorFlow checkpoint: {error}; "
                "is it complete?"
            ) from error

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor, memory-mapped.

        Raises:
            CheckpointError: its type is none of a weight, or the data file is missing or truncated.
        """
        place = self.places[name]
        if place.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self._index}: {name} has TensorFlow's type {place.dtype}; weights are fp32, "
                "fp64 or fp16"
            )
        dtype = np.dtype(_DTYPES[place.dtype])
        if math.prod(place.shape) * dtype.itemsize != place.num_bytes or not place.num_bytes:
            raise CheckpointError(
                f"{self._index} is damaged: {name} of shape {place.shape} has {place.num_bytes} "
                "bytes"
            )
        suffix = f".data-{place.shard:05}-of-{self._num_shards:05}"
        file = self._index.with_name(self._index.name.removesuffix(".index") + suffix)
        if not file.is_file():
            raise CheckpointError(f"{file} is not there; {self._index.name} names it")
        if place.offset + place.num_bytes > file.stat().st_size:
            raise CheckpointError(f"{file} is truncated: {name} is not in it; copy it again")
        return np.memmap(file, dtype, "r", place.offset, place.shape)


def _read_table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table."""
    footer = content[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or footer[-len(_MAGIC) :] != _MAGIC:
        raise ValueError("its end is not that of a table")
    _, position = _handle(footer, 0)  # of statistics
    index, _ = _handle(footer, position)
    for _, value in _read_block(content, *index):
        block, _ = _handle(value, 0)
        yield from _read_block(content, *block)


def _read_block(content: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of a block; each key shares its beginning with the one before."""
    if offset + size >= len(content):
        raise ValueError("a block is not in the file")
    if content[offset + size]:
        raise ValueError("it is compressed; TensorFlow writes no such index")
    block = content[offset : offset + size]
    (num_restarts,) = struct.unpack_from("<I", block, size - 4)
    end = size - 4 - 4 * num_restarts
    position, key = 0, b""
    while position < end:
        num_shared, position = _varint(block, position)
        num_own, position = _varint(block, position)
        num_value, position = _varint(block, position)
        if num_shared > len(key) or position + num_own + num_value > end:
            raise ValueError("an entry is longer than its block")
        key = key[:num_shared] + block[position : position + num_own]
        position += num_own
        yield key, block[position : position + num_value]
        position += num_value


def _handle(content: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Return a block's offset and size, and the position behind them."""
    offset, position = _varint(content, position)
    size, position = _varint(content, position)
    return (offset, size), position


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and the position behind it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("a number has more than 64 bits")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of a protocol buffer's fields."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if wire_type == _BYTES:
            num_bytes, position = _varint(message, position)
        elif wire_type in (_FIXED64, _FIXED32):
            num_bytes = 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"a message has a field of wire type {wire_type}")
        if position + num_bytes > len(message):
            raise ValueError("a message is cut off")
        yield number, message[position : position + num_bytes]
        position += num_bytes


def _number(fields: dict[int, Any], number: int) -> int:
    """Return a field that is a number; 0, which protocol buffers leave out, if it is missing."""
    value = fields.get(number, 0)
    if not isinstance(value, int):
        raise ValueError("a message has bytes in place of a number")
    return value


def _place(message: bytes) -> _Place:
    """Read a BundleEntryProto."""
    fields = dict(_fields(message))
    shape = fields.get(_SHAPE, b"")
    if _SLICES in fields:
        raise ValueError("a tensor is stored in slices, which cannot be read")
    if not isinstance(shape, bytes):
        raise ValueError("a message has a number in place of a shape")
    return _Place(
        dtype=_number(fields, _DTYPE),
        shape=_shape(shape),
        shard=_number(fields, _SHARD),
        offset=_number(fields, _OFFSET),
        num_bytes=_number(fields, _SIZE),
    )


def _shape(message: bytes) -> tuple[int, ...]:
    """Read a TensorShapeProto."""
    sizes: list[int] = []
    for number, dimension in _fields(message):
        if number != 2 or not isinstance(dimension, bytes):
            raise ValueError("a shape is unknown")
        sizes.append(_number(dict(_fields(dimension)), 1))
    return tuple(sizes)
