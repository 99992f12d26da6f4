"""Sentences are moved by mouse, keys and buttons, and the score moves with them."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.albert_serve.web.browsing import OpenPage, ask, assert_width, percent


def test_sentences_show_the_coherence_of_their_order(
    open_page: OpenPage,
    client: httpx.Client,
) -> None:
    page = open_page("sentence-order")
    assert_scored(page, client, sentences_of(page))
    page.get_by_role("button", name="A recipe").click()
    expect(page.locator(".sentence textarea").first).to_have_value("Fold in the flour.")
    assert_scored(page, client, sentences_of(page))


@pytest.mark.extended
def test_buttons_move_remove_and_add_sentences(
    open_page: OpenPage,
    client: httpx.Client,
) -> None:
    page = open_page("sentence-order")
    first, second, third, fourth = sentences_of(page)
    page.get_by_role("button", name="Move sentence 2 of 4 up").click()
    assert_scored(page, client, [second, first, third, fourth])
    up = page.get_by_role("button", name="Move sentence 1 of 4 up")
    expect(up).to_be_focused()
    expect(up).to_have_attribute("aria-disabled", "true")
    up.press("Enter")
    page.get_by_role("button", name="Move sentence 3 of 4 down").click()
    assert_scored(page, client, [second, first, fourth, third])
    page.get_by_role("button", name="Remove sentence 4 of 4").click()
    assert_scored(page, client, [second, first, fourth])
    page.get_by_label("Add a sentence").fill("He ran. She scored a run.")
    page.keyboard.press("Enter")
    assert_scored(page, client, [second, first, fourth, "He ran.", "She scored a run."])
    page.get_by_label("Text of sentence 1 of 5").fill("Nobody ran.")
    assert_scored(page, client, ["Nobody ran.", first, fourth, "He ran.", "She scored a run."])


@pytest.mark.extended
def test_a_sentence_is_dragged_to_its_place(
    open_page: OpenPage,
    client: httpx.Client,
) -> None:
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
def test_the_best_order_is_put_into_place(
    open_page: OpenPage,
    client: httpx.Client,
) -> None:
    page = open_page("sentence-order")
    texts = sentences_of(page)
    result = ask(client, "sentence-order", {"sentences": texts}, {"reorder": True})
    page.get_by_role("button", name="Find the best order").click()
    best = [texts[place] for place in result["best_order"]]
    assert_scored(page, client, best)
    assert result["best_order"] != sorted(result["best_order"])
    expect(page.locator(".gauge-change")).to_have_text(f"up from {percent(result['coherence'])}")
    expect(page.locator("#panel-sentence-order pre")).to_contain_text('"reorder": true')
    page.get_by_role("button", name="Shuffle").click()
    expect(page.locator("#panel-sentence-order pre")).not_to_contain_text("reorder")
    assert sorted(sentences_of(page)) == sorted(texts)
    assert sentences_of(page) != best
    assert_scored(page, client, sentences_of(page))


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
