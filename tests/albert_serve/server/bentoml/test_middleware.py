"""What is left out of BentoML's middleware: spans that nobody takes, and its timeout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.albert_serve.support import (
    Running,
    running_service,
    service_environment,
    wait_until_logged,
)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
WITH_EXPORTER = """
services:
  albert_serve:
    tracing:
      exporter_type: in_memory
      sample_rate: 1.0
"""


def ask(running: Running, request_id: str, **headers: str) -> None:
    reply = httpx.get(f"{running.url}/info", headers={"X-Request-ID": request_id, **headers})
    assert reply.status_code == 200


def line_of(running: Running, request_id: str) -> dict[str, Any]:
    """The log record of a request, once its reply has been sent."""
    wait_until_logged(running, request_id)
    record: dict[str, Any] = json.loads(
        next(line for line in running.log.splitlines() if request_id in line)
    )
    return record


@pytest.mark.parametrize(
    "config",
    [pytest.param(None, marks=pytest.mark.extended), WITH_EXPORTER],
    ids=["alone", "with an exporter"],
)
def test_a_callers_trace_is_taken_up_and_another_made_only_for_an_exporter(
    config: str | None, bundle_dir: Path, tmp_path: Path
) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    environment["ALBERT_SERVE_LOG_FORMAT"] = "json"
    if config is not None:
        file = tmp_path / "bentoml.yaml"
        file.write_text(config)
        environment["BENTOML_CONFIG"] = str(file)
    with running_service(environment, tmp_path) as running:
        ask(running, "in-a-trace", traceparent=f"00-{TRACE_ID}-00f067aa0ba902b7-01")
        ask(running, "untraced")
        assert line_of(running, "in-a-trace")["trace_id"] == TRACE_ID
        own = line_of(running, "untraced").get("trace_id", "")
    if config is None:
        assert own == ""
    else:
        assert re.fullmatch(r"[0-9a-f]{32}", own)
        assert own != TRACE_ID


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # BentoML's, and of what it imports
def test_bentomls_timeout_is_left_out() -> None:
    """It would leave a timer for a minute after each reply."""
    import bentoml
    from bentoml._internal.server.http.traffic import TimeoutMiddleware
    from starlette.testclient import TestClient

    from albert_serve.server.bentoml.middleware import adapt_middleware

    @bentoml.service(traffic={"timeout": 60}, metrics={"enabled": False})
    class Echo:
        @bentoml.api  # type: ignore[untyped-decorator]
        def echo(self, text: str) -> str:
            return text

    service: Any = Echo
    app = service.to_asgi()
    kinds = [part.cls for part in app.user_middleware]
    assert TimeoutMiddleware in kinds
    adapt_middleware(app)
    kinds.remove(TimeoutMiddleware)
    assert [part.cls for part in app.user_middleware] == kinds
    with TestClient(app) as client:
        assert client.post("/echo", json={"text": "a"}).text == "a"
