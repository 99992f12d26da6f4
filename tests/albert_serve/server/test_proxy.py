"""deploy/nginx.conf, run by nginx in front of a service, and deploy/compose.yaml."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.api.schemas import ErrorReply
from albert_serve.settings import VARIABLES, Settings
from tests.albert_serve.support import ROOT, Running, free_port
from tests.programs import needs_program

CONFIGURATION = (ROOT / "deploy/nginx.conf").read_text()
BODY = {"inputs": "The [MASK] run."}
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def proxy(service: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of nginx, which has other addresses, folders and one shorter timeout."""
    nginx = needs_program("nginx", "/usr/sbin/nginx")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    changes = {
        "albert:3000": service.url.removeprefix("http://"),
        "listen 8080": f"listen 127.0.0.1:{port}",
        "client_header_timeout 10s": "client_header_timeout 1s",
        " /tmp/": f" {folder}/",
    }
    text = CONFIGURATION
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    command = [nginx, "-e", "stderr", "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]
    with subprocess.Popen(command) as process, httpx.Client(timeout=TIMEOUT_S) as client:
        client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        try:
            wait_until_listening(port, process)
            yield client
        finally:
            process.terminate()


def wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < give_up_s:
        assert process.poll() is None
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return
        time.sleep(0.05)


def connect(proxy: httpx.Client) -> socket.socket:
    port = proxy.base_url.port
    assert port is not None
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)


def test_it_passes_requests_on(proxy: httpx.Client, client: httpx.Client) -> None:
    for _ in range(3):
        reply = proxy.post("/fill-mask", json=BODY, headers={"X-Request-ID": "by-the-proxy"})
        assert reply.json() == client.post("/fill-mask", json=BODY).json()
        assert reply.headers["X-Request-ID"] == "by-the-proxy"
    assert proxy.post("/fill-mask", json={"inputs": 3}).status_code == 422


def test_an_address_has_a_limit_of_requests_at_once(proxy: httpx.Client) -> None:
    (limit,) = map(int, re.findall(r"limit_conn at_once (\d+);", CONFIGURATION))
    head = b"POST /fill-mask HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
    with contextlib.ExitStack() as unfinished:
        for _ in range(limit):
            connection = unfinished.enter_context(connect(proxy))
            connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
            assert connection.recv(1 << 10).startswith(b"HTTP/1.1 100")  # it is counted now
        refused = proxy.post("/fill-mask", json=BODY)
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert ErrorReply.model_validate_json(refused.content).error_type == "overloaded"
    assert proxy.post("/fill-mask", json=BODY).status_code == 200


def test_bodies_and_heads_have_limits(proxy: httpx.Client) -> None:
    large = proxy.post("/fill-mask", content=b" " * (4 << 20 | 1))
    assert large.status_code == 413
    assert ErrorReply.model_validate_json(large.content).error_type == "body_too_large"
    assert proxy.get("/info", headers={"X": "a" * (1 << 17)}).status_code == 400


def test_a_head_that_does_not_come_ends_the_connection(proxy: httpx.Client) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"POST /fill-mask HTTP/1.1\r\n")
        with pytest.raises(ConnectionResetError):
            connection.recv(1 << 10)


def test_the_composition_is_of_what_there_is() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    assert services["albert"]["environment"].keys() <= VARIABLES.keys()
    assert "server albert:3000;" in CONFIGURATION
    image = services["albert"]["image"]
    assert f"--image-tag {image}\n" in (ROOT / "Makefile").read_text()
    assert services["proxy"]["ports"] == ["8080:8080"]
    assert "listen 8080;" in CONFIGURATION
    (volume,) = services["proxy"]["volumes"]
    assert volume.split(":") == ["./nginx.conf", "/etc/nginx/nginx.conf", "ro"]
    size = Settings.model_fields["max_body_bytes"].default
    assert f"client_max_body_size {size >> 20}m;" in CONFIGURATION
