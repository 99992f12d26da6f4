"""The panel of multiple choice, which a bundle of its own has."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.albert_serve.support import Running
from tests.albert_serve.web.browsing import OpenPage, ask, assert_bars

TASK = "multiple-choice"
CONTEXT = "The bridge was built in 1932 and closed to cars in 1988."
QUESTION = "The bridge was closed to _ in 1988."


@pytest.fixture
def choice_page(open_page: OpenPage, choice_service: Running) -> Page:
    return open_page(TASK, url=f"{choice_service.url}/")


def choose(page: Page, context: str, question: str, choices: str) -> Locator:
    page.fill("#multiple-choice-context", context)
    page.fill("#multiple-choice-question", question)
    page.fill("#multiple-choice-choices", choices)
    page.get_by_role("button", name="Choose").click()
    expect(page.locator("[aria-busy]")).to_have_count(0)
    return page.locator(f"#panel-{TASK}")


def test_choices_stand_in_the_order_of_the_reply(
    choice_page: Page, choice_client: httpx.Client
) -> None:
    choices = ["ships", "cars", "<b>trains</b>", "cars", "nobody at all"]
    inputs: dict[str, Any] = {"context": CONTEXT, "question": QUESTION, "choices": choices}
    for question in (QUESTION, "  "):
        if question != QUESTION:  # one that is not there is not sent
            del inputs["question"]
        with choice_page.expect_request(f"**/{TASK}") as sent:
            panel = choose(choice_page, CONTEXT, question, "\n\n ".join(choices) + "\n")
        assert sent.value.post_data_json == {"inputs": inputs}
        expected = ask(choice_client, TASK, inputs)
        assert_bars(panel.locator(".bars"), [(one["label"], one["score"]) for one in expected])
        expect(panel.get_by_role("status")).to_contain_text(expected[0]["label"])


def test_where_the_texts_were_cut_is_said(choice_page: Page, choice_client: httpx.Client) -> None:
    context = "It was scored in the first inning. " * 40
    question = "Who scored it in the first inning? " * 20
    panel = choose(choice_page, context, question, "nobody\neverybody")
    expect(panel.get_by_role("alert")).to_contain_text("too_long")
    panel.get_by_text("Options").click()
    panel.get_by_label("Truncate a context").check()
    panel.get_by_role("button", name="Choose").click()
    inputs = {"context": context, "question": question, "choices": ["nobody", "everybody"]}
    parameters = {"truncation": True}
    reply = choice_client.post(f"/{TASK}", json={"inputs": inputs, "parameters": parameters})
    cuts = json.loads(reply.headers["X-Albert-Truncated-At"])
    expect(panel.locator(".notes li")).to_have_text(
        f"{reply.headers['X-Albert-Truncated-Tokens']} tokens were cut. "
        f"The context was read up to character {cuts['inputs.context']}. "
        f"The question was read after character {cuts['inputs.question']}."
    )
