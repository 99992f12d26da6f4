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


def test_tabs_are_chosen_by_keys_and_by_address(open_page: OpenPage) -> None:
    page = open_page("text-classification")
    page.get_by_role("tab", name="Sentiment").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tabpanel", name="Questions")).to_be_visible()
    expect(page.get_by_role("tab", name="Questions")).to_be_focused()
    assert page.evaluate("location.hash") == "#question-answering"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tab", name="Embeddings")).to_have_attribute("aria-selected", "true")
    page.evaluate("location.hash = '#fill-mask'")
    expect(page.get_by_role("tabpanel", name="Fill mask")).to_be_visible()
    expect(page.get_by_role("tabpanel")).to_have_count(1)


@of_each_bundle
def test_everything_has_a_name_and_every_stop_shows_its_focus(
    open_first: OpenPage, tasks: Tasks
) -> None:
    page = open_first(tasks)
    for task in tasks:
        show(page, task)
        assert page.evaluate(NAMELESS) == []
        page.get_by_role("tab", selected=True).focus()
        stops = [next_stop(page) for _ in range(10)]
        assert len({name for name, _ in stops}) == 10
        assert [stop for stop in stops if stop[1] != "2px solid"] == []


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


def next_stop(page: Page) -> list[str]:
    """Where the tab key leads, and its outline there."""
    page.keyboard.press("Tab")
    focused: list[str] = page.evaluate(
        "(({ outerHTML }, style) => [outerHTML, `${style.outlineWidth} ${style.outlineStyle}`])"
        "(document.activeElement, getComputedStyle(document.activeElement))"
    )
    return focused


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
