"""The page of a model with several classifiers of texts, of which the reader chooses one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from tests.albert_serve.classifiers import LABELS, classifiers, export_classifiers
from tests.albert_serve.support import running_service, service_environment
from tests.albert_serve.web.browsing import OpenPage, assert_bars


@pytest.fixture(scope="module")
def url(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = classifiers(checkpoint_dir)
    bundle = export_classifiers(model, checkpoint_dir, tmp_path_factory.mktemp("heads"))
    environment = service_environment(bundle.folder, tmp_path_factory.mktemp("heads-home"))
    with running_service(environment, tmp_path_factory.mktemp("heads-log")) as running:
        yield f"{running.url}/"


def test_the_reader_chooses_a_classifier(open_page: OpenPage, url: str) -> None:
    page = open_page("text-classification", url=url)
    panel = page.locator("#panel-text-classification")
    choice = panel.get_by_label("Classifier")
    expect(choice.locator("option")).to_have_text(list(LABELS))
    expect(choice).to_have_value("sentiment")
    expect(panel.locator("pre code")).not_to_contain_text("head")
    panel.get_by_label("Text", exact=True).fill("The band played.")
    choice.select_option("topic")
    expect(panel.locator("pre code")).to_contain_text('"head": "topic"')
    panel.get_by_role("button", name="Classify").click()
    body = {"inputs": "The band played.", "parameters": {"head": "topic"}}
    [scores] = httpx.post(f"{url}text-classification", json=body, timeout=30).json()
    assert {one["label"] for one in scores} == set(LABELS["topic"])
    assert_bars(panel.locator(".bars"), [(one["label"], one["score"]) for one in scores])
    choice.select_option("rating")
    panel.get_by_role("button", name="Classify").click()
    expect(panel.locator(".bar-label")).to_have_text(["LABEL_0"])
