"""Mixes of hostile requests: written, made by chance, changed a little, and sent."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeAlias

from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.service import HOST
from benchmarks.reliability.hostile import KINDS, request_of

MAX_STREAMS: Final = 6
MAX_CONNECTIONS: Final = 24
_MAX_OF_A_STREAM: Final = 16
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_GONE_AFTER_S: Final = 0.05
_DRIP_EVERY_S: Final = 0.05
_NUM_DRIPPED: Final = 20
_AGAIN_AFTER_S: Final = 0.01
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_WRITTEN: Final = re.compile(r"([a-z-]+)@([01]\.\d+)x(\d+)/([a-z]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One kind of request, again and again, over some connections.

    Attributes:
        kind: of `KINDS`.
        size: from 0 to 1.
        manner: of `MANNERS`.
    """

    kind: str
    size: float = 1.0
    num_connections: int = 4
    manner: str = "reads"

    def __str__(self) -> str:
        return f"{self.kind}@{self.size:.2f}x{self.num_connections}/{self.manner}"


Mix: TypeAlias = tuple[Stream, ...]


def write(mix: Mix) -> str:
    """Return a mix as text, which `read` reads."""
    return " ".join(map(str, mix))


def read(text: str) -> Mix:
    """Return a mix from its text: KIND@SIZExCONNECTIONS/MANNER, with blanks between streams.

    Raises:
        BenchmarkError: it is no mix.
    """
    streams = []
    for part in text.split():
        match = _WRITTEN.fullmatch(part)
        if match is None or match[1] not in KINDS or match[4] not in MANNERS:
            raise BenchmarkError(
                f"{part} is no stream; one is like cut-text@1.00x4/reads, of the kinds "
                f"{', '.join(KINDS)}, and the manners {', '.join(MANNERS)}"
            )
        streams.append(
            Stream(
                kind=match[1],
                size=float(match[2]),
                num_connections=int(match[3]),
                manner=match[4],
            )
        )
    return tuple(streams)


def random_mix(chance: Random) -> Mix:
    """Return a mix of one to some streams."""
    return _limited(_random_stream(chance) for _ in range(chance.choice([1, 1, 2, 3, MAX_STREAMS])))


def changed(mix: Mix, others: Sequence[Mix], chance: Random) -> Mix:
    """Return the mix with a change: of a stream, one less, one more, or some of another mix."""
    streams = list(mix)
    place = chance.randrange(len(streams))
    change = chance.randrange(6)
    if change == 0 and len(streams) > 1:
        del streams[place]
    elif change == 1:
        streams.insert(0, _random_stream(chance))
    elif change == 2:
        streams[:0] = chance.choice(others)[: MAX_STREAMS // 2]
    elif change == 3:
        streams[place] = replace(streams[place], manner=chance.choice(list(MANNERS)))
    elif change == 4:
        num = streams[place].num_connections + chance.choice([-4, -1, 1, 4, 8])
        streams[place] = replace(streams[place], num_connections=min(_MAX_OF_A_STREAM, max(1, num)))
    else:
        size = streams[place].size + chance.gauss(0, 0.1)
        streams[place] = replace(streams[place], size=round(min(1.0, max(0.0, size)), 2))
    return _limited(streams)


def _random_stream(chance: Random) -> Stream:
    return Stream(
        kind=chance.choice(list(KINDS)),
        size=round(chance.choice([1.0, chance.random() ** 0.5]), 2),
        num_connections=chance.choice([1, 2, 4, 8, _MAX_OF_A_STREAM]),
        manner=chance.choice(["reads", "reads", *MANNERS]),
    )


def _limited(streams: Iterable[Stream]) -> Mix:
    """Return the first streams, with no more connections than one caller is to have."""
    kept: list[Stream] = []
    for stream in streams:
        left = MAX_CONNECTIONS - sum(one.num_connections for one in kept)
        if left < 1 or len(kept) == MAX_STREAMS:
            break
        kept.append(replace(stream, num_connections=min(left, stream.num_connections)))
    return tuple(kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """The mix to send, its address and its duration."""

    mix: Mix
    port: int
    seconds: float


def send_mix(attack: Attack) -> int:
    """Send a mix in this process; return how many requests were sent."""
    for stream in attack.mix:
        request_of(stream.kind, stream.size)  # made before the time begins
    return asyncio.run(_send(attack))


async def _send(attack: Attack) -> int:
    ends_s = time.monotonic() + attack.seconds
    counts = [0]

    async def keep_sending(stream: Stream) -> None:
        request = request_of(stream.kind, stream.size)
        while time.monotonic() < ends_s:
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
                reader, writer = await asyncio.open_connection(HOST, attack.port)
                try:
                    await MANNERS[stream.manner](reader, writer, request, counts)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(_AGAIN_AFTER_S)

    async with asyncio.TaskGroup() as group:
        senders = [
            group.create_task(keep_sending(stream))
            for stream in attack.mix
            for _ in range(stream.num_connections)
        ]
        await asyncio.sleep(attack.seconds)
        for sender in senders:
            sender.cancel()
    return counts[0]


_Manner: TypeAlias = Callable[
    [asyncio.StreamReader, asyncio.StreamWriter, bytes, list[int]], Awaitable[None]
]


async def _reads(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, counts: list[int]
) -> None:
    """Ask, read the replies, and ask again, until the service closes the connection."""
    num_replies = max(1, request.count(b" HTTP/1.1\r\n"))
    while True:
        counts[0] += 1
        writer.write(request)
        for _ in range(num_replies):
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            await reader.readexactly(int(length[1]) if length else 0)


async def _leaves(
    _reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, counts: list[int]
) -> None:
    """Ask, and reset the connection before the reply."""
    counts[0] += 1
    writer.write(request)
    await writer.drain()
    await asyncio.sleep(_GONE_AFTER_S)
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)


async def _drips(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, counts: list[int]
) -> None:
    """Send all but the last bytes, and these one by one."""
    counts[0] += 1
    writer.write(request[:-_NUM_DRIPPED])
    for byte in request[-_NUM_DRIPPED:]:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(_DRIP_EVERY_S)
    await reader.readuntil(b"\r\n\r\n")


async def _deaf(
    _reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, counts: list[int]
) -> None:
    """Ask several times, and never read."""
    counts[0] += 1
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(request * (4 if len(request) < _LARGE else 1))
    await writer.drain()
    await asyncio.sleep(_DEAF_S)


_LARGE: Final = 1 << 20
_DEAF_S: Final = 2.0

MANNERS: Final[dict[str, _Manner]] = {
    "reads": _reads,
    "leaves": _leaves,
    "drips": _drips,
    "deaf": _deaf,
}
