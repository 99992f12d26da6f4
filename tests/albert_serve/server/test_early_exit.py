"""`max_layers` and `patience` of `/text-classification`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from albert_serve.api.schemas import EarlyExitInfo, InfoReply, TextClassificationRequest
from albert_serve.bundle.manifest import Bundle, EarlyExitDefaults
from albert_serve.tasks import prepare_request
from albert_serve.tasks.base import EarlyExit
from albert_serve.tasks.load import load_tasks
from albert_serve.tasks.text_classification import ALL_LAYERS, resolve_early_exit
from export.bundle import LayerOptions, export_bundle
from tests.albert_serve.support import local_http
from training.model.checkpoint import load_checkpoint, read_config, save_checkpoint

NUM_LAYERS = 3
LABELS = ("negative", "positive")


@pytest.fixture(scope="module")
def bundle(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """It answers after two layers unless a request asks for more."""
    torch.manual_seed(3)
    model = load_checkpoint(checkpoint_dir, has_exits=True)
    folder = tmp_path_factory.mktemp("adaptive")
    labels = {"id2label": read_config(checkpoint_dir)["id2label"]}
    save_checkpoint(
        model, folder / "checkpoint", tokenizer_from=checkpoint_dir, extra_config=labels
    )
    layers = LayerOptions(max_layers=2)
    return export_bundle(folder / "checkpoint", folder / "bundle", layers=layers).bundle


@pytest.fixture(scope="module")
def http(bundle: Bundle) -> Iterator[httpx.Client]:
    """The service's routes over the bundle, in this process."""
    with local_http(bundle.folder) as client:
        yield client


def ask(http: httpx.Client, inputs: Any, **limits: int) -> Any:
    body = {"inputs": inputs, "parameters": limits}
    return http.post("/text-classification", json=body).raise_for_status().json()


def by_label(scores: list[Any]) -> dict[str, float]:
    return {each["label"]: each["score"] for each in scores}


@pytest.mark.parametrize(
    ("limits", "expected_exit"),
    [
        ({}, EarlyExit(max_layers=2, patience=1)),
        ({"patience": 4}, None),
        ({"patience": 9}, None),
        ({"max_layers": 4}, None),
        ({"patience": 2}, EarlyExit(max_layers=4, patience=2)),
        ({"max_layers": 3}, EarlyExit(max_layers=3, patience=4)),
        ({"max_layers": 3, "patience": 2}, EarlyExit(max_layers=3, patience=2)),
    ],
)
def test_the_models_defaults_are_of_requests_without_limits(
    limits: dict[str, int], expected_exit: EarlyExit | None
) -> None:
    defaults = EarlyExitDefaults(max_layers=2, patience=1)
    assert resolve_early_exit(defaults, 4, **limits) == expected_exit


def test_texts_are_answered_after_the_layers_that_a_request_allows(
    http: httpx.Client, sentences: list[str]
) -> None:
    """tests/export/test_exits.py compares what the engine computes with torch."""
    by_default, one, two, three, patient = (
        [by_label(scores)["positive"] for scores in ask(http, sentences, **limits)]
        for limits in (
            *({}, {"max_layers": 1}, {"max_layers": 2}, {"max_layers": 3}),
            {"max_layers": 3, "patience": 1},
        )
    )
    assert by_default == pytest.approx(two, abs=1e-5)
    for other in (one, three):
        assert other != pytest.approx(two, abs=1e-2)
    settled = [min(abs(score - one[n]), abs(score - two[n])) for n, score in enumerate(patient)]
    assert min(settled) < 1e-5  # after one layer or two
    assert ask(http, sentences, patience=3) == ask(http, sentences, max_layers=3)


@pytest.mark.parametrize(
    ("device", "limits", "warnings"),
    [
        ("cuda", {"patience": 1}, [ALL_LAYERS]),
        ("cuda", {"max_layers": 2}, [ALL_LAYERS]),
        ("cuda", {}, []),
        ("cuda", {"max_layers": NUM_LAYERS}, []),
        ("cpu", {"patience": 1}, []),
    ],
)
def test_a_caller_learns_that_an_engine_on_a_gpu_computes_all_layers(
    bundle: Bundle, device: str, limits: dict[str, int], warnings: list[str]
) -> None:
    task = load_tasks(bundle, device=device)["text-classification"]
    request = TextClassificationRequest.model_validate({"inputs": "a", "parameters": limits})
    [prepared] = prepare_request(task, request)
    assert prepared.warnings == warnings


def test_info_has_the_layers_and_the_defaults(http: httpx.Client) -> None:
    info = InfoReply.model_validate(http.get("/info").json())
    exits = {task.name: task.adaptive_depth for task in info.tasks}
    assert exits.pop("text-classification") == EarlyExitInfo(num_layers=NUM_LAYERS, max_layers=2)
    assert set(exits.values()) == {None}
