"""A service of several models: their names and weights, the default model, and bad bundles."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import onnxruntime
import pytest
from prometheus_client import CollectorRegistry

from albert_serve.errors import AlbertServeError, ConfigError, EngineError
from albert_serve.server import models
from albert_serve.server.metrics import Metrics
from albert_serve.server.models import Models, check_models
from albert_serve.settings import Settings
from tests.albert_serve.support import served

REQUEST = {"inputs": ["The [MASK] run.", "a [MASK]"]}


def load(settings: Settings) -> Models:
    return Models.load(settings, Metrics(CollectorRegistry()))


def settings_of(folder: Path) -> Settings:
    variables = {"ALBERT_SERVE_MODELS": str(folder), "ALBERT_SERVE_THREADS": "1"}
    return Settings.from_environment(variables)


@pytest.fixture
def models_dir(bundle_dir: Path, int8_dir: Path, tmp_path: Path) -> Path:
    """A folder with two bundles, and two folders that are not used as bundles."""
    folder = tmp_path / "bundles"
    for source, name in ((bundle_dir, "first"), (int8_dir, "second"), (int8_dir, ".partial")):
        shutil.copytree(source, folder / name)
    (folder / "notes").mkdir()
    return folder


def test_each_model_answers_at_its_name_and_the_first_is_the_default(
    models_dir: Path, tmp_path: Path
) -> None:
    """Each text is a batch, because no batch can have more than one token."""
    with served(
        models_dir, tmp_path, BUNDLE="", MODELS=str(models_dir), MAX_BATCH_TOKENS="1"
    ) as running:
        url = running.url
        reply = httpx.get(f"{url}/v1/models").json()
        assert reply["default"] == "first"
        assert [model["model_id"] for model in reply["models"]] == ["first", "second"]
        assert httpx.get(f"{url}/info").json() == reply["models"][0]
        assert httpx.get(f"{url}/v1/models/second").json() == reply["models"][1]

        def fill(path: str) -> Any:
            return httpx.post(f"{url}{path}/fill-mask", json=REQUEST).json()

        assert fill("/v1/models/first") == fill("") != fill("/v1/models/second")
        reply = httpx.post(f"{url}/v1/models/third/fill-mask", json=REQUEST)
        assert reply.status_code == 404
        assert "first, second" in reply.json()["error"]
        metrics = httpx.get(f"{url}/metrics").text
        assert 'albert_serve_requests_total{model="first",task="fill-mask"} 2.0' in metrics
        assert 'albert_serve_batch_inputs_count{model="first"} 4.0' in metrics
        assert 'endpoint="/v1/models/{model}/fill-mask"' in metrics
        assert "third" not in metrics


def test_models_with_equal_weights_share_an_encoder_and_others_do_not_spin(
    models_dir: Path, bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records the encoders that are opened: the bundle's folder, and whether threads spin."""
    sessions: list[tuple[str, str]] = []

    class RecordedSession(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, graph: str, options: Any, **keywords: Any) -> None:
            super().__init__(graph, options, **keywords)
            if Path(graph).name == "encoder.onnx":
                spins = options.get_session_config_entry("session.intra_op.allow_spinning")
                sessions.append((Path(graph).parent.name, spins))

    monkeypatch.setattr(onnxruntime, "InferenceSession", RecordedSession)
    first, second = load(settings_of(models_dir)).served.values()
    assert sessions == [("first", "0"), ("second", "0")]
    assert first.limits.large is second.limits.large
    assert first.limits.large.max_bytes == 16 * first.settings.max_body_bytes
    for name in ("a", "b"):
        shutil.copytree(bundle_dir, tmp_path / "equal" / name)
    sessions.clear()
    load(settings_of(tmp_path / "equal"))
    assert sessions == [("a", "1")]


def test_the_default_model_can_be_set_to_an_existing_model(models_dir: Path) -> None:
    settings = settings_of(models_dir).model_copy(update={"default_model": "second"})
    assert check_models(settings) == load(settings).default.name == "second"
    with pytest.raises(ConfigError, match=r"'third'.* first, second"):
        check_models(settings.model_copy(update={"default_model": "third"}))


def test_a_missing_device_and_a_folder_without_bundles_are_errors(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "no_cuda_reason", lambda: "none")
    with pytest.raises(EngineError, match="CUDA"):
        check_models(settings_of(models_dir).model_copy(update={"device": "cuda"}))
    with pytest.raises(AlbertServeError, match="contains no bundle"):
        load(settings_of(models_dir / "notes"))


def test_bad_bundles_are_logged_and_skipped_unless_there_are_no_others(
    models_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(models_dir / "first", models_dir / "damaged")
    with (models_dir / "damaged/model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\xff")
    (models_dir / "first").rename(models_dir / "a b")
    settings = settings_of(models_dir)
    assert check_models(settings) == "second"
    assert "a b" in caplog.messages[0]
    assert "damaged" in caplog.messages[1]
    loaded = load(settings)
    assert list(loaded.served) == [loaded.default.name] == ["second"]
    for removed in ("second", "damaged"):
        shutil.rmtree(models_dir / removed)
        for start in (check_models, load):
            with pytest.raises(AlbertServeError):
                start(settings)
