"""The panel of token classification, which a bundle of its own has."""

from __future__ import annotations

import httpx
from playwright.sync_api import expect

from tests.albert_serve.support import Running
from tests.albert_serve.web.browsing import OpenPage, ask

TASK = "token-classification"
TEXT = "👩‍👩‍👧 Anna Berg <b>lives</b> in Vienna,\n and e\u0301te\u0301 came in 1932."


def test_the_entities_of_the_reply_are_marked_in_the_text(
    open_page: OpenPage, token_service: Running
) -> None:
    page = open_page(TASK, url=f"{token_service.url}/")
    panel = page.locator(f"#panel-{TASK}")
    panel.get_by_label("Text").fill(TEXT)
    panel.get_by_text("Options").click()
    panel.get_by_label("Label of a word").select_option("average")
    panel.get_by_role("button", name="Find").click()
    expect(page.locator("[aria-busy]")).to_have_count(0)
    with httpx.Client(base_url=token_service.url, timeout=30) as client:
        expected = ask(client, TASK, TEXT, {"aggregation_strategy": "average"})
    assert expected
    marks = panel.locator("mark")
    expect(marks).to_have_text([one["word"] + one["entity_group"] for one in expected])
    words = panel.locator(".passage").evaluate(
        "place => { place.querySelectorAll('.kind').forEach((kind) => kind.remove());"
        " return place.textContent; }"
    )
    assert words == TEXT
