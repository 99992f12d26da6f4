"""The web page shows the answers and the errors of the API."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright
from playwright.sync_api import Request as PageRequest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from albert_serve.web import page_routes
from tests.albert_serve.server.conftest import post
from tests.albert_serve.support import RunningService, served
from tests.programs import needs_program

KEY = "a-key-of-16-characters-or-more"
TIMEOUT_S = 30
ARGUMENTS = [
    *("--no-sandbox", "--headless=new", "--disable-gpu", "--disable-dev-shm-usage"),
    # Chromium itself sends no requests.
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--no-first-run",
]
OpenPage = Callable[..., tuple[Page, Locator]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for this module only: while it runs, tests in this process cannot use asyncio."""
    path = needs_program("chromium", "chromium-browser", "google-chrome")
    expect.set_options(timeout=TIMEOUT_S * 1000)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield chromium
        chromium.close()


def watch(page: Page, url: str, faults: list[str]) -> None:
    """Record errors, breaches of the content security policy, and requests to other hosts."""

    def on_console(message: ConsoleMessage) -> None:
        # Chromium prints this if a request fails or its reply is an error. The page shows both.
        is_failed_load = message.text.startswith("Failed to load resource:")
        if message.type in ("error", "warning") and not is_failed_load:
            faults.append(f"console: {message.text}")

    def on_request(request: PageRequest) -> None:
        if urlsplit(request.url).netloc != urlsplit(url).netloc:
            faults.append(f"a request to {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("request", on_request)


@pytest.fixture
def open_page(browser: Browser, service: RunningService) -> Iterator[OpenPage]:
    """A function that opens the page, waits for the first answer, and returns the task's panel too.

    The page has no animations. The test fails if `watch` recorded a fault.
    """
    faults: list[str] = []
    with browser.new_context(reduced_motion="reduce") as context:
        context.set_default_timeout(TIMEOUT_S * 1000)

        def open_at(task: str = "fill-mask", url: str = f"{service.url}/") -> tuple[Page, Locator]:
            page = context.new_page()
            watch(page, url, faults)
            page.goto(f"{url}#{task}")
            page.locator(".tabs a, #key:not([hidden])").first.wait_for()
            expect(page.locator("[aria-busy]")).to_have_count(0)
            return page, page.locator(f"#panel-{task}")

        yield open_at
    assert not faults


def test_the_page_has_no_inline_code_and_loads_nothing_from_other_hosts() -> None:
    http = TestClient(Starlette(routes=page_routes()))
    reply = http.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?![^>]*\ssrc=)", reply.text)
    assert "://" not in reply.text
    assert http.get("/web/__init__.py").status_code == 404


def percent(probability: float) -> str:
    return "<0.1%" if 0 < probability < 0.001 else f"{probability:.1%}"


def assert_bars(panel: Locator, answers: list[dict[str, Any]], name: str) -> None:
    """Check the labels and the values of the bars; answers have their labels by this name."""
    labels = [answer[name] or "␣" for answer in answers]
    expect(panel.locator(".bars .bar-label:visible")).to_have_text(labels)
    scores = [percent(answer["score"]) for answer in answers]
    expect(panel.locator(".bars .bar-value:visible")).to_have_text(scores)


def test_masks_are_filled_as_by_the_api(open_page: OpenPage, client: httpx.Client) -> None:
    page, panel = open_page("fill-mask")
    text = "The [MASK] run. " + "It was scored in the first inning. " * 40
    targets = ["run", "unearnedness", "the"]
    panel.get_by_text("Options").click()
    panel.get_by_label("Only these words").fill(" , ".join(targets))
    panel.get_by_label("Predictions").fill("2")
    panel.get_by_label("Truncate a text").check()
    page.fill("#fill-mask-text", text)
    panel.get_by_role("button", name="Predict").click()
    reply = post(client, "fill-mask", text, top_k=2, targets=targets, truncation=True)
    assert_bars(panel, reply.json(), "token_str")
    warnings = json.loads(reply.headers["X-Albert-Warnings"])
    num_truncated = reply.headers["X-Albert-Truncated-Tokens"]
    note = f"{num_truncated} tokens were truncated."
    expect(panel.locator(".notes li")).to_have_text([*warnings, note])
    first, second = (answer["token_str"] for answer in reply.json())
    expect(panel.locator("mark")).to_have_text(first)
    panel.locator("button.bar").nth(1).click()
    expect(panel.locator("mark")).to_have_text(second)


def test_a_text_is_classified_as_by_the_api(open_page: OpenPage, client: httpx.Client) -> None:
    _, panel = open_page("text-classification")
    panel.get_by_text("Options").click()
    panel.get_by_label("Second text").fill("It was not earned.")
    panel.get_by_label("Text", exact=True).fill("A run.")
    panel.get_by_role("button", name="Classify").click()
    pair = {"text": "A run.", "text_pair": "It was not earned."}
    [scores] = post(client, "text-classification", pair).json()
    assert_bars(panel, scores, "label")


def test_an_answer_is_marked_at_its_code_points_in_the_passage(
    open_page: OpenPage, client: httpx.Client
) -> None:
    page, panel = open_page("question-answering")
    context = "🎉🎉 A run was\nscored 🏏 in the first inning by nobody at all."
    question = "When was it scored?"
    panel.get_by_label("Passage").fill(context)
    panel.get_by_label("Question").fill(question)
    page.keyboard.press("Enter")
    inputs = {"question": question, "context": context}
    answers = post(client, "question-answering", inputs, top_k=3).json()
    expect(panel.locator(".bar-label")).to_have_text([answer["answer"] for answer in answers])
    passage = panel.locator(".passage")
    for index, answer in enumerate(answers):
        panel.locator("button.bar").nth(index).click()
        texts = passage.evaluate("p => [p.firstChild.data, p.querySelector('mark').textContent]")
        assert texts == [context[: answer["start"]], answer["answer"]]
    assert passage.text_content() == context


def test_texts_are_compared_by_the_cosines_of_their_embeddings(
    open_page: OpenPage, client: httpx.Client
) -> None:
    _, panel = open_page("feature-extraction")
    panel.get_by_text("Options").click()
    panel.get_by_label("[CLS]").check()
    texts = ["A run was scored.", "It rained.", "Nobody ran at all in the first inning."]
    panel.get_by_label("Texts, one per line").fill("\n\n".join(texts) + "\n")
    panel.get_by_role("button", name="Compare").click()
    reply = post(client, "feature-extraction", texts, pooling="cls", normalize=True)
    embeddings = np.array(reply.json())
    cosines = embeddings @ embeddings.T
    assert_similarities(panel, texts, cosines[0])
    panel.locator("button.bar").nth(1).click()
    second = int(np.argsort(-cosines[0])[1])
    assert_similarities(panel, texts, cosines[second])


def assert_similarities(panel: Locator, texts: list[str], cosines: NDArray[np.float64]) -> None:
    """Check that the bars show the texts by descending cosine."""
    order = np.argsort(-cosines)
    expect(panel.locator(".bar-label")).to_have_text([texts[index] for index in order])
    values = [float(value) for value in panel.locator(".bar-value").all_inner_texts()]
    np.testing.assert_allclose(values, cosines[order], atol=0.0051)


def test_sentences_are_shown_with_their_coherence_and_the_order_of_each_pair(
    open_page: OpenPage, client: httpx.Client
) -> None:
    page, _ = open_page()
    page.locator(".tabs a[href='#sentence-order']").click()
    panel = page.locator("#panel-sentence-order")
    texts = ["A run was scored.", "It rained.", "Nobody ran at all."]
    panel.get_by_label("Sentences, one per line").fill("\n\n".join(texts))
    panel.get_by_role("button", name="Score").click()
    expected = post(client, "sentence-order", {"sentences": texts}).json()
    expect(panel.locator(".card")).to_have_text(texts)
    probabilities = [percent(pair["in_order"]) for pair in expected["pairs"]]
    expect(panel.locator(".link")).to_have_text(probabilities)
    expect(panel.locator(".gauge-value")).to_have_text(percent(expected["coherence"]))


def test_the_entities_of_the_reply_are_marked_in_the_text(
    open_page: OpenPage, token_service: RunningService
) -> None:
    text = "👩‍👩‍👧 Anna Berg <b>lives</b> in Vienna,\n and e\u0301te\u0301 came in 1932."
    page, panel = open_page("token-classification", url=f"{token_service.url}/")
    panel.get_by_label("Text").fill(text)
    panel.get_by_text("Options").click()
    panel.get_by_label("Label of a word").select_option("average")
    panel.get_by_role("button", name="Find").click()
    expect(page.locator("[aria-busy]")).to_have_count(0)
    with httpx.Client(base_url=token_service.url, timeout=30) as client:
        reply = post(client, "token-classification", text, aggregation_strategy="average")
    entities = reply.json()
    assert entities
    marks = panel.locator("mark")
    expect(marks).to_have_text([entity["word"] + entity["entity_group"] for entity in entities])
    expect(panel.locator(".passage b")).to_have_count(0)


def test_the_page_shows_the_error_of_the_api(open_page: OpenPage) -> None:
    page, panel = open_page("fill-mask")
    page.fill("#fill-mask-text", "no blank")
    with page.expect_response("**/fill-mask") as response:
        page.keyboard.press("Control+Enter")
    error = response.value.json()
    problem = panel.get_by_role("alert")
    expect(problem.locator(".problem-text")).to_have_text(error["error"])
    expect(problem.locator("dd")).to_have_text(["422", error["error_type"], error["request_id"]])
    expect(panel.locator(".result")).to_be_hidden()


def test_a_model_can_be_selected_and_a_key_is_sent_but_not_stored(
    open_page: OpenPage, bundle_dir: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("one", "two"):
        (models / name).symlink_to(bundle_dir)
    with served(
        bundle_dir, tmp_path, BUNDLE="", MODELS=str(models), API_KEYS=KEY, GUARD="api"
    ) as service:
        page, panel = open_page(url=f"{service.url}/?model=one")
        field = page.get_by_label("API key")
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator(".key-why")).to_contain_text("API key is not valid")
        field.fill(KEY)
        page.keyboard.press("Enter")
        expect(panel.locator(".bar").first).to_be_visible()
        stored = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert stored == [0, 0, ""]
        with page.expect_navigation():
            page.get_by_label("Model", exact=True).and_(page.locator("select")).select_option("two")
        field.fill(KEY)
        page.keyboard.press("Enter")
        code = panel.locator("pre code")
        expect(code).to_contain_text("/v1/models/two/fill-mask")
        expect(code).to_contain_text("Bearer $ALBERT_API_KEY")
        assert KEY not in page.content()


def test_the_printed_command_sends_a_text_with_special_characters(open_page: OpenPage) -> None:
    page, panel = open_page()
    text = 'it\'s $(touch x) `y` \\ "q" !a\n<img src=x onerror=alert(1)> 🎉 [MASK]'
    page.fill("#fill-mask-text", text)
    page.keyboard.press("Control+Enter")
    code = panel.locator("pre code")
    expect(code).to_contain_text("touch x")
    shell = f"curl() {{ printf '%s\\0' \"$@\"; }}\n{code.text_content()}"
    run = subprocess.run(["bash", "-c", shell], capture_output=True, check=True, timeout=30)
    *_, body, _ = run.stdout.decode().split("\0")
    assert json.loads(body)["inputs"] == text
    expect(panel.locator("img")).to_have_count(0)
