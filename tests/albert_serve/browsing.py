"""What the tests of the page use: Chromium without a window, and the page before a real service."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from albert_serve.web import page_routes
from tests.albert_serve.support import Running, free_port

TIMEOUT_S = 15
PHONE_WIDTH_PX = 360
_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Chromium itself calls out to nobody.
_ARGUMENTS = (
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_HOP_BY_HOP = {"connection", "content-length", "transfer-encoding"}
# What Chromium writes for any reply that is not a success, or none; the page shows these.
_REFUSED = "Failed to load resource:"

OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with the module: while it runs, no other test of this process can use asyncio."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed; apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def site(service: Running) -> Iterator[str]:
    """Where the page is that a running service shows."""
    with served(Starlette(routes=[*page_routes(), *passed_on(service.url)])) as url:
        yield f"{url}/"


@pytest.fixture
def open_page(browser: Browser, site: str) -> Iterator[OpenPage]:
    """Opens the page at a task, and waits for its first answer; fails if it misbehaves meanwhile.

    Options are those of a browser's context.
    """
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def open_at(task: str = "fill-mask", url: str = site, **options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_S * 1000)
        page = context.new_page()
        watch(page, url, faults)
        page.goto(f"{url}#{task}")
        page.locator("[role=tab], #key:not([hidden])").first.wait_for()
        expect(page.locator("[aria-busy]")).to_have_count(0)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not faults


def watch(page: Page, url: str, faults: list[str]) -> None:
    """Note errors, breaches of the content security policy, and requests to other hosts."""

    def on_console(message: object) -> None:
        kind, text = getattr(message, "type", ""), getattr(message, "text", "")
        if kind in ("error", "warning") and not text.startswith(_REFUSED):
            faults.append(f"console: {text}")

    def on_request(request: object) -> None:
        asked = getattr(request, "url", "")
        if urlsplit(asked).netloc != urlsplit(url).netloc:
            faults.append(f"a request to {asked}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("request", on_request)


def passed_on(url: str) -> list[BaseRoute]:
    """Routes that give everything to the service at `url`, as a reverse proxy does."""

    async def forward(request: Request) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name != "host"]
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
            path = "/" + request.path_params["path"]
            body = await request.body()
            reply = await http.request(request.method, path, content=body, headers=headers)
        kept = {name: text for name, text in reply.headers.items() if name not in _HOP_BY_HOP}
        return Response(reply.content, reply.status_code, kept)

    return [Route("/{path:path}", forward, methods=["GET", "POST"])]


@contextlib.contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """An application on loopback, for as long as the block runs."""
    port = free_port()
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="warning", lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
