"""`max_layers` and `patience` of `/text-classification`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from albert_serve.api.schemas import DepthInfo, InfoReply, TextClassificationRequest
from albert_serve.bundle.manifest import AdaptiveDepth, Bundle
from albert_serve.client import AlbertClient
from albert_serve.local import LocalTransport
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import prepare_request
from albert_serve.tasks.base import EarlyExit
from albert_serve.tasks.load import load_tasks
from albert_serve.tasks.text_classification import ALL_LAYERS, resolve_early_exit
from albert_serve.tokenizer import AlbertTokenizer
from export.write import LayerOptions, export_bundle
from training.evaluation.early_exit import layers_used
from training.model.albert import Batch
from training.model.checkpoint import load_checkpoint, read_config, save_checkpoint
from training.model.heads import AlbertForTasks

NUM_LAYERS = 3
LABELS = ("negative", "positive")


@pytest.fixture(scope="module")
def model(checkpoint_dir: Path) -> AlbertForTasks:
    torch.manual_seed(3)
    return load_checkpoint(checkpoint_dir, has_exits=True).eval()


@pytest.fixture(scope="module")
def bundle(
    model: AlbertForTasks, checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """It answers after two layers unless a request asks for more."""
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
    transport = LocalTransport(bundle.folder, RuntimeOptions(device="cpu", num_threads=1))
    with httpx.Client(transport=transport, base_url="http://local") as client:
        yield client


def expected(model: AlbertForTasks, bundle: Bundle, text: str, **limits: int) -> dict[str, float]:
    """The scores of torch after the layers that the text has."""
    ids = AlbertTokenizer.from_file(bundle.tokenizer_file).encode(text).ids
    batch = Batch(ids=torch.tensor([ids]), types=torch.zeros(1, len(ids), dtype=torch.long))
    with torch.inference_mode():
        rows = model.albert.rows_by_layer(batch, torch.tensor([0]))
        logits_LK = model.exit_logits(rows)[:, 0]
    used = int(layers_used(logits_LK.numpy()[None], limits.get("patience", NUM_LAYERS))[0])
    layer = min(used, limits.get("max_layers", NUM_LAYERS if limits else 2))
    return dict(zip(LABELS, logits_LK[layer - 1].softmax(-1).tolist(), strict=True))


def by_label(scores: list[Any]) -> dict[str, float]:
    pairs = (each if isinstance(each, dict) else each.model_dump() for each in scores)
    return {each["label"]: each["score"] for each in pairs}


@pytest.mark.parametrize(
    ("limits", "expected_depth"),
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
    limits: dict[str, int], expected_depth: EarlyExit | None
) -> None:
    defaults = AdaptiveDepth(max_layers=2, patience=1)
    assert resolve_early_exit(defaults, 4, **limits) == expected_depth


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_layers": 1}, {"max_layers": 3, "patience": 1}],
)
def test_texts_are_answered_after_the_layers_that_a_request_allows(
    http: httpx.Client,
    model: AlbertForTasks,
    bundle: Bundle,
    sentences: list[str],
    limits: dict[str, int],
) -> None:
    body = {"inputs": sentences, "parameters": limits}
    reply = http.post("/text-classification", json=body)
    assert reply.status_code == 200
    for text, scores in zip(sentences, reply.json(), strict=True):
        expected_scores = expected(model, bundle, text, **limits)
        assert by_label(scores) == pytest.approx(expected_scores, abs=1e-4)


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


def test_the_log_says_that_a_gpu_ignores_the_default_depth(
    bundle: Bundle, bundle_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_tasks(bundle, device="cpu")
    load_tasks(Bundle.open(bundle_dir), device="cuda")
    assert caplog.messages == []
    load_tasks(bundle, device="cuda")
    [line] = caplog.messages
    assert line.startswith(f"{bundle.folder}: the defaults {{'max_layers': 2}} of text-class")
    assert line.endswith("have no effect on a GPU: all layers are computed")


def test_info_has_the_layers_and_the_defaults(http: httpx.Client) -> None:
    info = InfoReply.model_validate(http.get("/info").json())
    depths = {task.name: task.adaptive_depth for task in info.tasks}
    assert depths.pop("text-classification") == DepthInfo(num_layers=NUM_LAYERS, max_layers=2)
    assert set(depths.values()) == {None}


def test_a_client_asks_for_fewer_layers(bundle: Bundle, http: httpx.Client) -> None:
    body = {"inputs": "a film", "parameters": {"max_layers": 1}}
    [expected_scores] = http.post("/text-classification", json=body).json()
    with AlbertClient.local(bundle.folder, device="cpu", num_threads=1) as client:
        scores = by_label(client.text_classification("a film", max_layers=1))
    assert scores == pytest.approx(by_label(expected_scores), abs=1e-5)
