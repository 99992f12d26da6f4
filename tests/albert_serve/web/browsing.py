"""Actions on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import ConsoleMessage, Locator, Page, expect
from playwright.sync_api import Request as Asked

TIMEOUT_S: Final = 30
# What Chromium writes for any reply that is not a success, or none; the page shows these.
_REFUSED: Final = "Failed to load resource:"

OpenPage = Callable[..., Page]


def watch(page: Page, url: str, faults: list[str]) -> None:
    """Note errors, breaches of the content security policy, and requests to other hosts."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(_REFUSED):
            faults.append(f"console: {message.text}")

    def on_request(request: Asked) -> None:
        if urlsplit(request.url).netloc != urlsplit(url).netloc:
            faults.append(f"a request to {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("request", on_request)


def ask(client: httpx.Client, task: str, inputs: Any, parameters: Any = None) -> Any:
    """The reply of the API."""
    reply = client.post(f"/{task}", json={"inputs": inputs, "parameters": parameters})
    assert reply.status_code == 200, reply.text
    return reply.json()


def percent(share: float) -> str:
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share * 100:.1f}%"


def assert_bars(bars: Locator, expected: list[tuple[str, float]]) -> None:
    """The labels and figures are these, and each bar is as long as its figure says."""
    expect(bars.locator(".bar-label:visible")).to_have_text([label or "␣" for label, _ in expected])
    expect(bars.locator(".bar-value:visible")).to_have_text(
        [percent(score) for _, score in expected]
    )
    for index, (_, score) in enumerate(expected):
        assert_width(bars.locator(".bar-fill").nth(index), score)


def assert_width(bar: Locator, share: float) -> None:
    width = bar.evaluate("bar => parseFloat(bar.style.width)")
    assert width == pytest.approx(share * 100, abs=0.01)
