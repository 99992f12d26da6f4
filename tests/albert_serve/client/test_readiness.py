"""Health and readiness of a service, and the address and key from the environment."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from albert_serve.client import AlbertClient
from albert_serve.errors import ConfigError, NotFoundError, NotReadyError, UnauthorizedError
from tests.albert_serve.client.twins import URL, Twin
from tests.albert_serve.support import Running, free_port

MakeTwin = Callable[..., Twin]


@contextlib.contextmanager
def replying(port: int, *statuses: int, body: bytes = b"") -> Iterator[list[str | None]]:
    """Reply with these statuses in turn, the last again and again; yields the keys that came."""
    left = list(statuses)
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield keys
        finally:
            server.shutdown()
            thread.join()


def local(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def test_a_running_service_is_healthy_and_ready(twin: MakeTwin, service: Running) -> None:
    client = twin(service.url)
    assert client.health() is True
    assert client.wait_until_ready() is None
    assert twin(service.url, model="tiny").health() is True
    with pytest.raises(NotFoundError, match="missing"):
        twin(service.url, model="missing").health()
    with pytest.raises(NotFoundError, match="missing"):
        twin(service.url, model="missing").wait_until_ready()


def test_a_service_that_is_away_or_starting_is_not_healthy(twin: MakeTwin) -> None:
    port = free_port()
    assert twin(local(port)).health() is False
    for status in (429, 502, 503, 504):
        with replying(port, status):
            assert twin(local(port)).health() is False


def test_a_refused_key_is_an_error_at_once(twin: MakeTwin) -> None:
    port = free_port()
    with replying(port, 401, body=b'{"error": "no key", "error_type": "unauthorized"}') as keys:
        with pytest.raises(UnauthorizedError, match="no key"):
            twin(local(port), api_key="k").wait_until_ready()
        assert keys == ["Bearer k"]


def test_a_service_is_waited_for_until_it_has_started(twin: MakeTwin) -> None:
    port = free_port()
    client = twin(local(port))
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait_until_ready(30)
        except BaseException as error:  # noqa: BLE001  # reported below
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    with replying(port, 503, 502, 200) as keys:
        waiting.join(30)
        assert not waiting.is_alive()
    assert failures == []
    assert len(keys) == 3


def test_what_was_seen_last_is_in_the_error(twin: MakeTwin) -> None:
    port = free_port()
    where = f"^{local(port)} was not ready within 2 s; the last attempt: "
    with pytest.raises(NotReadyError, match=f"{where}.*([Rr]efused|attempts failed)"):
        twin(local(port)).wait_until_ready(2)
    starting = b'{"error": "the service is starting", "error_type": "not_ready"}'
    with (
        replying(port, 503, body=starting),
        pytest.raises(NotReadyError, match=f"{where}the service is starting$"),
    ):
        twin(local(port)).wait_until_ready(2)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(NotReadyError, match=f"{where}no reply in time$"),
    ):
        twin(local(port)).wait_until_ready(2)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_time_limit_is_over_0(twin: MakeTwin, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=f"timeout_s is {timeout_s}; it must be over 0"):
        twin("http://127.0.0.1:1").wait_until_ready(timeout_s)


def test_address_and_key_are_those_of_the_environment(
    twin: MakeTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("ALBERT_URL", f" {local(port)}/\n")
    monkeypatch.setenv("ALBERT_API_KEY", "from-the-environment\n")
    with replying(port, 200) as keys:
        assert twin().health() is True
        assert twin(local(port), api_key="passed").health() is True
        assert twin(api_key="").health() is True
    assert keys == ["Bearer from-the-environment", "Bearer passed", None]
    monkeypatch.setenv("ALBERT_URL", local(free_port()))
    with replying(port, 200):
        assert twin(local(port)).health() is True


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "there is no address; pass base_url, such as .* or set ALBERT_URL"),
        ({"ALBERT_URL": " "}, "ALBERT_URL is set, but blank"),
        ({"ALBERT_URL": "localhost:3000"}, "ALBERT_URL is 'localhost:3000'; it must begin with"),
        ({"ALBERT_URL": "http://a", "ALBERT_API_KEY": ""}, "ALBERT_API_KEY is set, but blank"),
        ({"ALBERT_URL": "http://a", "ALBERT_API_KEY": "s3cret\nmore"}, "ALBERT_API_KEY begins"),
    ],
)
def test_a_variable_that_cannot_be_is_refused_by_its_name(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ALBERT_URL", "ALBERT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message) as caught:
        AlbertClient()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("base_url", "options", "message"),
    [
        ("localhost:3000", {}, "must begin with http"),
        ("http://", {}, "and a host"),
        ("http://[::1", {}, "and a host"),
        ("http://a:port", {}, "and a host"),
        (URL, {"timeout_s": 0.0}, "timeout_s is 0.0"),
        (URL, {"timeout_s": float("nan")}, "timeout_s is nan"),
        (URL, {"num_retries": -1}, "num_retries is -1"),
        (URL, {"max_concurrency": 0}, "max_concurrency is 0"),
        (URL, {"max_reply_bytes": 0}, "max_reply_bytes is 0"),
        (URL, {"api_key": "a\nb"}, "is it whole"),
        (URL, {"api_key": "ключ"}, "is it whole"),
        (URL, {"api_key": "a "}, "begins or ends with a space"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    base_url: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AlbertClient(base_url, **options)
