"""API keys, guarded surfaces, CORS and allowed hosts."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.testclient import TestClient

from albert_serve.errors import ConfigError
from albert_serve.server.auth import AllowedHosts, ApiKeyMiddleware, read_keys
from albert_serve.server.paths import RequestTarget, parse
from tests.albert_serve.server.conftest import JSON, assert_envelope
from tests.albert_serve.support import MAX_BODY_BYTES, RunningService, served, wait_until_logged

KEY = "first-key-0123456789"
OTHER_KEY = "other-key-0123456789"
FILE_KEY = "file-key-0123456789=="
ORIGIN = "https://app.example.com"
MASKED = {"inputs": "The [MASK] run."}
HEALTH = ("/health", "/healthz", "/livez", "/readyz")
GUARDED = (
    *("/info", "/metrics", "/docs", "/docs.json", "/openapi.json", "/schema.json"),
    *("/static_content/swagger-ui.css", "/nothing-here"),
)


@pytest.fixture(scope="module")
def guarded(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with keys in a setting and in a file, and an origin that can call it."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.txt").write_text(f"# for tests\n\n{FILE_KEY}\n")
    keys, file = f"{KEY}, {OTHER_KEY}", str(folder / "keys.txt")
    with served(
        bundle_dir, folder, API_KEYS=keys, API_KEYS_FILE=file, CORS_ORIGINS=ORIGIN
    ) as started:
        yield started


@pytest.fixture(scope="module")
def keyless(guarded: RunningService) -> Iterator[httpx.Client]:
    """A client of the guarded service that sends no key."""
    with httpx.Client(base_url=guarded.url, timeout=30) as http:
        yield http


def test_without_a_key_only_the_health_paths_are_open(keyless: httpx.Client) -> None:
    for path in HEALTH:
        assert keyless.get(path).status_code == 200, path
    for path in GUARDED:
        assert_envelope(keyless.get(path), 401, "unauthorized")
    for path in ("/fill-mask", "/v1/embeddings", "/v1/models/tiny/embeddings"):
        assert_envelope(keyless.post(path, json=MASKED), 401, "unauthorized")


def test_each_key_opens_all_paths_and_is_not_logged(
    guarded: RunningService, keyless: httpx.Client
) -> None:
    for scheme, key in (("Bearer", KEY), ("bearer", OTHER_KEY), ("BEARER", FILE_KEY)):
        headers = {"Authorization": f"{scheme} {key}", "X-Request-ID": f"with-{key[:4]}"}
        assert keyless.post("/fill-mask", json=MASKED, headers=headers).status_code == 200
        for path in GUARDED:
            expected = 404 if path == "/nothing-here" else 200
            assert keyless.get(path, headers=headers).status_code == expected, path
        assert keyless.get("/info", headers=headers).json()["needs_key"] is True
        wait_until_logged(guarded, f"with-{key[:4]}")
        assert key not in guarded.log


def test_a_body_without_a_key_is_rejected_before_it_is_read(keyless: httpx.Client) -> None:
    num_chunks = 0

    def chunks() -> Iterator[bytes]:
        nonlocal num_chunks
        while num_chunks < 1000:
            num_chunks += 1
            yield b" " * MAX_BODY_BYTES

    try:
        reply = keyless.post("/fill-mask", content=chunks())
        assert_envelope(reply, 401, "unauthorized")
    except httpx.WriteError:  # the service has already closed the connection
        assert num_chunks < 1000


def test_pages_of_the_allowed_origin_can_read_every_reply(keyless: httpx.Client) -> None:
    for key, status in ((KEY[1:], 401), (KEY, 422)):
        headers = {**JSON, "Origin": ORIGIN, "Authorization": f"Bearer {key}"}
        reply = keyless.post("/fill-mask", headers=headers, content=b"{}")
        assert reply.status_code == status
        assert reply.headers["Access-Control-Allow-Origin"] == ORIGIN
        for name in ("X-Request-ID", "X-Albert-Warnings", "Retry-After", "WWW-Authenticate"):
            assert name in reply.headers["Access-Control-Expose-Headers"]
        assert "Origin" in reply.headers["Vary"]


def test_preflights_need_no_key_and_allow_only_the_origin(
    keyless: httpx.Client, client: httpx.Client
) -> None:
    """The service of `client` has no setting for CORS."""
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-request-id",
    }
    reply = keyless.options("/fill-mask", headers=headers)
    assert reply.status_code == 200
    assert reply.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "Authorization" in reply.headers["Access-Control-Allow-Headers"]
    assert "Access-Control-Allow-Credentials" not in reply.headers
    for reply in (
        keyless.options("/fill-mask", headers={**headers, "Origin": "https://other.example.com"}),
        client.options("/fill-mask", headers=headers),
        client.get("/health", headers=headers),
    ):
        assert "Access-Control-Allow-Origin" not in reply.headers


def test_no_path_accepts_pickles(client: httpx.Client) -> None:
    content = pickle.dumps(MASKED)
    for path in {*client.get("/docs.json").json()["paths"], *GUARDED, *HEALTH, "/__metadata__"}:
        for media in ("application/vnd.bentoml+pickle", "application/pickle"):
            headers = {"Content-Type": media, "Payload-Container": "DefaultContainer"}
            reply = client.post(path, content=content, headers=headers)
            assert reply.status_code in (404, 405, 415), path
    assert client.post("/fill-mask", content=content, headers=headers).status_code == 415


def test_the_error_about_a_key_file_does_not_repeat_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for content, message in (
        ("# nothing\n\n", "contains no key"),
        ("# a\nshort-secret-15\n", "Key 1 has 15 characters.* 16"),
        ("a-good-key-0123456789\nwith some spaces in it\n", "Key 2 contains invalid char"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message) as caught:
            read_keys([], file)
        assert str(file) in str(caught.value)
        assert not re.search("short-secret|with some", str(caught.value))


def test_keys_come_from_both_sources_and_at_least_one_is_required(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# sixteen characters\n" + "k" * 16)
    assert len(read_keys([KEY], tmp_path / "keys")) == 2
    with pytest.raises(ConfigError, match="API key is missing"):
        read_keys([], None)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):  # and reading does not block
        read_keys([], tmp_path / "pipe")


def test_only_guarded_surfaces_need_a_key_and_a_wrong_key_is_not_repeated() -> None:
    hashes = read_keys([KEY], None)
    http: Any = TestClient(ApiKeyMiddleware(Response(), hashes=hashes, surfaces=["metrics"]))
    for path in ("/info", "/docs", "/", "/fill-mask"):
        assert http.get(path).status_code == 200
    reply = http.get("/metrics")
    assert_envelope(reply, 401, "unauthorized")
    assert reply.headers["WWW-Authenticate"] == 'Bearer realm="albert_serve"'
    for wrong in (f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}"):
        reply = http.get("/metrics", headers={"Authorization": wrong})
        assert_envelope(reply, 401, "unauthorized")
        assert reply.headers["WWW-Authenticate"].endswith(', error="invalid_token"')
        assert KEY not in reply.text


@given(st.text())
def test_every_path_has_a_surface_except_health_and_the_page(path: str) -> None:
    is_page = path == "/" or path.startswith("/web/")
    assert (parse(path).surface is None) == (path in HEALTH or is_page)
    label = parse(path).label
    assert parse(label).label == label


def test_unknown_paths_share_one_label_and_paths_of_models_share_a_pattern() -> None:
    for path in ("/web", "/nothing", "/v1/models/", "/v1/models/a/", "/v1/models//info"):
        assert parse(path) == RequestTarget(label="/*", surface="api")
    assert parse("/metrics") == RequestTarget(label="/metrics", surface="metrics")
    assert parse("/") == RequestTarget(label="/", surface=None)
    assert parse("/web/a.js") == RequestTarget(label="/web/", surface=None)
    assert parse("/static_content/a.css") == RequestTarget(label="/static_content/", surface="docs")
    embeddings = parse("/v1/models/a/embeddings")
    assert (embeddings.task, embeddings.model) == ("feature-extraction", "a")
    assert embeddings.label == "/v1/models/{model}/embeddings"


def test_a_local_service_without_keys_accepts_only_loopback_hosts(client: httpx.Client) -> None:
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1", "[::1]", "[::1]:3000"):
        assert client.get("/info", headers={"Host": host}).status_code == 200
    headers = {"Host": "attacker.example.com"}
    reply = client.post("/fill-mask", json=MASKED, headers=headers)
    assert "ALBERT_SERVE_ALLOWED_HOSTS" in assert_envelope(reply, 400, "malformed")
    for path in HEALTH:
        assert client.get(path, headers=headers).status_code == 200


def test_allowed_hosts_are_names_or_suffixes() -> None:
    hosts = ["app.example.com", "*.internal", "[2001:db8::1]"]
    http = TestClient(AllowedHosts(Response(), hosts=hosts))
    for host in ("app.example.com", "APP.example.com:8080", "a.b.internal", "[2001:db8::1]:3000"):
        assert http.get("/info", headers={"Host": host}).status_code == 200, host
    for host in ("internal", "xinternal", "example.com", "app.example.com.evil", "[", ""):
        assert http.get("/info", headers={"Host": host}).status_code == 400, host
    assert http.get("/health", headers={"Host": "example.com"}).status_code == 200
