"""The page of a model with many labels, with examples of its own, and figures in its manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from playwright.sync_api import expect

from albert_serve.bundle.manifest import TaskExample
from albert_serve.config import AlbertConfig
from export.write import export_bundle
from tests.albert_serve.support import running_service, service_environment
from tests.albert_serve.web.browsing import OpenPage, ask, assert_bars
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, Task

NUM_LABELS = 77
LABELS = [f"card_payment_with_a_wrong_exchange_rate_{number}" for number in range(NUM_LABELS)]
EXAMPLES = {
    "text-classification": [
        TaskExample(inputs="My card was stolen.", label="A theft"),
        TaskExample(inputs={"text": "Where is it?", "text_pair": "It is here."}),
    ]
}
FIGURES = {
    "sentence-order": {"metric": "accuracy", "torch": 51.5, "bundle": 51.5, "count": 1600},
    "text-classification": {"metric": "accuracy", "torch": 90.0, "bundle": 89.5, "count": 200},
    "fill-mask": {"metric": "agreement", "torch": 100.0, "bundle": 99.0, "count": 500},
}


@pytest.fixture(scope="module")
def bundle(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    content = json.loads((checkpoint_dir / "config.json").read_text())
    torch.manual_seed(1)
    sizes: dict[Task, int] = {
        "fill-mask": content["vocab_size"],
        "sentence-order": 2,
        "text-classification": NUM_LABELS,
    }
    model = AlbertForTasks(AlbertConfig.from_hf(content), sizes)
    labels = {"id2label": {str(number): label for number, label in enumerate(LABELS)}}
    save_checkpoint(
        model, folder / "checkpoint", tokenizer_from=checkpoint_dir, extra_config=labels
    )
    exported = export_bundle(folder / "checkpoint", folder / "own", examples=EXAMPLES)
    manifest = exported.bundle.folder / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "quality": FIGURES}))
    return exported.bundle.folder


@pytest.fixture(scope="module")
def own(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    environment = service_environment(bundle, tmp_path_factory.mktemp("own-home"))
    with running_service(environment, tmp_path_factory.mktemp("own-log")) as running:
        yield f"{running.url}/"


@pytest.fixture(scope="module")
def own_client(own: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own, timeout=30) as http:
        yield http


def test_the_best_labels_are_shown_and_all_on_request(
    open_page: OpenPage, own: str, own_client: httpx.Client
) -> None:
    page = open_page("text-classification", url=own)
    panel = page.locator("#panel-text-classification")
    [scores] = ask(own_client, "text-classification", "My card was stolen.")
    expected = [(one["label"], one["score"]) for one in scores]
    assert len(expected) == NUM_LABELS
    assert_bars(panel.locator(".bars"), expected[:5])
    panel.get_by_role("button", name="Show all 77 labels").click()
    assert_bars(panel.locator(".bars"), expected)
    panel.get_by_role("button", name="Classify").click()
    expect(panel.locator(".bar")).to_have_count(NUM_LABELS)
    panel.get_by_role("button", name="Show the best 5").click()
    assert_bars(panel.locator(".bars"), expected[:5])


def test_the_examples_are_those_of_the_model(open_page: OpenPage, own: str) -> None:
    page = open_page("text-classification", url=own)
    panel = page.locator("#panel-text-classification")
    expect(panel.locator(".chip")).to_have_text(["A theft", "Where is it?"])
    expect(page.locator("#text-classification-text")).to_have_value("My card was stolen.")
    panel.get_by_role("button", name="Where is it?").click()
    expect(panel.locator("pre code")).to_contain_text('"text_pair": "It is here."')
    panel.get_by_role("button", name="A theft").click()
    expect(panel.locator("pre code")).not_to_contain_text("text_pair")


def test_it_says_what_the_model_cannot_do(open_page: OpenPage, own: str) -> None:
    page = open_page("sentence-order", url=own)
    best = page.get_by_role("button", name="Find the best order")
    expect(best).to_have_accessible_description(
        "This model does not know sentence order: it tells two texts in order from the same two "
        "swapped in 51.5% of the cases, where chance is 50%. Take what it finds as a guess."
    )
    expect(page.locator("#order-limit")).to_be_visible()
    expect(page.locator("#panel-sentence-order .measured")).to_have_text(
        "On labelled data: accuracy 51.5% (1,600 answers)."
    )
    page.get_by_role("tab", name="Fill mask").click()
    expect(page.locator("#panel-fill-mask .measured")).to_have_count(0)
