"""The page by keyboard, in light and dark, on a phone; and what it lets in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.albert_serve.support import Running
from tests.albert_serve.web.browsing import TASKS, TOKEN_TASKS, OpenPage, show, watch

PHONE_WIDTH_PX = 360
MARKUP = "<img src=x onerror=\"document.title='hacked'\"> [MASK]"
INK_AND_PAPER = """() => ['color', 'backgroundColor'].map(
  (name) => Number(getComputedStyle(document.body)[name].match(/\\d+/)[0]))"""
OUTSIDE = """(width) => [...document.querySelectorAll('main *')]
  .filter((place) => place.checkVisibility() && place.getBoundingClientRect().right > width)
  .map((place) => place.outerHTML)"""
NAMELESS = """() => [...document.querySelectorAll('button, input, textarea, [role]')]
  .filter((place) => place.checkVisibility() && !['status', 'alert'].includes(place.role))
  .filter((place) => {
    const labels = [...(place.labels ?? [])].map((label) => label.textContent);
    const other = document.getElementById(place.getAttribute('aria-labelledby'))?.textContent;
    const own = place.tagName === 'BUTTON' ? place.textContent : '';
    return ![place.ariaLabel, ...labels, other, own].some((text) => text?.trim());
  })
  .map((place) => place.outerHTML)"""


Tasks = tuple[str, ...]
of_each_bundle = pytest.mark.parametrize("tasks", [TASKS, TOKEN_TASKS], ids=["heads", "tokens"])


@pytest.fixture
def open_first(open_page: OpenPage, service_of: Callable[[str], Running]) -> OpenPage:
    """Opens the page of the bundle that has the tasks, at the first of them."""

    def open_at(tasks: Tasks, **options: Any) -> Page:
        return open_page(tasks[0], url=f"{service_of(tasks[0]).url}/", **options)

    return open_at


def test_tabs_are_links_that_the_address_follows(open_page: OpenPage) -> None:
    page = open_page("text-classification")
    tabs = page.get_by_role("navigation", name="Tasks").get_by_role("link")
    tabs.get_by_text("Questions").press("Enter")
    expect(page.locator("#panel-question-answering")).to_be_visible()
    expect(tabs.get_by_text("Questions")).to_have_attribute("aria-current", "true")
    assert page.evaluate("location.hash") == "#question-answering"
    page.go_back()
    expect(page.locator("#panel-text-classification")).to_be_visible()
    expect(page.locator(".panel:visible")).to_have_count(1)


@of_each_bundle
def test_everything_has_a_name(open_first: OpenPage, tasks: Tasks) -> None:
    page = open_first(tasks)
    for task in tasks:
        show(page, task)
        assert page.evaluate(NAMELESS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_light_or_dark_as_its_reader_has_it(open_page: OpenPage, scheme: str) -> None:
    ink, paper = open_page(color_scheme=scheme).evaluate(INK_AND_PAPER)
    assert (paper > 127) == (scheme == "light")
    assert abs(ink - paper) > 127


@of_each_bundle
def test_a_phone_needs_no_scrolling_sideways(open_first: OpenPage, tasks: Tasks) -> None:
    page = open_first(tasks, viewport={"width": PHONE_WIDTH_PX, "height": 740}, has_touch=True)
    for task in tasks:
        panel = show(page, task)
        for field in panel.locator("textarea").all():
            field.fill("[MASK]" + "unbroken" * 20)
        for summary in panel.locator("summary").all():
            summary.click()
        panel.locator("button.primary").click()
        expect(panel.locator(".answer[aria-busy]")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE_WIDTH_PX
        assert page.evaluate(OUTSIDE, PHONE_WIDTH_PX) == []


@of_each_bundle
def test_markup_is_shown_as_text(open_first: OpenPage, tasks: Tasks) -> None:
    page = open_first(tasks)
    for task in tasks:
        panel = show(page, task)
        for field in panel.locator("textarea, input[type=text]").all():
            if field.is_visible():
                field.fill(MARKUP)
        panel.locator("button.primary").click()
        expect(panel.locator("pre code")).to_contain_text("onerror")
        expect(panel.locator(".answer[aria-busy]")).to_have_count(0)
        assert panel.locator("img").count() == 0
        assert "hacked" not in page.title()


def test_the_api_page_keeps_to_its_policy(browser: Browser, site: str) -> None:
    faults: list[str] = []
    with browser.new_page() as page:
        watch(page, site, faults)
        reply = page.goto(f"{site}docs")
        assert reply
        assert "default-src 'self'" in reply.headers["content-security-policy"]
        page.locator(".opblock-summary").first.click()
        page.locator(".try-out__btn").first.click()
        page.locator(".execute").first.click()
        expect(page.locator(".live-responses-table .response-col_status").nth(1)).to_have_text(
            "200"
        )
    assert not faults
