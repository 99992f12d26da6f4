"""Health and readiness of a service, and the options that a client is made with."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from albert_serve.client import AlbertClient
from albert_serve.errors import ConfigError, NotFoundError, NotReadyError, UnauthorizedError
from tests.albert_serve.client.twins import URL, replying
from tests.albert_serve.support import Running

STARTING = httpx.Response(503, json={"error": "the service is starting", "error_type": "not_ready"})


def test_a_running_service_is_healthy_and_ready(service: Running) -> None:
    with AlbertClient(service.url, model="tiny") as client:
        assert client.health() is True
        client.wait_until_ready()
    with AlbertClient(service.url, model="missing") as client:
        for method in (client.health, client.wait_until_ready):
            with pytest.raises(NotFoundError, match="missing"):
                method()


@pytest.mark.parametrize(
    "outcome",
    [
        *(httpx.Response(status) for status in (429, 502, 503, 504)),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout(""),
    ],
    ids=str,
)
def test_a_service_that_is_away_or_starting_is_not_healthy(
    outcome: httpx.Response | Exception,
) -> None:
    client, _ = replying(outcome)
    assert client.health() is False


def test_a_refused_key_is_an_error_at_once() -> None:
    refusal = httpx.Response(401, json={"error": "no key", "error_type": "unauthorized"})
    client, received = replying(refusal, api_key="k")
    with pytest.raises(UnauthorizedError, match="no key"):
        client.wait_until_ready()
    assert [request.headers["Authorization"] for request in received] == ["Bearer k"]


def test_a_service_is_waited_for_until_it_has_started() -> None:
    outcomes: list[httpx.Response | Exception] = [
        *(httpx.ConnectError("refused"), STARTING, httpx.Response(502), httpx.Response(200))
    ]
    client, received = replying(*outcomes)
    client.wait_until_ready(30)
    assert len(received) == len(outcomes)


@pytest.mark.parametrize(
    ("outcome", "seen"),
    [
        (httpx.ConnectError("refused"), f"cannot reach {URL}: refused; is the service running"),
        (STARTING, "the service is starting"),
        (httpx.ReadTimeout(""), "no reply in time"),
    ],
)
def test_what_was_seen_last_is_in_the_error(outcome: httpx.Response | Exception, seen: str) -> None:
    client, _ = replying(*[outcome] * 9)
    message = f"^{URL} was not ready within 0.5 s; the last attempt: {seen}"
    with pytest.raises(NotReadyError, match=message):
        client.wait_until_ready(0.5)
    with pytest.raises(ConfigError, match="timeout_s is 0; it must be over 0"):
        client.wait_until_ready(0)


@pytest.mark.parametrize(
    ("base_url", "options", "url", "authorization"),
    [
        (None, {}, "http://env/health", "Bearer from-the-environment"),
        (URL, {"api_key": "passed"}, f"{URL}/health", "Bearer passed"),
        (None, {"api_key": "", "model": "a/b"}, "http://env/v1/models/a%2Fb/health", None),
    ],
)
def test_address_and_key_are_those_of_the_environment(
    base_url: str | None,
    options: dict[str, Any],
    url: str,
    authorization: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALBERT_URL", " http://env/\n")
    monkeypatch.setenv("ALBERT_API_KEY", "from-the-environment\n")

    def handle(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == url
        assert request.headers.get("Authorization") == authorization
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        assert AlbertClient(base_url, http_client=http, **options).health() is True


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "there is no address; pass base_url, such as .* or set ALBERT_URL"),
        ({"ALBERT_URL": " "}, "there is no address"),
        ({"ALBERT_URL": "localhost:3000"}, "ALBERT_URL is 'localhost:3000'; it must begin with"),
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
        (URL, {"timeout_s": 0.0}, "timeout_s is 0.0"),
        (URL, {"timeout_s": float("nan")}, "timeout_s is nan"),
        (URL, {"num_retries": -1}, "num_retries is -1"),
        (URL, {"max_concurrency": 0}, "max_concurrency is 0"),
        (URL, {"max_reply_bytes": 0}, "max_reply_bytes is 0"),
        (URL, {"api_key": "ключ"}, "is it whole"),
        (URL, {"api_key": "a "}, "begins or ends with a space"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    base_url: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AlbertClient(base_url, **options)
