"""Chromium without a window, and the page before a running service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    expect,
    sync_playwright,
)
from playwright.sync_api import Request as PageRequest

from tests.albert_serve.support import Running
from tests.programs import needs_program

TIMEOUT_S: Final = 30
OpenPage = Callable[..., Page]
# Chromium writes this for any reply that is not a success, or none; the page shows these.
_FAILED_LOAD: Final = "Failed to load resource:"
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
# Chromium itself calls out to nobody.
_ARGUMENTS: Final = (
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of the page, or fail it, before a service is started for it."""
    if "browser" in getattr(item, "fixturenames", ()):
        needs_program(*_NAMES)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Ends with this folder's tests: while it runs, no other can use asyncio in this process."""
    path = needs_program(*_NAMES)
    expect.set_options(timeout=TIMEOUT_S * 1000)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        yield started
        started.close()


@pytest.fixture(scope="package")
def site(service: Running) -> str:
    """The URL of the page of a running service."""
    return f"{service.url}/"


def watch(page: Page, url: str, faults: list[str]) -> None:
    """Note errors, breaches of the content security policy, and requests to other hosts."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(_FAILED_LOAD):
            faults.append(f"console: {message.text}")

    def on_request(request: PageRequest) -> None:
        if urlsplit(request.url).netloc != urlsplit(url).netloc:
            faults.append(f"a request to {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("request", on_request)


@pytest.fixture
def open_page(browser: Browser, site: str) -> Iterator[OpenPage]:
    """Opens the page at a task, and waits for its first answer; fails if it misbehaves meanwhile.

    Options are a browser context's; by default, nothing on the page glides.
    """
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def open_at(task: str = "fill-mask", url: str = site, **options: Any) -> Page:
        context = browser.new_context(**{"reduced_motion": "reduce", **options})
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_S * 1000)
        page = context.new_page()
        watch(page, url, faults)
        page.goto(f"{url}#{task}")
        page.locator(".tabs a, #key:not([hidden])").first.wait_for()
        expect(page.locator("[aria-busy]")).to_have_count(0)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not faults
