"""Several models behind one address: their names, files and settings, and bundles that are bad."""

from __future__ import annotations

import asyncio
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
from albert_serve.errors import AlbertServeError, ConfigError
from albert_serve.server.metrics import Metrics
from albert_serve.server.models import Models, check_models
from albert_serve.settings import Settings
from tests.albert_serve.support import served

REQUEST = {"inputs": "The [MASK] run.", "parameters": {"top_k": 3}}


def load(settings: Settings) -> Models:
    return Models.load(settings, Metrics(CollectorRegistry()))


def settings_of(models: Path) -> Settings:
    variables = {"ALBERT_SERVE_MODELS": str(models), "ALBERT_SERVE_THREADS": "1"}
    return Settings.from_environment(variables)


def damage(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\xff")


def truncate(folder: Path) -> None:
    os.truncate(folder / "encoder.onnx", 100)


@pytest.fixture
def shelf(bundle_dir: Path, int8_dir: Path, tmp_path: Path) -> Path:
    """A folder with two bundles, and things beside them that are none."""
    folder = tmp_path / "bundles"
    shutil.copytree(bundle_dir, folder / "first")
    shutil.copytree(int8_dir, folder / "second")
    shutil.copytree(int8_dir, folder / ".partial")
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
        assert [model["precision"] for model in listed["models"]] == ["fp32", "int8"]
        assert httpx.get(f"{url}/info").json() == listed["models"][0]
        for path in ("/v1/models/second", "/v1/models/second/info"):
            assert httpx.get(url + path).json() == listed["models"][1]
        assert httpx.get(f"{url}/v1/models/second/health").json() == {"status": "ok"}

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
        assert missing.json()["error"] == "there is no model 'third'. Choose one of first, second."
        metrics = httpx.get(f"{url}/metrics").text
        assert 'albert_serve_requests_total{model="second",task="fill-mask"} 5.0' in metrics
        assert 'endpoint="/v1/models/{model}/fill-mask"' in metrics
        assert "third" not in metrics


def test_a_folder_without_bundles_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(AlbertServeError, match="contains no bundle's folder"):
        load(settings_of(tmp_path))


def test_bundles_of_the_same_weights_have_one_encoder(
    bundle_dir: Path, tmp_path: Path, sessions: list[tuple[str, str]]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(bundle_dir, tmp_path / name)
    load(settings_of(tmp_path))
    assert sessions == [("a", "1")]


def test_threads_of_different_models_do_not_wait_actively(
    shelf: Path, sessions: list[tuple[str, str]]
) -> None:
    load(settings_of(shelf))
    assert sessions == [("first", "0"), ("second", "0")]


def test_the_default_can_be_set(shelf: Path) -> None:
    chosen = {"ALBERT_SERVE_MODELS": str(shelf), "ALBERT_SERVE_DEFAULT_MODEL": "second"}
    assert check_models(Settings.from_environment(chosen)) == "second"
    assert load(Settings.from_environment(chosen)).default.name == "second"
    chosen["ALBERT_SERVE_DEFAULT_MODEL"] = "third"
    with pytest.raises(ConfigError, match="DEFAULT_MODEL is 'third'; there are first, second"):
        check_models(Settings.from_environment(chosen))


def test_a_bundle_without_heads_is_served_for_its_embeddings(
    bundle_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(bundle_dir, folder)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"heads": {}}
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    settings = Settings.from_environment({"ALBERT_SERVE_BUNDLE": str(folder)})
    assert check_models(settings) == "bare"
    assert caplog.messages == ["bare has no head, so it answers only for embeddings"]

    async def names() -> list[str]:
        models = Models.load(settings, Metrics(CollectorRegistry()))
        models.start()
        served = [task.name for task in models.default.description.tasks]
        await models.close()
        return served

    assert asyncio.run(names()) == ["feature-extraction"]


def link_outside(folder: Path) -> None:
    """The hash fits, and the runtime follows no link out of the folder."""
    weights = folder / "model.safetensors"
    shutil.move(weights, folder.parent.parent / "elsewhere.safetensors")
    weights.symlink_to(folder.parent.parent / "elsewhere.safetensors")


def leave_a_manifest(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name != "manifest.json":
            file.unlink()


def nest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def make_a_pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def misname(folder: Path) -> None:
    folder.rename(folder.with_name("a b"))


SPOILED = [link_outside, leave_a_manifest, nest, make_a_pipe, misname, damage, truncate]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_bad_bundle_is_named_while_others_start_and_alone_it_is_no_start(
    spoil: Callable[[Path], None], shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(shelf / "first")
    settings = settings_of(shelf)
    assert check_models(settings) == "second"
    name = "a b" if spoil is misname else "first"
    assert name in caplog.text
    models = load(settings)
    assert list(models.served) == ["second"]
    assert models.default.name == "second"
    shutil.rmtree(shelf / "second")
    for start in (check_models, load):
        with pytest.raises(AlbertServeError) as caught:
            start(settings)
        assert "\n" not in str(caught.value)
