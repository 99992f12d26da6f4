"""What BentoML would do for each request, and does not."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any, cast

import bentoml
import pytest
from _bentoml_impl.serde import JSONSerde
from bentoml._internal.server.http.traffic import TimeoutMiddleware
from starlette.requests import Request
from starlette.testclient import TestClient

from albert_serve.server.bentoml.endpoints import NoInput, input_of
from albert_serve.server.bentoml.timeouts import leave_timeouts_out

# BentoML's own, and those of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@bentoml.service(traffic={"timeout": 60})
class Echo:
    @bentoml.api  # type: ignore[untyped-decorator]
    def echo(self, text: str) -> str:
        return text


def test_no_timer_is_left_for_a_request() -> None:
    app = cast("Any", Echo).to_asgi()
    kinds = [each.cls for each in app.user_middleware]
    assert TimeoutMiddleware in kinds
    leave_timeouts_out(app)
    kinds.remove(TimeoutMiddleware)
    assert [each.cls for each in app.user_middleware] == kinds
    with TestClient(app) as client:
        assert client.post("/echo", json={"text": "a"}).text == "a"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(input_of("fill-mask"), {"inputs": None, "parameters": None}), (NoInput, {})],
)
def test_an_input_is_left_unread_without_a_warning(
    kind: type[NoInput], fields: dict[str, None]
) -> None:
    request = Request({"type": "http", "method": "POST", "headers": []})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unread = asyncio.run(kind.from_http_request(request, JSONSerde()))
        # As BentoML calls the endpoint.
        assert {name: getattr(unread, name) for name in unread.model_fields} == fields
