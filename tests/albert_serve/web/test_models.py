"""A service of several models: the page lets choose, and what it shows is of the one chosen."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.albert_serve.support import running_service, service_environment
from tests.albert_serve.web.browsing import OpenPage


@pytest.fixture(scope="module")
def several(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("several")
    for name in ("one", "two"):
        (folder / name).symlink_to(bundle_dir)
    environment = service_environment(bundle_dir, tmp_path_factory.mktemp("several-home"))
    environment |= {"ALBERT_SERVE_BUNDLE": "", "ALBERT_SERVE_MODELS": str(folder)}
    with running_service(environment, tmp_path_factory.mktemp("several-log")) as running:
        yield f"{running.url}/"


def command(page: Page) -> str:
    return page.locator("#panel-fill-mask .code code").inner_text()


def test_another_model_is_chosen_and_asked(open_page: OpenPage, several: str) -> None:
    page = open_page("fill-mask", url=several)
    choice = page.get_by_label("Model", exact=True).and_(page.locator("select"))
    expect(choice).to_have_value("one")
    expect(page.locator(".model-name")).to_be_hidden()
    assert "/v1/models" not in command(page)
    with page.expect_navigation():
        choice.select_option("two")
    expect(page).to_have_title("two · albert-serve")
    expect(choice).to_have_value("two")
    expect(page.locator("#panel-fill-mask .bar-label").first).to_be_visible()
    assert "/v1/models/two/fill-mask" in command(page)
    done = subprocess.run(
        ["bash", "-c", command(page)], capture_output=True, check=True, timeout=30
    )
    words = [one["token_str"] for one in json.loads(done.stdout)]
    expect(page.locator("#panel-fill-mask .bar-label")).to_have_text(words)
    page.get_by_role("button", name="Python").first.click()
    assert 'model="two") as albert' in command(page)
