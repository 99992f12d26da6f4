"""Who may call: keys, guarded surfaces, other origins, and names of hosts."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import ASGIApp

from albert_serve.api.schemas import ErrorReply
from albert_serve.errors import ConfigError
from albert_serve.server.auth import MIN_KEY_CHARS, AllowedHosts, ApiKeyMiddleware, read_keys
from albert_serve.server.paths import OTHER, parse
from tests.albert_serve.support import MAX_BODY_BYTES, Running, served, wait_until_logged

KEY = "first-key-0123456789"
FILE_KEY = "file-key-0123456789=="
ORIGIN = "https://app.example.com"
MASKED = {"inputs": "The [MASK] run."}
HEALTH = ("/health", "/healthz", "/livez", "/readyz")
HOSTS = ("app.example.com", "*.internal", "192.0.2.1", "[2001:db8::1]")
GUARDED = (
    "/info",
    "/metrics",
    "/docs",
    "/docs.json",
    "/openapi.json",
    "/schema.json",
    "/static_content/swagger-ui.css",
    "/nothing-here",
)


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(f"# for tests\n\n{FILE_KEY}\n")
    return file


@pytest.fixture(scope="module")
def guarded(
    bundle_dir: Path, keys_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A service with keys, a file of keys, and an origin that may call it."""
    with served(
        bundle_dir,
        tmp_path_factory.mktemp("guarded"),
        API_KEYS=f"{KEY}, other-key-0123456789",
        API_KEYS_FILE=str(keys_file),
        CORS_ORIGINS=ORIGIN,
    ) as started:
        yield started


@pytest.fixture(scope="module")
def stranger(guarded: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=30) as http:
        yield http


def test_without_a_key_only_health_is_open(stranger: httpx.Client) -> None:
    for path in HEALTH:
        assert stranger.get(path).status_code == 200, path
    for path in GUARDED:
        assert_unauthorized(stranger.get(path))
    assert_unauthorized(stranger.post("/fill-mask", json=MASKED))
    for path in ("/v1/embeddings", "/v1/models/tiny/embeddings"):
        assert stranger.post(path, json=MASKED).status_code == 401, path


@pytest.mark.parametrize(
    "header",
    [
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY},other-key-0123456789",
        "Bearer " + "é" * 20,
        "Bearer # for tests",
    ],
)
def test_a_wrong_key_is_refused_and_not_repeated(stranger: httpx.Client, header: str) -> None:
    raw = [(b"authorization", header.encode("latin-1"))]
    reply = stranger.get("/info", headers=raw)
    assert_unauthorized(reply)
    assert 'error="invalid_token"' in reply.headers["WWW-Authenticate"]
    assert KEY not in reply.text


@pytest.mark.parametrize("key", [KEY, "other-key-0123456789", FILE_KEY])
def test_each_key_opens_everything(stranger: httpx.Client, key: str) -> None:
    headers = {"Authorization": f"bearer {key}"}  # the scheme in any case
    assert stranger.post("/fill-mask", json=MASKED, headers=headers).status_code == 200
    for path in GUARDED:
        expected = 404 if path == "/nothing-here" else 200
        assert stranger.get(path, headers=headers).status_code == expected, path
    assert stranger.get("/info", headers=headers).json()["needs_key"] is True


def test_no_key_is_in_the_log(guarded: Running, stranger: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-ID": "no-key"}
    assert stranger.get("/info", headers=headers).status_code == 200
    wait_until_logged(guarded, "no-key")
    for key in (KEY, FILE_KEY):
        assert key not in guarded.log


def test_a_body_without_a_key_is_refused_before_it_is_read(stranger: httpx.Client) -> None:
    num_chunks = 0

    def chunks() -> Iterator[bytes]:
        nonlocal num_chunks
        while num_chunks < 1000:
            num_chunks += 1
            yield b" " * MAX_BODY_BYTES

    try:
        assert_unauthorized(stranger.post("/fill-mask", content=chunks()))
    except httpx.WriteError:  # the server has closed the connection meanwhile
        assert num_chunks < 1000


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("GET", "/health", "", 200),
        ("POST", "/fill-mask", "", 401),
        ("GET", "/nothing", "", 401),
        ("GET", "/nothing", KEY, 404),
        ("GET", "/fill-mask", KEY, 405),
        ("POST", "/fill-mask", KEY, 422),
    ],
)
def test_pages_of_the_origin_can_read_every_reply(
    stranger: httpx.Client, method: str, path: str, key: str, status: int
) -> None:
    headers = {"Origin": ORIGIN} | ({"Authorization": f"Bearer {key}"} if key else {})
    reply = stranger.request(method, path, headers=headers, json={} if method == "POST" else None)
    assert reply.status_code == status
    assert reply.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "X-Request-ID" in reply.headers["Access-Control-Expose-Headers"]
    assert "Origin" in reply.headers["Vary"]
    if status >= 400:
        assert ErrorReply.model_validate_json(reply.content).error


def test_preflight_passes_without_a_key_for_the_origin_alone(
    stranger: httpx.Client, client: httpx.Client
) -> None:
    def preflight(http: httpx.Client, origin: str) -> httpx.Response:
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-request-id",
        }
        return http.options("/fill-mask", headers=headers)

    allowed = preflight(stranger, ORIGIN)
    assert allowed.status_code == 200
    assert allowed.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "Authorization" in allowed.headers["Access-Control-Allow-Headers"]
    assert "Access-Control-Allow-Credentials" not in allowed.headers
    refused = preflight(stranger, "https://elsewhere.example.com")
    assert refused.status_code == 400
    without_setting = client.get("/health", headers={"Origin": ORIGIN})
    for reply in (refused, preflight(client, ORIGIN), without_setting):
        assert "Access-Control-Allow-Origin" not in reply.headers


def test_pickles_are_taken_nowhere(client: httpx.Client) -> None:
    content = pickle.dumps(MASKED)
    documented = client.get("/docs.json").json()["paths"]
    for path in {*documented, *GUARDED, *HEALTH, "/__metadata__", "/is_ready"}:
        for media in ("application/vnd.bentoml+pickle", "application/pickle"):
            headers = {"Content-Type": media, "Payload-Container": "DefaultContainer"}
            reply = client.post(path, content=content, headers=headers)
            assert reply.status_code in (404, 405, 415), path
    assert client.post("/fill-mask", content=content, headers=headers).status_code == 415


def test_metrics_have_one_label_for_all_paths_that_there_are_not(client: httpx.Client) -> None:
    for number in range(20):
        assert client.get(f"/made-up-{number}").status_code == 404
        assert client.get(f"/web/made-up-{number}.js").status_code == 404
    metrics = client.get("/metrics").text
    assert "made-up" not in metrics
    assert f'endpoint="{OTHER}",http_response_code="404"' in metrics
    error = client.get("/made-up-1").json()["error"]
    assert error.startswith("there is nothing at /made-up-1.")


@given(st.text())
def test_every_path_has_a_guarded_surface_but_health_and_the_page(path: str) -> None:
    is_page = path == "/" or path.startswith("/web/")
    assert (parse(path).surface is None) == (path in HEALTH or is_page)
    label = parse(path).label
    assert parse(label).label == label


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "contains no key"),
        (b"# nothing\n\n", "contains no key"),
        (b"short-secret\n", f"key 1 has 12 characters; it must have {MIN_KEY_CHARS} or more"),
        (b"a-good-key-0123456789\nwith some spaces in it\n", "key 2 contains invalid char"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"#" * ((1 << 20) + 1), "has more than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_is_told_without_its_keys(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_keys([], file)
    assert message in str(caught.value)
    assert "short-secret" not in str(caught.value)
    assert "with some" not in str(caught.value)


def test_a_pipe_or_a_device_of_keys_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_keys([], file)


def get(app: ASGIApp, path: str, **headers: str) -> int:
    """Return the status of an application's reply."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            return await http.get(f"http://here{path}", headers=headers)

    return asyncio.run(send()).status_code


@pytest.mark.parametrize(
    ("path", "status"),
    [("/metrics", 401), ("/info", 200), ("/docs", 200), ("/", 200), ("/fill-mask", 200)],
)
def test_only_what_the_guard_names_needs_a_key(path: str, status: int) -> None:
    app = ApiKeyMiddleware(Response(), hashes=read_keys([KEY], None), surfaces=["metrics"])
    assert get(app, path) == status


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]", "[::1]:3000"])
def test_a_keyless_service_on_the_loopback_answers_to_its_names(
    client: httpx.Client, host: str
) -> None:
    assert client.get("/info", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["attacker.example.com", "localhost.example.com:80", "192.0.2.1", "[", "localhost:x@y"]
)
def test_it_refuses_other_names_but_for_health(client: httpx.Client, host: str) -> None:
    reply = client.post("/fill-mask", json={"inputs": "a [MASK]"}, headers={"Host": host})
    assert reply.status_code == 400
    error = ErrorReply.model_validate_json(reply.content)
    assert error.error_type == "malformed"
    assert "Allowed are localhost, 127.0.0.1" in error.error
    assert "ALBERT_SERVE_ALLOWED_HOSTS" in error.error
    for path in HEALTH:
        assert client.get(path, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("app.example.com", 200),
        ("APP.example.com:8080", 200),
        ("one.two.internal", 200),
        ("192.0.2.1:3000", 200),
        ("[2001:db8::1]:3000", 200),
        ("internal", 400),
        ("example.com", 400),
        ("localhost", 400),
    ],
)
def test_the_setting_names_hosts_and_ends_of_hosts(host: str, status: int) -> None:
    assert get(AllowedHosts(Response(), hosts=HOSTS), "/info", Host=host) == status


def assert_unauthorized(reply: httpx.Response) -> None:
    assert reply.status_code == 401, reply.text
    assert reply.headers["WWW-Authenticate"].startswith('Bearer realm="albert_serve"')
    error = ErrorReply.model_validate_json(reply.content)
    assert error.error_type == "unauthorized"
    assert error.request_id == reply.headers["X-Request-ID"]
