"""The page where the service refuses, cannot be reached, or needs a key."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.albert_serve.support import served
from tests.albert_serve.web.browsing import OpenPage

KEY = "a-key-of-16-characters-or-more"


@pytest.mark.parametrize("text", ["no blank", "run " * 20_000], ids=["mask", "body"])
def test_an_error_is_told_as_the_api_tells_it(
    open_page: OpenPage, client: httpx.Client, text: str
) -> None:
    page = open_page("fill-mask")
    panel = page.locator("#panel-fill-mask")
    page.fill("#fill-mask-text", text)
    with page.expect_response("**/fill-mask") as response:
        page.keyboard.press("Control+Enter")
    reply = client.post("/fill-mask", json={"inputs": text})
    error = reply.json()
    problem = panel.get_by_role("alert")
    expect(problem.locator(".problem-text")).to_have_text(error["error"])
    request_id = response.value.json()["request_id"]
    expect(problem.locator("dd")).to_have_text(
        [str(reply.status_code), error["error_type"], request_id]
    )
    expect(panel.locator(".result")).to_be_hidden()
    panel.locator(".chip").first.click()
    expect(problem).to_be_hidden()
    expect(panel.locator(".bar").first).to_be_visible()


def test_overload_says_when_to_come_back(open_page: OpenPage) -> None:
    page = open_page("fill-mask")
    refusal = {"error": "512 tokens wait", "error_type": "overloaded", "request_id": "r-1"}
    page.route(
        "**/fill-mask",
        lambda route: route.fulfill(status=429, json=refusal, headers={"Retry-After": "3"}),
    )
    page.get_by_role("button", name="Predict").click()
    problem = page.locator("#panel-fill-mask").get_by_role("alert")
    expect(problem.locator("dt")).to_have_text(["Status", "Type", "Try again after", "Request"])
    expect(problem.locator("dd")).to_have_text(["429", "overloaded", "3 s", "r-1"])


def test_a_reply_of_something_else_and_none_at_all_are_told(
    open_page: OpenPage,
) -> None:
    page = open_page("fill-mask")
    problem = page.locator("#panel-fill-mask").get_by_role("alert")
    page.route("**/fill-mask", lambda route: route.fulfill(status=502, body="<h1>Bad</h1>"))
    page.get_by_role("button", name="Predict").click()
    expect(problem.locator("dd")).to_have_text(["502"])
    page.route("**/fill-mask", lambda route: route.fulfill(status=200, body="<h1>Login</h1>"))
    page.get_by_role("button", name="Predict").click()
    expect(problem).to_contain_text("The reply is not JSON.")
    page.route("**/fill-mask", lambda route: route.abort())
    page.get_by_role("button", name="Predict").click()
    expect(problem).to_have_text("The service cannot be reached. Is it still running?")


def test_a_service_that_starts_is_waited_for(open_page: OpenPage) -> None:
    page = open_page()
    calls: list[str] = []

    def refuse_once(route: Route) -> None:
        calls.append(route.request.url)
        if len(calls) == 1:
            route.fulfill(status=503, json={"error": "the service is starting"})
        else:
            route.continue_()

    page.route("**/info", refuse_once)
    page.reload()
    expect(page.locator("#trouble")).to_contain_text("the service is starting")
    expect(page.locator("#panel-fill-mask .bar").first).to_be_visible()
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_key_is_asked_for_and_sent_from_then_on(
    open_page: OpenPage, bundle_dir: Path, tmp_path: Path
) -> None:
    with served(bundle_dir, tmp_path, API_KEYS=KEY, GUARD="api") as service:
        page = open_page(url=f"{service.url}/")
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        expect(field).to_have_attribute("type", "password")
        why = page.locator(".key-why")
        expect(why).to_contain_text("an API key is required")
        field.fill("wröng")
        page.keyboard.press("Enter")
        expect(why).to_contain_text("an API key is required")
        assert not field.evaluate("field => field.checkValidity()")
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(why).to_contain_text("the API key is not valid")
        field.fill(f" {KEY} ")
        page.keyboard.press("Enter")
        expect(page.locator("#panel-fill-mask .bar").first).to_be_visible()
        expect(page.locator("#key")).to_be_hidden()
        assert KEY not in page.content()
        kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
        expect(page.locator("#panel-fill-mask pre")).to_contain_text("Bearer $ALBERT_API_KEY")
        page.get_by_role("button", name="Forget it").click()
        page.get_by_role("button", name="Predict").click()
        expect(field).to_be_visible()
        expect(page.locator("#panel-fill-mask .problem")).to_contain_text("unauthorized")
