"""A service of several models: the page lets choose, and what it shows is of the one chosen."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from playwright.sync_api import Page, expect

from albert_serve.bundle.manifest import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.default_bundle import shipped_bundle
from tests.albert_serve.classifiers import LABELS, classifiers, export_classifiers
from tests.albert_serve.support import Running, served
from tests.albert_serve.web.browsing import OpenPage, ask, assert_bars, percent, show
from tests.export.exporting import export_bundle
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, Task

TASK = "text-classification"
MANY_LABELS = [f"card_payment_with_a_wrong_exchange_rate_{number}" for number in range(77)]
EXAMPLES = {
    TASK: [
        {"inputs": "My card was stolen.", "label": "A theft"},
        {"inputs": {"text": "Where is it?", "text_pair": "It is here."}},
    ]
}
FIGURES = {
    "sentence-order": {"metric": "accuracy", "torch": 51.5, "bundle": 51.5, "count": 1600},
    TASK: {
        "metric": "accuracy",
        "torch": 81.0,
        "bundle": 80.0,
        "count": 90,
        "data": ["tickets.csv"],
    },
}


def export_many_labels(checkpoint: Path, folder: Path) -> Path:
    """Export a model of many labels, with examples of its own and figures in its manifest."""
    content = json.loads((checkpoint / "config.json").read_text())
    torch.manual_seed(1)
    sizes: dict[Task, int] = {
        "fill-mask": content["vocab_size"],
        "sentence-order": 2,
        TASK: len(MANY_LABELS),
    }
    model = AlbertForTasks(AlbertConfig.from_hf(content), sizes)
    labels = {"id2label": {str(number): label for number, label in enumerate(MANY_LABELS)}}
    save_checkpoint(model, folder / "checkpoint", tokenizer_from=checkpoint, extra_config=labels)
    (folder / "examples.json").write_text(json.dumps(EXAMPLES))
    exported = export_bundle(
        folder / "checkpoint", folder / "own", examples=folder / "examples.json"
    )
    manifest = exported.bundle.folder / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "quality": FIGURES}))
    return exported.bundle.folder


@pytest.fixture(scope="module")
def several(
    bundle_dir: Path, checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A service of one model twice, of others with several classifiers and of many labels, and of
    the model that ships.
    """
    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("several")
    heads = export_classifiers(classifiers(checkpoint_dir), checkpoint_dir, made)
    many = export_many_labels(checkpoint_dir, tmp_path_factory.mktemp("own"))
    bundles = {"one": bundle_dir, "two": bundle_dir, "heads": heads.folder, "many": many}
    bundles["shipped"] = shipped_bundle()
    for name, bundle in bundles.items():
        (folder / name).symlink_to(bundle)
    log = tmp_path_factory.mktemp("several-log")
    with served(folder, log, BUNDLE="", MODELS=str(folder)) as running:
        yield running


def command(page: Page) -> str:
    return page.locator("#panel-fill-mask .code code").inner_text()


def test_another_model_is_chosen_and_asked(open_page: OpenPage, several: Running) -> None:
    page = open_page("fill-mask", url=f"{several.url}/?model=one")
    choice = page.get_by_label("Model", exact=True).and_(page.locator("select"))
    expect(choice).to_have_value("one")
    expect(page.locator(".model-name")).to_be_hidden()
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


def test_the_reader_chooses_a_classifier(open_page: OpenPage, several: Running) -> None:
    page = open_page(TASK, url=f"{several.url}/?model=heads")
    panel = page.locator(f"#panel-{TASK}")
    choice = panel.get_by_label("Classifier")
    expect(choice.locator("option")).to_have_text(list(LABELS))
    expect(choice).to_have_value("sentiment")
    expect(panel.locator("pre code")).not_to_contain_text('"head"')
    panel.get_by_label("Text", exact=True).fill("The band played.")
    choice.select_option("topic")
    expect(panel.locator("pre code")).to_contain_text('"head": "topic"')
    panel.get_by_role("button", name="Classify").click()
    with httpx.Client(base_url=f"{several.url}/v1/models/heads", timeout=30) as http:
        [scores] = ask(http, TASK, "The band played.", {"head": "topic"})
    assert {one["label"] for one in scores} == set(LABELS["topic"])
    assert_bars(panel.locator(".bars"), [(one["label"], one["score"]) for one in scores])


def test_the_best_labels_are_shown_and_all_on_request(
    open_page: OpenPage, several: Running
) -> None:
    page = open_page(TASK, url=f"{several.url}/?model=many")
    panel = page.locator(f"#panel-{TASK}")
    with httpx.Client(base_url=f"{several.url}/v1/models/many", timeout=30) as http:
        [scores] = ask(http, TASK, "My card was stolen.")
    expected = [(one["label"], one["score"]) for one in scores]
    assert len(expected) == len(MANY_LABELS)
    assert_bars(panel.locator(".bars"), expected[:5])
    panel.get_by_text("Show all 77 labels").click()
    assert_bars(panel.locator(".bars"), expected)


def test_examples_and_figures_are_those_of_the_model(open_page: OpenPage, several: Running) -> None:
    page = open_page("", url=f"{several.url}/?model=many")
    expect(page.locator(".tabs [aria-current=true]")).to_have_text("Classification")
    panel = page.locator(f"#panel-{TASK}")
    expect(panel.locator(".measured")).to_have_text("On tickets.csv: accuracy 80.0% (90 answers).")
    expect(panel.locator(".chip")).to_have_text(["A theft", "Where is it?"])
    expect(panel.get_by_label("Text", exact=True)).to_have_value("My card was stolen.")
    panel.get_by_role("button", name="Where is it?").click()
    expect(panel.locator("pre code")).to_contain_text('"text_pair": "It is here."')
    show(page, "sentence-order")
    expect(page.locator("#panel-sentence-order .measured")).to_have_text(
        "On labelled data: accuracy 51.5% (1,600 answers)."
    )
    show(page, "fill-mask")
    expect(page.locator("#panel-fill-mask .measured")).to_be_empty()


def test_the_shipped_models_examples_and_limits_are_shown(
    open_page: OpenPage, several: Running
) -> None:
    """All of the list, right or wrong, and what the figures are of."""
    page = open_page("", url=f"{several.url}/?model=shipped")
    manifest = Bundle.open(shipped_bundle()).manifest
    for task, examples in manifest.examples.items():
        chips = page.locator(f"#panel-{task} .chip")
        expect(chips).to_have_count(len(examples))
        expect(chips.last).to_have_text(examples[-1].label or re.compile("Why was the library"))
    expect(page.locator(f"#panel-{TASK} .measured")).to_have_text(
        re.compile(r"^On film reviews of SST-2, held out: accuracy \d\d\.\d% \(872 answers\)\.$")
    )
    show(page, "sentence-order")
    share = manifest.evaluation["single_sentence_order_accuracy"]
    assert isinstance(share, float)
    expect(page.get_by_role("note")).to_contain_text(
        "Single sentences are barely better than chance: of two neighbouring ones of like "
        f"lengths, this model recognises the order in {percent(share)} of the cases"
    )
