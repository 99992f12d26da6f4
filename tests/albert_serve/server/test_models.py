"""Several models behind one address: their names, files and settings, and bundles that are bad."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import onnxruntime
import pytest
from huggingface_hub import InferenceClient
from prometheus_client import CollectorRegistry

from albert_serve.client import AlbertClient
from albert_serve.errors import AlbertServeError, ConfigError, EngineError
from albert_serve.server import models
from albert_serve.server.metrics import Metrics
from albert_serve.server.models import Models, check_models
from albert_serve.settings import Settings
from tests.albert_serve.support import served

REQUEST = {"inputs": "The [MASK] run.", "parameters": {"top_k": 3}}


def load(settings: Settings) -> Models:
    return Models.load(settings, Metrics(CollectorRegistry()))


def settings_of(folder: Path) -> Settings:
    variables = {"ALBERT_SERVE_MODELS": str(folder), "ALBERT_SERVE_THREADS": "1"}
    return Settings.from_environment(variables)


@pytest.fixture
def shelf(bundle_dir: Path, int8_dir: Path, tmp_path: Path) -> Path:
    """A folder with two bundles, and things beside them that are none."""
    folder = tmp_path / "bundles"
    for source, name in ((bundle_dir, "first"), (int8_dir, "second"), (int8_dir, ".partial")):
        shutil.copytree(source, folder / name)
    (folder / "notes").mkdir()
    return folder


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The encoders' sessions that are opened: the bundle's folder, and whether threads spin."""
    opened: list[tuple[str, str]] = []

    class Recorded(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, graph: str, options: Any, **others: Any) -> None:
            super().__init__(graph, options, **others)
            if Path(graph).name == "encoder.onnx":
                spins = options.get_session_config_entry("session.intra_op.allow_spinning")
                opened.append((Path(graph).parent.name, spins))

    monkeypatch.setattr(onnxruntime, "InferenceSession", Recorded)
    return opened


def test_each_model_answers_under_its_name_and_the_first_without_one(
    shelf: Path, tmp_path: Path
) -> None:
    with served(shelf, tmp_path, BUNDLE="", MODELS=str(shelf)) as running:
        url = running.url
        listed = httpx.get(f"{url}/v1/models").json()
        assert listed["default"] == "first"
        assert [model["model_id"] for model in listed["models"]] == ["first", "second"]
        assert httpx.get(f"{url}/info").json() == listed["models"][0]
        assert httpx.get(f"{url}/v1/models/second").json() == listed["models"][1]

        def fill(path: str) -> Any:
            return httpx.post(f"{url}{path}/fill-mask", json=REQUEST).json()

        assert fill("/v1/models/first") == fill("") != fill("/v1/models/second")
        hub = InferenceClient(f"{url}/v1/models/second/fill-mask")
        (of_hub, *_) = hub.fill_mask("The [MASK] run.", top_k=3)
        assert of_hub.score == fill("/v1/models/second")[0]["score"]
        with AlbertClient(url, model="second") as client:
            (best, *_) = client.fill_mask("The [MASK] run.", top_k=3)
            assert best.score == fill("/v1/models/second")[0]["score"]  # type: ignore[union-attr]
        missing = httpx.post(f"{url}/v1/models/third/fill-mask", json=REQUEST)
        assert missing.status_code == 404
        assert "first, second" in missing.json()["error"]
        metrics = httpx.get(f"{url}/metrics").text
        assert 'albert_serve_requests_total{model="second",task="fill-mask"} 5.0' in metrics
        assert 'endpoint="/v1/models/{model}/fill-mask"' in metrics
        assert "third" not in metrics


def test_equal_weights_have_one_encoder_and_threads_of_different_ones_do_not_spin(
    shelf: Path, bundle_dir: Path, tmp_path: Path, sessions: list[tuple[str, str]]
) -> None:
    load(settings_of(shelf))
    assert sessions == [("first", "0"), ("second", "0")]
    for name in ("a", "b"):
        shutil.copytree(bundle_dir, tmp_path / "equal" / name)
    sessions.clear()
    load(settings_of(tmp_path / "equal"))
    assert sessions == [("a", "1")]


def test_the_default_can_be_set_among_what_there_is(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"ALBERT_SERVE_MODELS": str(shelf), "ALBERT_SERVE_DEFAULT_MODEL": "second"}
    assert check_models(Settings.from_environment(chosen)) == "second"
    assert load(Settings.from_environment(chosen)).default.name == "second"
    chosen["ALBERT_SERVE_DEFAULT_MODEL"] = "third"
    with pytest.raises(ConfigError, match=r"'third'.* first, second"):
        check_models(Settings.from_environment(chosen))
    monkeypatch.setattr(models, "no_cuda_reason", lambda: "none")
    with pytest.raises(EngineError, match="CUDA"):
        check_models(settings_of(shelf).model_copy(update={"device": "cuda"}))
    with pytest.raises(AlbertServeError, match="contains no bundle"):
        load(settings_of(shelf / "notes"))


def test_a_bundle_without_heads_is_served_for_its_embeddings(
    bundle_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(bundle_dir, folder)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"heads": {}}
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    settings = Settings.from_environment({"ALBERT_SERVE_BUNDLE": str(folder)})
    assert check_models(settings) == "bare"
    (task,) = load(settings).default.description.tasks
    assert task.name == "feature-extraction"


def misname(folder: Path) -> None:
    folder.rename(folder.with_name("a b"))


def damage(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\xff")


@pytest.mark.parametrize("spoil", [misname, damage])
def test_a_bad_bundle_is_named_while_others_are_served_but_not_alone(
    spoil: Callable[[Path], None], shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(shelf / "first")
    settings = settings_of(shelf)
    assert check_models(settings) == "second"
    assert ("a b" if spoil is misname else "first") in caplog.messages[0]
    loaded = load(settings)
    assert list(loaded.served) == [loaded.default.name] == ["second"]
    shutil.rmtree(shelf / "second")
    for start in (check_models, load):
        with pytest.raises(AlbertServeError):
            start(settings)
