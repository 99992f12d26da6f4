"""BentoML's timeout of requests is removed: no timer and no task remains after a reply."""

from __future__ import annotations

from typing import Any

import bentoml
import pytest
from starlette.testclient import TestClient

# BentoML's own, and those of what it imports; so it is imported in the tests.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def echo() -> Any:
    """A service of BentoML's as an application."""

    @bentoml.service(traffic={"timeout": 60}, metrics={"enabled": False})
    class Echo:
        @bentoml.api  # type: ignore[untyped-decorator]
        def echo(self, text: str) -> str:
            return text

    service: Any = Echo
    return service.to_asgi()


def test_no_timer_is_left_for_a_request() -> None:
    from bentoml._internal.server.http.traffic import TimeoutMiddleware

    from albert_serve.server.bentoml.timeouts import leave_timeouts_out

    app = echo()
    kinds = [each.cls for each in app.user_middleware]
    assert TimeoutMiddleware in kinds
    leave_timeouts_out(app)
    kinds.remove(TimeoutMiddleware)
    assert [each.cls for each in app.user_middleware] == kinds
    with TestClient(app) as client:
        assert client.post("/echo", json={"text": "a"}).text == "a"
