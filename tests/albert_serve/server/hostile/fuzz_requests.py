"""Requests that nobody means well: valid ones with something wrong in them, and broken HTTP.

Request number n of a seed is always the same one, so that a failure can be sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeAlias

from albert_serve.api.embeddings import EMBEDDINGS_PATH
from albert_serve.api.examples import EMBEDDINGS_EXAMPLES, EXAMPLES, Example
from albert_serve.server.bentoml.http import MAX_HEAD_BYTES
from tests.albert_serve.server.hostile.fuzz_values import (
    HEADERS,
    MEDIA,
    METHODS,
    NAMES,
    PATHS,
    STRINGS,
    VALUES,
    Pairs,
    dump,
)

HOST: Final = b"Host: localhost\r\n"
JSON: Final = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hostile:
    """What is sent.

    Attributes:
        kind: which of the makers below made it.
        data: the bytes on the wire.
        is_http: whether it is HTTP by the rules; else a bare 400 or no reply will do.
        num_replies: how many replies it asks for.
        method: of its last request.
    """

    kind: str
    data: bytes
    is_http: bool = True
    num_replies: int = 1
    method: str = "POST"


_EXAMPLES: Final[dict[str, tuple[Example, ...]]] = {
    **{f"/{task}": examples for task, examples in EXAMPLES.items()},
    EMBEDDINGS_PATH: EMBEDDINGS_EXAMPLES,
}
_COMMON_METHODS: Final = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"}
)


def hostile_request(seed: int, number: int) -> Hostile:
    """Request `number` of those of a seed."""
    random = Random(f"{seed}/{number}")
    maker = random.choices([*_MAKERS], [*_MAKERS.values()])[0]
    return maker(random)


def _mutated(random: Random, body: Any) -> Any:
    """The value with one part of it changed."""
    if isinstance(body, dict | Pairs) and body and random.random() < 0.75:
        pairs = Pairs(body.items() if isinstance(body, dict) else body)
        place = random.randrange(len(pairs))
        name, value = pairs[place]
        pairs[place] = (name, _mutated(random, value))
        return pairs
    if isinstance(body, list) and body and random.random() < 0.6:
        place = random.randrange(len(body))
        return [*body[:place], _mutated(random, body[place]), *body[place + 1 :]]
    return random.choice(_CHANGES)(random, body)


def _replace(random: Random, _body: Any) -> Any:
    return random.choice(VALUES)


def _wrap(random: Random, body: Any) -> Any:
    return random.choice([[body], [[body]], {"inputs": body}, {"text": body}, [body] * 33])


def _insert(random: Random, body: Any) -> Any:
    if isinstance(body, str):
        place = random.randrange(len(body) + 1)
        return body[:place] + random.choice(STRINGS) + body[place:]
    if isinstance(body, dict | Pairs):
        pairs = Pairs(body.items() if isinstance(body, dict) else body)
        pairs.insert(random.randrange(len(pairs) + 1), (random.choice(NAMES), _value(random)))
        return pairs
    return body


def _twice(random: Random, body: Any) -> Any:
    if isinstance(body, dict | Pairs) and body:
        pairs = Pairs(body.items() if isinstance(body, dict) else body)
        return Pairs([*pairs, (random.choice(pairs)[0], _value(random))])
    return [body, body]


def _drop(random: Random, body: Any) -> Any:
    if isinstance(body, dict | Pairs) and body:
        pairs = Pairs(body.items() if isinstance(body, dict) else body)
        del pairs[random.randrange(len(pairs))]
        return pairs
    return body[: len(body) // 2] if isinstance(body, str | list) else None


def _any_text(random: Random, _body: Any) -> Any:
    ranges = [(0, 0x7F), (0x80, 0x24F), (0x300, 0x36F), (0x590, 0x1100), (0, 0x10FFFF)]
    low, high = random.choice(ranges)
    return "".join(chr(random.randint(low, high)) for _ in range(random.randrange(60))) + "[MASK]"


_Change: TypeAlias = Callable[[Random, Any], Any]
_CHANGES: Final[list[_Change]] = [_replace, _wrap, _insert, _twice, _drop, _any_text]


def _value(random: Random) -> Any:
    return random.choice(VALUES)


def _document(random: Random) -> tuple[str, str]:
    """A path and the text of a body."""
    path = random.choice([*_EXAMPLES])
    body: Any = random.choice(_EXAMPLES[path]).body
    for _ in range(random.choice([0, 1, 1, 2, 3, 6])):
        body = _mutated(random, body)
    return path, dump(body)


def _request(
    path: str,
    body: bytes | None,
    *headers: tuple[str, str],
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


def _encoded(random: Random, text: str) -> bytes:
    """The text in UTF-8 or as something that is not, whole or damaged."""
    plain = text.encode("utf-8", "surrogatepass")
    kind = random.randrange(14)
    if kind == 0:
        return b"\xef\xbb\xbf" + plain
    if kind == 1:
        codec = random.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7", "latin-1"])
        return text.encode(codec, "replace")
    if kind == 2:
        place = random.randrange(len(plain) + 1)
        noise = random.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5", b"\0", b"\x80"])
        return plain[:place] + noise + plain[place:]
    if kind == 3:
        return plain[: random.randrange(len(plain) + 1)]
    if kind == 4:
        return plain + random.choice([b"\0", b"{}", b",", b"]", b"\n\n", plain])
    if kind == 5:
        return random.randbytes(random.randrange(400))
    return plain


def _json(random: Random) -> Hostile:
    path, text = _document(random)
    body = _encoded(random, text)
    return Hostile(kind="json", data=_request(path, body, ("Content-Type", JSON)))


def _nested(random: Random) -> Hostile:
    path = f"/{random.choice([*EXAMPLES])}"
    opened = random.choice(["[", '{"inputs":', '{"inputs":[', '[{"a":', '"'])
    text = opened * random.choice([100, 1000, 50_000 // len(opened), 100_000])
    text = random.choice([text, '{"inputs": ' + text, text + "1", text.replace('"', '"\\"')])
    return Hostile(
        kind="nested", data=_request(path, text.encode()[:100_000], ("Content-Type", JSON))
    )


def _headers(random: Random) -> Hostile:
    path, text = _document(random)
    chosen = random.sample(HEADERS, random.choice([1, 2, 3, 8]))
    chosen.append(("Content-Type", JSON))
    # What asks for another protocol may be answered by it; that is `_upgrade`'s.
    if ("Connection", "keep-alive, Upgrade") in chosen:
        chosen = [one for one in chosen if one[0] != "Upgrade"]
    return Hostile(kind="headers", data=_request(path, text.encode(), *chosen))


def _media(random: Random) -> Hostile:
    path, text = _document(random)
    body = text.encode("utf-8", "surrogatepass")
    if random.random() < 0.3:
        body = random.choice(
            [
                b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94.",
                b"cos\nsystem\n(S'id'\ntR.",
                b'--x\r\nContent-Disposition: form-data; name="inputs"\r\n\r\na\r\n--x--\r\n',
                b"--x\r\n",
                b"inputs=a&parameters=%00",
                b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>',
                b"\x1f\x8b\x08\x00",
            ]
        )
    kinds = [("Content-Type", one) for one in random.sample(MEDIA, random.choice([1, 1, 1, 2]))]
    return Hostile(kind="media", data=_request(path, body, *kinds[: random.choice([0, 2, 2, 2])]))


def _route(random: Random) -> Hostile:
    method, path = random.choice(METHODS), random.choice(PATHS)
    body = random.choice([None, None, b"", b"{}", b'{"inputs": "[MASK]"}'])
    extra = random.sample(HEADERS, random.choice([0, 0, 1, 2]))
    extra = [one for one in extra if one[0] not in ("Upgrade", "Connection")]
    if random.random() < 0.5:
        extra.append(("Content-Type", JSON))
    data = _request(path, body, *extra, method=method)
    # Other methods, and forms of a target that only some have, are the parser's to judge.
    is_http = method in _COMMON_METHODS and path.startswith("/")
    return Hostile(kind="route", data=data, is_http=is_http, method=method)


def _chunked(random: Random) -> Hostile:
    path, text = _document(random)
    body = _encoded(random, text)
    if random.random() < 0.3:
        body += b" " * 70_000  # over the limit of the service that is tried
    size = random.choice([1, 7, 1000, 65_536])
    if size == 1:
        body = body[:500]
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    ended = random.choice(["0\r\n\r\n", "0\r\nX-Trailer: a\r\n\r\n", "000\r\n\r\n"]).encode()
    extension = random.choice([b"", b"", b";a=b"])
    wire = b"".join(b"%x%s\r\n%s\r\n" % (len(one), extension, one) for one in chunks) + ended
    head = _request(path, None, ("Content-Type", JSON), ("Transfer-Encoding", "chunked"))
    # Of what surrounds chunks only so much is read.
    is_http = len(wire) - len(body) < MAX_HEAD_BYTES
    return Hostile(kind="chunked", data=head + wire, is_http=is_http)


def _large(random: Random) -> Hostile:
    path, text = _document(random)
    body = text.encode("utf-8", "surrogatepass") + b" " * random.choice([59_000, 60_001, 500_000])
    extra = random.choice([(), (("Expect", "100-continue"),)])
    return Hostile(kind="large", data=_request(path, body, ("Content-Type", JSON), *extra))


def _old(random: Random) -> Hostile:
    path, text = _document(random)
    body = text.encode("utf-8", "surrogatepass")
    data = _request(path, body, ("Content-Type", JSON), version="1.0")
    return Hostile(kind="http/1.0", data=data)


def _pipelined(random: Random) -> Hostile:
    num_requests = random.choice([2, 3, 5])
    parts = []
    for _ in range(num_requests):
        path, text = _document(random)
        parts.append(_request(path, text.encode(), ("Content-Type", JSON)))
    return Hostile(kind="pipelined", data=b"".join(parts), num_replies=num_requests)


def _lengths(random: Random) -> Hostile:
    """Bodies that are not as long as they are said to be, and what smuggles a second request."""
    path, text = _document(random)
    body = text.encode()
    lengths = random.choice(
        [
            [f"Content-Length: {len(body) + 5}"],
            [f"Content-Length: {max(0, len(body) - 5)}"],
            ["Content-Length: -1"],
            ["Content-Length: +5"],
            ["Content-Length: 0x10"],
            ["Content-Length: 5, 5"],
            ["Content-Length: 99999999999999999999999"],
            ["Content-Length: 4000000000"],
            ["Content-Length:"],
            ["Content-Length: 5", f"Content-Length: {len(body)}"],
            [f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"],
            ["Content-Length: 4", "Transfer-Encoding: chunked"],
            ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
            ["Transfer-Encoding: xchunked"],
            ["Transfer-Encoding : chunked"],
            ["Transfer-Encoding: chunked, gzip"],
            [" Transfer-Encoding: chunked"],
        ]
    )
    hidden = random.choice([b"", b"GET /info HTTP/1.1\r\n" + HOST + b"\r\n"])
    if any("hunked" in line for line in lengths) and random.random() < 0.7:
        bad = [b"zz", b"-5", b"0x5", b"ffffffffffffffffff", b"5 ", b"", b"5\n", b"7fffffff"]
        size = random.choice([b"%x" % len(body), *bad])
        body = size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lengths]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode()
    return Hostile(kind="lengths", data=head + body + hidden, is_http=False)


def _upgrade(random: Random) -> Hostile:
    headers = [
        ("Connection", "Upgrade"),
        ("Upgrade", random.choice(["websocket", "h2c", "TLS/1.0", "\xff"])),
        ("Sec-WebSocket-Key", random.choice(["dGhlIHNhbXBsZSBub25jZQ==", "x", ""])),
        ("Sec-WebSocket-Version", random.choice(["13", "99", ""])),
    ]
    path = random.choice([*PATHS[:10], "/x"])
    data = _request(path, None, *headers, method=random.choice(["GET", "POST"]))
    noise = random.choice([b"", b"\x81\x05hello", random.randbytes(50)])
    return Hostile(kind="upgrade", data=data + noise, is_http=False, method="GET")


def _bomb(random: Random) -> Hostile:
    """Heads that are too large, or too many."""
    lines = random.choice(
        [
            "".join(f"X-{i}: a\r\n" for i in range(random.choice([90, 150, 3000]))),
            f"X-Long: {'a' * random.choice([10_000, 70_000, 300_000])}\r\n",
            "A:\r\n" * 10_000,
            "X: a\r\n b\r\n\tc\r\n",
        ]
    )
    path = "/" + "a" * random.choice([0, 0, 70_000, 300_000])
    data = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()
    return Hostile(kind="bomb", data=data, is_http=False, method="GET")


def _garbage(random: Random) -> Hostile:
    path, text = _document(random)
    good = _request(path, text.encode(), ("Content-Type", JSON))
    kind = random.randrange(6)
    if kind == 0:
        data = random.randbytes(random.randrange(1, 3000))
    elif kind == 1:
        data = good[: random.randrange(len(good))]
    elif kind == 2:
        place = random.randrange(min(120, len(good)))
        data = good[:place] + random.randbytes(random.randrange(1, 8)) + good[place + 1 :]
    elif kind == 3:
        data = good.replace(b"\r\n", random.choice([b"\n", b"\r", b"\r\r\n", b"\n\r"]))
    elif kind == 4:
        data = good.replace(b"HTTP/1.1", random.choice([b"HTTP/9.9", b"HTTP/1.", b"HTTP/2", b""]))
    else:
        data = random.choice(
            [
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 40,
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(200),
                b"GET /info HTTP/1.1\r\n\r\n",
                b"GET /info HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                b"GET /info\r\n\r\n",
                b"\r\n\r\n\r\n" + good,
                b"GET  /info  HTTP/1.1\r\nHost: a\r\n\r\n",
                b"GET /inf\0o HTTP/1.1\r\nHost: a\r\n\r\n",
                b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
                b"GET /info HTTP/1.1\r\nHost: a\r\nX-Request-ID: a\0b\r\n\r\n",
                b"GET /info HTTP/1.1\r\nHost: a\r\nX y: z\r\n\r\n",
            ]
        )
    return Hostile(kind="garbage", data=data, is_http=False)


_MAKERS: Final[dict[Callable[[Random], Hostile], int]] = {
    _json: 40,
    _nested: 2,
    _headers: 8,
    _media: 8,
    _route: 16,
    _chunked: 6,
    _large: 2,
    _old: 2,
    _pipelined: 2,
    _lengths: 5,
    _upgrade: 2,
    _bomb: 2,
    _garbage: 5,
}
