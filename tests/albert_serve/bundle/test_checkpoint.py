"""A checkpoint in place of a bundle: from a folder, and from a server with the Hub's protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import torch

from albert_serve.bundle.checkpoint import find_bundle
from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from albert_serve.errors import ConfigError
from tests.albert_serve.bundle.test_download import run
from tests.albert_serve.support import running_service, service_environment
from tests.training.conversion.hub_server import Repository, serve
from training.model.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.process
TEXT = "the first [MASK] of the year"


def test_a_folder_is_exported_once_and_again_when_it_changes(
    checkpoint_dir: Path,
    bundle_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path / "cache"))
    checkpoint = tmp_path / "mine"
    shutil.copytree(checkpoint_dir, checkpoint)
    with AlbertClient.local(bundle_dir) as albert:
        expected = albert.fill_mask(TEXT)
    for _ in range(2):
        with AlbertClient.local(checkpoint) as albert:
            assert albert.fill_mask(TEXT) == expected
            assert albert.info().model_id == "mine"
    assert capfd.readouterr().err.count("exporting") == 1
    config = json.loads((checkpoint / "config.json").read_bytes())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with AlbertClient.local(checkpoint) as albert:
        assert albert.fill_mask(TEXT) != expected


def test_a_damaged_bundle_is_exported_again_and_leftovers_are_removed(
    checkpoint_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path))
    bundle = find_bundle(checkpoint_dir)
    revision = Bundle.open(bundle).manifest.revision
    leftover = bundle.with_name(".mine.k1ll3d.partial")
    for damage in (truncate_a_graph, remove_the_manifest):
        leftover.mkdir()
        damage(bundle)
        assert find_bundle(checkpoint_dir) == bundle
        assert Bundle.open(bundle).manifest.revision == revision
        assert [file.name for file in bundle.parent.iterdir()] == [bundle.name]
    assert capfd.readouterr().err.count("the cached bundle is damaged: ") == 2


def truncate_a_graph(bundle: Path) -> None:
    os.truncate(bundle / "encoder.onnx", 100)


def remove_the_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_cache_that_others_can_write_to_is_rejected(
    mode: int, checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path))
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports").chmod(mode)
    with pytest.raises(ConfigError, match=r"other users can write to .*/exports, and so could"):
        find_bundle(checkpoint_dir)


def test_each_precision_and_version_has_an_export_of_its_own(
    checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path))
    done = subprocess.CompletedProcess[bytes]([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    fp32, int8 = find_bundle(checkpoint_dir), find_bundle(checkpoint_dir, "int8")
    assert find_bundle(checkpoint_dir, "fp32") == fp32
    monkeypatch.setattr("albert_serve.bundle.checkpoint.__version__", "another")
    assert len({fp32, int8, find_bundle(checkpoint_dir)}) == 3


def test_a_checkpoint_of_the_hub_is_served_under_its_name(
    checkpoint_dir: Path, tmp_path: Path
) -> None:
    with serve({"us/pretrained": Repository({"main": checkpoint_dir})}) as hub:
        environment = service_environment(tmp_path, tmp_path / "home")
        environment |= hub.environment(tmp_path / "hf")
        environment |= {"ALBERT_SERVE_CACHE": str(tmp_path / "cache")}
        command = ("albert_serve", "serve", "--bundle", "us/pretrained")
        with running_service(environment, tmp_path, command) as service:
            info = httpx.get(f"{service.url}/info", timeout=30).json()
            reply = httpx.post(f"{service.url}/fill-mask", json={"inputs": TEXT}, timeout=30)
    assert info["model_id"] == "pretrained"
    assert reply.status_code == 200


def test_errors_of_one_line(checkpoint_dir: Path, bundle_dir: Path, tmp_path: Path) -> None:
    bert = tmp_path / "bert"
    shutil.copytree(checkpoint_dir, bert)
    (bert / "config.json").write_text('{"model_type": "bert"}')
    with serve({}) as hub:
        for folder, words, message in (
            (bert, [], "bert cannot be exported in fp32: "),
            (bundle_dir, ["--precision", "int8"], "--precision is for the export of one"),
        ):
            command = ("score", "--task", "fill-mask", "--bundle", str(folder), *words, "-", "-")
            ended = run(hub, tmp_path, *command)
            assert ended.returncode == 1
            *_, line = ended.stderr.splitlines()
            assert line.startswith("error: ")
            assert message in line
    assert not [*(tmp_path / "cache").glob("exports/*/*")]


def test_an_error_of_export_names_no_option_that_the_command_lacks(
    checkpoint_dir: Path, tmp_path: Path
) -> None:
    """Export's own error advises --keep-fp32, which `serve` does not have."""
    model = load_checkpoint(checkpoint_dir)
    with torch.no_grad():
        model.get_parameter("albert.encoder.attentions.0.query.weight")[0, 0] = 1e6
    save_checkpoint(model, tmp_path / "large", tokenizer_from=checkpoint_dir)
    with serve({}) as hub:
        ended = run(hub, tmp_path, "serve", "--bundle", "./large", "--precision", "fp16")
    assert ended.returncode == 1
    *_, line = ended.stderr.splitlines()
    large = tmp_path / "large"
    assert line.startswith(f"error: {large} cannot be exported in fp16: ")
    assert "the largest of fp16. " in line
    assert line.endswith(
        f"`albert-serve export {large} BUNDLE` has options for this; pass its BUNDLE here."
    )
    assert "--" not in line
