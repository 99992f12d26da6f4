"""The header `Host`: loopback names alone where no key is needed, or those of the setting."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import Response

from albert_serve.api.schemas import ErrorReply
from albert_serve.server.hosts import AllowedHosts
from albert_serve.server.paths import HEALTH_PATHS

HOSTS = ("app.example.com", "*.internal", "192.0.2.1", "[2001:db8::1]")


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
    for path in HEALTH_PATHS:
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
    app = AllowedHosts(Response(), hosts=HOSTS)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            return await http.get("http://here/info", headers={"Host": host})

    assert asyncio.run(ask()).status_code == status
