"""Requests that cost a service much: valid ones, refused ones, and broken HTTP, of any size.

Each kind has one size, from harmless to just past the largest that the service takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from string import ascii_lowercase
from typing import Any, Final

from benchmarks.harness.service import HOST

_WORDS: Final = "The run was scored in the first inning, and nobody saw it coming at all. "
_EXPANDING: Final = "\ufdfa"  # stands for 18 characters
_MARKS: Final = "\u0301\u0323\u0316"
_MAX_CACHED: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Requests of one form.

    Attributes:
        make: returns the bytes on the wire, by size.
        most: the largest size; the least is 1.
    """

    make: Callable[[int], bytes]
    most: int


@lru_cache(_MAX_CACHED)
def request_of(name: str, size: float) -> bytes:
    """Return the request of a kind.

    Args:
        size: from 0, the smallest, to 1, the largest, on a logarithmic scale.
    """
    kind = KINDS[name]
    return kind.make(max(1, round(kind.most**size)))


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}", "Content-Type: application/json", *headers]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}"])
    return f"{head}\r\n\r\n".encode() + body


def _json(path: str, inputs: Any, **parameters: Any) -> bytes:
    content = {"inputs": inputs, "parameters": parameters}
    return _post(path, json.dumps(content, ensure_ascii=False).encode())


def _repeat(text: str, num_chars: int) -> str:
    return (text * (num_chars // len(text) + 1))[:num_chars]


def _fill(inputs: Any, **parameters: Any) -> bytes:
    return _json("/fill-mask", inputs, **parameters)


def _classify(inputs: Any) -> bytes:
    return _json("/text-classification", inputs, truncation="truncate")


def _ask(inputs: Any, **parameters: Any) -> bytes:
    return _json("/question-answering", inputs, **parameters)


def _context(text: str) -> dict[str, str]:
    return {"question": "Who saw it?", "context": text}


def _sentences(num: int) -> dict[str, list[str]]:
    return {"sentences": [f"Run {i} was scored." for i in range(num)]}


def _numbered(num: int, end: str = "") -> list[str]:
    return [f"word{i}{end}" for i in range(num)]


def _words(num: int) -> list[str]:
    """Words that are the longest that tokenizers keep, and never the same."""
    chance = Random(num)
    return ["".join(chance.choices(ascii_lowercase, k=250)) for _ in range(num)]


def _chunked(chunks: bytes) -> bytes:
    head = f"POST /fill-mask HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks


def _get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n{headers}\r\n".encode()


def _inputs(value: bytes) -> bytes:
    return _post("/text-classification", b'{"inputs": %s}' % value)


_CHARS: Final = 1_000_001
_BYTES: Final = 4 << 20
_PIPELINED: Final = 30  # of those that the service takes at once

KINDS: Final[dict[str, Kind]] = {
    # Texts, refused or cut.
    "refused-text": Kind(make=lambda n: _fill(_repeat("a b ", n)), most=_CHARS),
    "refused-word": Kind(make=lambda n: _fill("a" * n), most=_CHARS),
    "cut-text": Kind(make=lambda n: _classify(_repeat(_WORDS, n)), most=_CHARS),
    "cut-letters": Kind(make=lambda n: _classify(_repeat("a b c d ", n)), most=_CHARS),
    "cut-word": Kind(make=lambda n: _classify("ab" * (n // 2 + 1)), most=_CHARS),
    "new-words": Kind(make=lambda n: _classify(" ".join(_words(n))), most=4000),
    "cut-blanks": Kind(make=lambda n: _classify("a" + " " * n), most=_CHARS),
    "expanding-text": Kind(make=lambda n: _classify(_EXPANDING * n), most=90_000),
    "marks": Kind(make=lambda n: _classify("e" + _repeat(_MARKS, n)), most=_CHARS),
    "unknown-characters": Kind(make=lambda n: _classify("\U0001f600" * n), most=_CHARS),
    "texts-below-long": Kind(make=lambda n: _classify(_repeat("a b ", n)), most=16_384),
    # Many items.
    "short-items": Kind(make=lambda n: _classify(["A run."] * n), most=1025),
    "cut-items": Kind(make=lambda n: _classify([_WORDS * 50] * n), most=300),
    "full-items": Kind(make=lambda n: _classify([_WORDS * 25] * n), most=300),
    "last-item-wrong": Kind(make=lambda n: _fill(["A [MASK]."] * n + ["none"]), most=1023),
    "pairs": Kind(
        make=lambda n: _json("/sentence-order", [{"text": "a", "text_pair": "b"}] * n), most=80_000
    ),
    "order-items": Kind(
        make=lambda n: _json("/sentence-order", [{"text": "a", "text_pair": "b"}] * n), most=1024
    ),
    # Masks and targets.
    "targets": Kind(make=lambda n: _fill("A [MASK].", targets=_numbered(n)), most=1001),
    "long-targets": Kind(
        make=lambda n: _fill("A [MASK].", targets=_numbered(n, "a" * 55)), most=1001
    ),
    "expanding-targets": Kind(
        make=lambda n: _fill("A [MASK].", targets=_numbered(n, _EXPANDING * 55)), most=1001
    ),
    "whole-targets": Kind(
        make=lambda n: _fill("A [MASK].", targets=_numbered(n), multi_token_targets=True),
        most=1001,
    ),
    "masks": Kind(make=lambda n: _fill("[MASK] " * n, top_k=100), most=500),
    "masked-items": Kind(make=lambda n: _fill(["A [MASK]."] * n, top_k=1000), most=1024),
    "joint": Kind(
        make=lambda n: _fill([_WORDS + "[MASK] " * 16] * n, joint=True, top_k=16), most=32
    ),
    # Questions.
    "context": Kind(make=lambda n: _ask(_context(_repeat(_WORDS, n))), most=_CHARS),
    "context-of-letters": Kind(make=lambda n: _ask(_context(_repeat("a b ", n))), most=_CHARS),
    "context-of-a-word": Kind(make=lambda n: _ask(_context("a" * n)), most=_CHARS),
    "expanding-context": Kind(make=lambda n: _ask(_context(_EXPANDING * n)), most=90_000),
    "long-answers": Kind(
        make=lambda n: _ask(_context(_repeat(_WORDS, n)), top_k=1000, max_answer_len=512),
        most=150_000,
    ),
    "compatible-answers": Kind(
        make=lambda n: _ask(
            _context(_repeat(_WORDS, n)), top_k=1000, max_answer_len=100, compat=True
        ),
        most=150_000,
    ),
    "question": Kind(
        make=lambda n: _ask(
            {"question": _repeat(_WORDS, n), "context": _WORDS}, truncation="truncate"
        ),
        most=_CHARS,
    ),
    "questions": Kind(make=lambda n: _ask([_context(_WORDS * 4)] * n, top_k=100), most=1024),
    # Sentences.
    "sentences": Kind(make=lambda n: _json("/sentence-order", [_sentences(256)] * n), most=64),
    "reordered": Kind(
        make=lambda n: _json("/sentence-order", [_sentences(32)] * n, reorder=True), most=16
    ),
    # JSON.
    "nested": Kind(make=lambda n: _inputs(b"[" * n), most=_BYTES - 100),
    "nested-objects": Kind(make=lambda n: _inputs(b'{"a":' * n), most=_BYTES // 5 - 100),
    "digits": Kind(make=lambda n: _inputs(b"1" * n), most=_BYTES - 100),
    "decimals": Kind(make=lambda n: _inputs(b"0." + b"1" * n), most=_BYTES - 100),
    "numbers": Kind(make=lambda n: _inputs(b"[%s1]" % (b"1," * n)), most=_BYTES // 2 - 100),
    "objects": Kind(make=lambda n: _inputs(b"[%s{}]" % (b"{}," * n)), most=_BYTES // 3 - 100),
    "item-objects": Kind(
        make=lambda n: _inputs(b"[%s{}]" % (b'{"text":"a"},' * n)), most=_BYTES // 13 - 100
    ),
    "names": Kind(
        make=lambda n: _post("/fill-mask", json.dumps(dict.fromkeys(_numbered(n), 0)).encode()),
        most=100_000,
    ),
    "parameter-names": Kind(
        make=lambda n: _fill("A [MASK].", **dict.fromkeys(_numbered(n), 0)), most=250_000
    ),
    "escapes": Kind(make=lambda n: _inputs(b'"%s"' % (rb"\u00e9" * n)), most=_BYTES // 6 - 100),
    "white-space": Kind(make=lambda n: _inputs(b" " * n + b'"a"'), most=_BYTES - 100),
    "cut-off": Kind(make=lambda n: _inputs(b'"' + b"a" * n), most=_BYTES - 100),
    "too-large": Kind(make=lambda n: _inputs(b'"%s"' % (b"a" * n)), most=32 << 20),
    # Heads, chunks and paths.
    "header": Kind(make=lambda n: _get("/info", f"X: {'a' * n}\r\n"), most=2 << 20),
    "headers": Kind(make=lambda n: _get("/info", "a:b\r\n" * n), most=500_000),
    "url": Kind(make=lambda n: _get("/" + "a" * n), most=2 << 20),
    "trailers": Kind(
        make=lambda n: _chunked(b"2\r\n{}\r\n0\r\n" + b"a:b\r\n" * n + b"\r\n"), most=500_000
    ),
    "extensions": Kind(
        make=lambda n: _chunked(b"2;%s\r\n{}\r\n0\r\n\r\n" % (b"a" * n)), most=2 << 20
    ),
    "chunks": Kind(make=lambda n: _chunked(b"1\r\na\r\n" * n + b"0\r\n\r\n"), most=500_000),
    "paths": Kind(make=lambda n: b"".join(_get(f"/{i}") for i in range(n)), most=20_000),
    "infos": Kind(make=lambda n: _get("/info") * n, most=_PIPELINED),
    "documents": Kind(make=lambda n: _get("/docs.json") * n, most=_PIPELINED),
    "schemas": Kind(make=lambda n: _get("/schema.json") * n, most=_PIPELINED),
    "metrics": Kind(make=lambda n: _get("/metrics") * n, most=_PIPELINED),
    "pages": Kind(make=lambda n: _get("/") * n, most=_PIPELINED),
    "small-requests": Kind(make=lambda n: _classify("A short run.") * n, most=_PIPELINED),
}
