"""Sentences are moved by mouse, keys and buttons, and the score moves with them."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.albert_serve.web.browsing import OpenPage, ask, assert_width, percent

# Longer than the page waits for a further change.
SCORED_AFTER_MS = 500


@pytest.mark.extended
def test_keys_and_buttons_move_sentences_and_the_score(
    open_page: OpenPage, client: httpx.Client
) -> None:
    page = open_page("sentence-order")
    first, second, third, fourth = sentences_of(page)
    page.get_by_role("button", name="Move sentence 1 of 4", exact=True).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert_scored(page, client, [second, third, first, fourth])
    expect(page.get_by_role("button", name="Move sentence 3 of 4", exact=True)).to_be_focused()
    expect(page.locator("#panel-sentence-order [role=status]")).to_contain_text(
        re.compile(r"^Now 3 of 4\. Coherence \d+\.\d%")
    )
    page.keyboard.press("Home")
    page.get_by_role("button", name="Move sentence 2 of 4 up").click()
    assert_scored(page, client, [second, first, third, fourth])
    up = page.get_by_role("button", name="Move sentence 1 of 4 up")
    expect(up).to_be_focused()
    expect(up).to_have_attribute("aria-disabled", "true")
    page.get_by_role("button", name="Remove sentence 4 of 4").click()
    page.get_by_label("Add a sentence").fill("He ran. She scored a run.")
    page.keyboard.press("Enter")
    assert_scored(page, client, [second, first, third, "He ran.", "She scored a run."])
    page.get_by_label("Text of sentence 1 of 5").fill("Nobody ran.")
    assert_scored(page, client, ["Nobody ran.", first, third, "He ran.", "She scored a run."])


@pytest.mark.extended
def test_a_sentence_is_dragged_to_its_place(open_page: OpenPage, client: httpx.Client) -> None:
    page = open_page("sentence-order", reduced_motion="no-preference")
    first, second, third, fourth = sentences_of(page)
    drag(page, 3, to=0)
    page.mouse.up()
    assert_scored(page, client, [fourth, first, second, third])
    drag(page, 0, to=2)
    page.mouse.up()
    assert_scored(page, client, [first, second, fourth, third])
    drag(page, 1, to=3)
    assert_scored(page, client, [first, fourth, third, second])
    page.keyboard.press("Escape")
    page.mouse.up()
    assert_scored(page, client, [first, second, fourth, third])


@pytest.mark.extended
def test_no_answer_is_taken_to_an_order_that_is_past(
    open_page: OpenPage, client: httpx.Client
) -> None:
    page = open_page("sentence-order")
    first, second, third, fourth = sentences_of(page)
    page.clock.install()
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)
    page.route("**/sentence-order", lambda _held: None, times=1)
    page.get_by_role("button", name="Move sentence 1 of 4", exact=True).focus()
    page.keyboard.press("ArrowDown")
    with page.expect_request("**/sentence-order"):
        page.clock.run_for(SCORED_AFTER_MS)
    with page.expect_event("requestfailed"):
        page.keyboard.press("ArrowDown")
    page.clock.run_for(SCORED_AFTER_MS)
    assert_scored(page, client, [second, third, first, fourth])


def sentences_of(page: Page) -> list[str]:
    texts: list[str] = page.locator(".sentence textarea").evaluate_all(
        "fields => fields.map((field) => field.value)"
    )
    return texts


def assert_scored(page: Page, client: httpx.Client, sentences: list[str]) -> None:
    """The sentences stand in this order, with the figures that the API gives for it."""
    expected = ask(client, "sentence-order", {"sentences": sentences})
    links = page.locator(".sentences:not(.stale) .link-value")
    figures = [percent(pair["in_order"]) for pair in expected["pairs"]]
    expect(links).to_have_text(["–", *figures])
    expect(page.locator(".gauge-value")).to_have_text(percent(expected["coherence"]))
    assert_width(page.locator(".gauge-fill"), expected["coherence"])
    assert sentences_of(page) == sentences


def drag(page: Page, index: int, *, to: int) -> None:
    """Drag a sentence over another's place, and hold it there."""
    start = page.locator(".grip").nth(index).bounding_box()
    end = page.locator(".grip").nth(to).bounding_box()
    assert start is not None
    assert end is not None
    page.mouse.move(start["x"] + 5, start["y"] + 5)
    page.mouse.down()
    page.mouse.move(end["x"] + 5, end["y"] + 5, steps=8)
