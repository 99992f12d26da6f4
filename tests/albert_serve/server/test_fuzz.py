"""Thousands of hostile requests to a real process: none crashes it, hangs it or reveals secrets.

Most requests are valid HTTP with faults in their JSON, bytes, headers or path. The seed and the
number determine a request, and a failure prints the number. `make fuzz` sends 20,000 requests.
test_api_document.py sends requests that follow the API document.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from albert_serve.api.embeddings import OpenAIErrorReply
from albert_serve.api.schemas import ErrorReply
from albert_serve.api.zero_shot import ZERO_SHOT
from albert_serve.server.bentoml.http import MAX_HEAD_BYTES, MAX_IGNORED_BYTES
from albert_serve.server.openapi import EXAMPLES
from albert_serve.server.paths import DEFAULT_PATHS
from tests.albert_serve.support import MAX_BODY_BYTES, ROOT, RunningService, served

SEED = 20_260_101
NUM_THREADS = 8
# A reply takes milliseconds. After this time without one, the request hangs.
HANG_S = 10.0
# Limit of the growth of memory, which ends when each thread has processed its largest request.
MAX_GROWTH_BYTES = 250 << 20
BODIES = {DEFAULT_PATHS[name]: example for name, example in EXAMPLES.items() if name != ZERO_SHOT}
# Texts that replace a value in JSON.
VALUES = (
    *("null", "true", "-1", "1001", "1e308", "1e999", "NaN", "0x10", "'a'", "9" * 5000),
    *('""', '"[MASK]"', '"\\ud800"', '"\\u0000"', '"\\x41"', '"[MASK]' + "a" * 3000 + '"'),
    *('"%s"' % ("[MASK]" * 40), '"\ufdfa \u202e \ufeff e%s [MASK]"' % ("\u0301" * 300)),
    *('"../../../etc/passwd"', '"{{7*7}} ${jndi:ldap://localhost/a} <script>alert(1)</script>"'),
    *("[]", "{}", "[[]]", "[null]", '{"": ""}', '{"text": "a"}', '{"sentences": ["a", "b"]}'),
    *('{{"sentences": [{}]}}'.format(", ".join(['"a"'] * 257)), '{"__class__": "os.system"}'),
    *("[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 50_000),
)
NOISE = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\0", b"\xef\xbb\xbf", b"{}", b"]", b"\n\n")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
PATHS = (
    *("/", "/info", "/metrics", "/docs", "/docs.json", "/schema.json", "/web/app.js", "/v1/models"),
    *("/fill-mask/", "//fill-mask", "/FILL-MASK", "/v1/models/none/fill-mask", "/v1/models/%2e%2e"),
    *("/static_content/../../../etc/passwd", "/web/..%2f..%2fetc%2fpasswd", "/%2e%2e/etc/passwd"),
    *("/%00", "/%0a%0dSet-Cookie:a=b", "/%ff%fe", "/%ZZ", "/%", "/?a=b", "/" + "../" * 500),
)
HEADERS = (
    *("X-Request-ID: " + "a" * 129, "X-Request-ID: \x80\xff"),
    *("Authorization: Basic \xff", "Origin: null", "Accept: application/xml", "Cookie: a=b"),
    *("Content-Encoding: gzip", "Range: bytes=0-1,5-,-9", "Expect: 200-ok", "traceparent: ff-\xff"),
    *("X-Forwarded-For: 127.0.0.1, \xff", "X-HTTP-Method-Override: DELETE", "X: " + "b" * 3000),
    *("Content-Type: application/vnd.bentoml+pickle", "Content-Type: multipart/form-data"),
    *("Content-Type: application/json; charset=utf-16", "Content-Type: \xff\xfe"),
)
POST = b"POST /fill-mask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# Data that is not valid HTTP. The service can reply 400 without an envelope, or not reply.
BROKEN_HTTP = (
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 40, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"),
    *(b"GET /info\r\n\r\n", b"GET  /info  HTTP/1.1\r\n\r\n", b"BREW / HTTP/1.1\r\n\r\n"),
    *(b"GET /inf\0o HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/9.9\r\nHost: a\r\n\r\n"),
    *(b"GET * HTTP/1.1\r\n\r\n", b"GET /info HTTP/1.1\r\nX y: z\r\n\r\n", b"\r\n\r\r\n\n\r" * 9),
    (
        b"GET /info HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n\x81\x05hello"
    ),
    *(b"GET / HTTP/1.1\r\nX: " + b"a" * size + b"\r\n\r\n" for size in (70_000, 300_000)),
    *(
        POST + line + b"\r\n\r\n" + b'{"inputs": "[MASK]"}GET /info HTTP/1.1\r\n\r\n'
        for line in (
            *(b"Content-Length: -1", b"Content-Length: 0x10", b"Content-Length: 5, 5"),
            *(b"Content-Length: 9999999999999999999999", b"Content-Length:"),
            b"Content-Length: 5\r\nContent-Length: 20",
            b"Content-Length: 20\r\nTransfer-Encoding: chunked",
            *(b"Transfer-Encoding: xchunked", b"Transfer-Encoding : chunked"),
        )
    ),
    *(
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + size + b'\r\n{"inputs": "a"}\r\n0\r\n\r\n'
        for size in (b"zz", b"-5", b"0x5", b"ffffffffffffffffff", b"", b"7fffffff")
    ),
)


@pytest.fixture(scope="module")
def fuzzed(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with served(bundle_dir, tmp_path_factory.mktemp("fuzz")) as started:
        yield started


@pytest.fixture(scope="module")
def secrets(fuzzed: RunningService, bundle_dir: Path) -> list[bytes]:
    """Texts that no reply may contain: paths of this machine, and tracebacks."""
    folders = (str(ROOT), sys.prefix, str(bundle_dir), str(fuzzed.log_file.parent))
    return [*map(str.encode, folders), b"Traceback", b"site-packages", b'File "']


@pytest.mark.parametrize("num_requests", [800, pytest.param(20_000, marks=pytest.mark.slow)])
def test_no_request_breaks_the_service(
    num_requests: int, fuzzed: RunningService, secrets: list[bytes]
) -> None:
    expected, memory_before = reference_answers(fuzzed), memory_of(fuzzed)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for _ in threads.map(lambda number: attack(fuzzed, number, secrets), range(num_requests)):
            pass
    assert fuzzed.process.poll() is None, fuzzed.log[-4000:]
    assert reference_answers(fuzzed) == expected
    assert memory_of(fuzzed) - memory_before < MAX_GROWTH_BYTES
    assert "Traceback" not in fuzzed.log, fuzzed.log[fuzzed.log.index("Traceback") - 500 :][:4000]


@pytest.mark.parametrize("number", range(len(BROKEN_HTTP)))
def test_broken_http_is_rejected_or_ends_the_connection(
    number: int, fuzzed: RunningService, secrets: list[bytes]
) -> None:
    with connection_to(fuzzed) as connection:
        reply = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(BROKEN_HTTP[number])
            with contextlib.suppress(OSError):  # ENOTCONN if the service has already closed it
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                reply += part
    assert not reply or reply.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), reply[:500]
    assert not [secret for secret in secrets if secret in reply]
    assert httpx.get(f"{fuzzed.url}/health").status_code == 200
    assert "Traceback" not in fuzzed.log


def attack(running: RunningService, number: int, secrets: list[bytes]) -> None:
    """Send a hostile request and check the reply."""
    method, data = hostile_request(Random(f"{SEED}/{number}"))
    try:
        with connection_to(running) as connection:
            # The service may reject the request and close the connection before it has read it.
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            reply = http.client.HTTPResponse(connection, method=method)
            reply.begin()
            check_reply(reply, reply.read(), secrets, method)
    except ConnectionResetError:
        # The service answered without the body, and did not read all of it.
        assert len(data) > MAX_IGNORED_BYTES
    except (AssertionError, OSError, ValueError, http.client.HTTPException) as error:
        pytest.fail(f"{type(error).__name__}: {error}\nto request {number}:\n{data[:3000]!r}")


def hostile_request(random: Random) -> tuple[str, bytes]:
    """Return a method and the bytes of a request that is valid HTTP."""
    path = random.choice([*BODIES])
    body = _damage(random, _mutate(random, BODIES[path]).encode())
    method, headers = "POST", ["Content-Type: application/json"]
    if random.random() < 0.2:
        method, path = random.choice(METHODS), random.choice(PATHS)
    if random.random() < 0.3:
        headers += random.sample(HEADERS, 2)
    if random.random() < 0.05:
        body += b" " * random.choice([MAX_BODY_BYTES, 500_000])
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if random.random() < 0.1 and len(body) < MAX_HEAD_BYTES:
        size = random.choice([13, 1000])
        chunks = [body[start : start + size] for start in range(0, len(body), size)]
        body = b"".join(b"%x;a=b\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        lines.append("Transfer-Encoding: chunked")
        body += b"0\r\nX-Trailer: a\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body)}")
    return method, "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _mutate(random: Random, value: Any) -> str:
    """Return JSON in which one value is replaced, repeated or renamed."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        target = random.choice([*value])
        names = {target: random.choice([target] * 8 + ["model", "__proto__", ""])}
        pairs = [
            (names.get(name, name), _mutate(random, part) if name == target else json.dumps(part))
            for name, part in value.items()
        ]
        pairs += random.choice([[], [], pairs])
        return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in pairs) + "}"
    if isinstance(value, list) and value and random.random() < 0.6:
        index = random.randrange(len(value))
        parts = [json.dumps(part) for part in value]
        parts[index] = _mutate(random, value[index])
        return "[" + ", ".join(parts * random.choice([1, 1, 1, 33])) + "]"
    return random.choice(VALUES)


def _damage(random: Random, body: bytes) -> bytes:
    """Return the body, in a quarter of cases with noise, truncated or in another encoding."""
    offset = random.randrange(len(body) + 1)
    kind = random.randrange(12)
    if kind == 0:
        return body[:offset] + random.choice(NOISE) + body[offset:]
    if kind == 1:
        return body[:offset]
    if kind == 2:
        return body.decode().encode(random.choice(["utf-16", "utf-32", "utf-7"]), "replace")
    return body


def connection_to(running: RunningService) -> socket.socket:
    url = httpx.URL(running.url)
    assert url.port is not None
    return socket.create_connection((url.host, url.port), timeout=HANG_S)


def check_reply(
    reply: http.client.HTTPResponse, body: bytes, secrets: list[bytes], method: str
) -> None:
    """Check that the reply has no secret, and that an error has its envelope."""
    assert reply.status < 500, reply.status
    text = body + str(reply.headers).encode("utf-8", "replace")
    assert not [secret for secret in secrets if secret in text]
    assert "set-cookie" not in reply.headers
    request_id = reply.headers["X-Request-ID"]
    assert request_id
    if reply.status < 400 or method == "HEAD":
        return
    is_openai = isinstance(json.loads(body)["error"], dict)
    error: Any = (OpenAIErrorReply if is_openai else ErrorReply).model_validate_json(body)
    assert error.error
    assert error.request_id == request_id
    assert len(body) < 8_000, "the error repeats the request"


def reference_answers(running: RunningService) -> list[Any]:
    with httpx.Client(base_url=running.url, timeout=HANG_S) as client:
        tasks = [task["name"] for task in client.get("/info").json()["tasks"]]
        return [
            client.post(f"/{task}", json=EXAMPLES[task]).raise_for_status().json() for task in tasks
        ]


def memory_of(running: RunningService) -> int:
    """Return the memory of the service's processes, without the pages shared with files."""
    parent = psutil.Process(running.process.pid)
    infos = [process.memory_info() for process in [parent, *parent.children(recursive=True)]]
    return sum(info.rss - info.shared for info in infos)
