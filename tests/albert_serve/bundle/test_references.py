"""A model by reference: a folder, a checkpoint, a name on a server with the Hub's protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from albert_serve.bundle.checkpoint import find_bundle
from albert_serve.bundle.manifest import Bundle
from albert_serve.client import AlbertClient
from albert_serve.errors import ConfigError
from tests.albert_serve.support import running_service, service_environment
from tests.training.conversion.hub_server import Hub, Repository, serve
from training.model.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.process

TEXT = "the first [MASK] of the year"
FAULTY = ("damaged", "lacking", "empty")
CARD = "---\nlicense: mit\n---\n# A model\n"


@pytest.fixture
def hub(bundle_dir: Path, checkpoint_dir: Path, tmp_path: Path) -> Iterator[Hub]:
    folders = {name: tmp_path / name for name in ("carded", "damaged", "lacking")}
    for folder in folders.values():
        shutil.copytree(bundle_dir, folder)
    content = (folders["damaged"] / "tokenizer.json").read_bytes()
    (folders["damaged"] / "tokenizer.json").write_bytes(content[:-2] + b" \n")
    (folders["lacking"] / "encoder.onnx").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/README.md").write_text(CARD)
    (folders["carded"] / "README.md").write_text(CARD)
    repositories = {
        "us/whole": Repository({"main": folders["carded"], "v1": bundle_dir}),
        "us/private": Repository({"main": bundle_dir}, is_private=True),
        "us/pretrained": Repository({"main": checkpoint_dir}),
        **{f"us/{name}": Repository({"main": tmp_path / name}) for name in FAULTY},
    }
    with serve(repositories) as hub:
        yield hub


def run(
    hub: Hub, folder: Path, *command: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `albert-serve` in a folder, with caches there."""
    environment = hub.environment(folder / "hf") | {"ALBERT_SERVE_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "albert_serve", *command],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def error_of(ended: subprocess.CompletedProcess[str]) -> str:
    """The error of a command, after bars and warnings of the Hub's client."""
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    *_, line = ended.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def folders(cache: Path) -> list[Path]:
    return sorted(cache.glob("hub/*/*"))


def test_a_bundle_of_the_hub_is_served_under_its_name(
    hub: Hub, bundle_dir: Path, tmp_path: Path
) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    environment |= hub.environment(tmp_path / "hf")
    environment |= {"ALBERT_SERVE_CACHE": str(tmp_path / "cache")}
    command = ("albert_serve", "serve", "--bundle", "us/whole")
    with running_service(environment, tmp_path, command) as service:
        info = httpx.get(f"{service.url}/info", timeout=30).json()
        reply = httpx.post(f"{service.url}/fill-mask", json={"inputs": TEXT}, timeout=30)
    assert reply.status_code == 200
    assert service.log.count("Downloading us/whole from the Hub.\n") == 1
    manifest = Bundle.open(bundle_dir).manifest
    assert (info["model_id"], info["revision"]) == ("whole", manifest.revision)
    (folder,) = folders(tmp_path / "cache")
    assert folder.parent.name == hub.repositories["us/whole"].commit("main")
    assert not [file for file in folder.iterdir() if file.is_symlink()]
    listed = manifest.files.keys() | {"manifest.json", "README.md"}
    assert {file.name for file in folder.iterdir()} == listed
    assert (folder / "README.md").read_text() == CARD


def test_a_checkpoint_of_the_hub_is_exported_under_its_name(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": TEXT}))
    command = ("score", "--task", "fill-mask", "--bundle", "us/pretrained", "in.jsonl", "-")
    ended = run(hub, tmp_path, *command)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["text"] == TEXT
    (bundle,) = (tmp_path / "cache/exports").glob("*/*")
    assert bundle.name == "pretrained"


def test_a_local_folder_wins_over_a_name_on_the_hub(
    hub: Hub, bundle_dir: Path, tmp_path: Path
) -> None:
    assert "~/whole" in error_of(run(hub, tmp_path, "info", "~/whole", HOME="~"))
    shutil.copytree(bundle_dir, tmp_path / "us/whole")
    assert run(hub, tmp_path, "info", "us/whole").returncode == 0
    assert not hub.requests


@pytest.mark.extended
def test_the_cache_answers_without_a_connection(hub: Hub, tmp_path: Path) -> None:
    offline = run(hub, tmp_path, "info", "us/whole", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids a download" in error_of(offline)
    first = run(hub, tmp_path, "info", "us/whole", "--json")
    assert first.returncode == 0, first.stderr
    assert len(hub.downloads) == len(set(hub.downloads))
    hub.requests.clear()
    offline = run(hub, tmp_path, "info", "us/whole", "--json", HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout
    assert not hub.requests
    of_tag = run(hub, tmp_path, "info", "us/whole@v1", "--json")
    assert json.loads(of_tag.stdout).keys() == json.loads(first.stdout).keys()
    commits = {hub.repositories["us/whole"].commit(name) for name in ("main", "v1")}
    assert {folder.parent.name for folder in folders(tmp_path / "cache")} == commits
    for snapshot in (tmp_path / "hf/hub/models--us--whole/snapshots").iterdir():
        (snapshot / "encoder.onnx").unlink()
    half = run(hub, tmp_path, "info", "us/whole", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids a download" in error_of(half)
    # The Hub's own cache can be removed, because the links keep the content.
    shutil.rmtree(tmp_path / "hf")
    assert Bundle.open(folders(tmp_path / "cache")[0])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("us/nothing", "{url} has no model of this name"),
        ("us/private", "HF_TOKEN"),
        ("us/whole@v9", "us/whole has no revision v9"),
        ("us/empty", "us/empty is not a bundle"),
        ("us/lacking", "us/lacking lacks encoder.onnx"),
        ("us/damaged", "tokenizer.json has SHA-256"),
    ],
)
def test_a_name_that_cannot_be_served_is_an_error_of_one_line(
    reference: str, message: str, hub: Hub, tmp_path: Path
) -> None:
    line = error_of(run(hub, tmp_path, "serve", "--bundle", reference))
    assert message.format(url=hub.url) in line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for exports and downloads of this process."""
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_exported_once_and_again_when_it_changes_or_its_bundle_is_damaged(
    checkpoint_dir: Path,
    bundle_dir: Path,
    cache: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checkpoint = tmp_path / "mine"
    shutil.copytree(checkpoint_dir, checkpoint)
    with AlbertClient.local(bundle_dir) as albert:
        expected = albert.fill_mask(TEXT)
    for _ in range(2):
        with AlbertClient.local(checkpoint) as albert:
            assert albert.fill_mask(TEXT) == expected
            assert albert.info().model_id == "mine"
    assert capfd.readouterr().err.count("Exporting") == 1
    (bundle,) = cache.glob("exports/*/mine")
    os.truncate(bundle / "encoder.onnx", 100)
    bundle.with_name(".mine.k1ll3d.partial").mkdir()
    assert find_bundle(checkpoint) == bundle
    assert Bundle.open(bundle)
    assert [file.name for file in bundle.parent.iterdir()] == ["mine"]
    printed = capfd.readouterr().err
    assert "The cached bundle is damaged: " in printed
    assert printed.count("Exporting") == 1
    config = json.loads((checkpoint / "config.json").read_bytes())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with AlbertClient.local(checkpoint) as albert:
        assert albert.fill_mask(TEXT) != expected


@pytest.mark.parametrize("mode", [0o757, 0o775])
def test_a_cache_that_others_can_write_to_is_rejected(
    mode: int, checkpoint_dir: Path, cache: Path
) -> None:
    (cache / "exports").mkdir(parents=True)
    (cache / "exports").chmod(mode)
    with pytest.raises(ConfigError, match=r"Other users can write to .*/exports, and so could"):
        find_bundle(checkpoint_dir)


@pytest.mark.usefixtures("cache")
def test_each_precision_and_version_has_an_export_of_its_own(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess[bytes]([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    fp32, int8 = find_bundle(checkpoint_dir), find_bundle(checkpoint_dir, "int8")
    assert find_bundle(checkpoint_dir, "fp32") == fp32
    monkeypatch.setattr("albert_serve.bundle.checkpoint.__version__", "another")
    assert len({fp32, int8, find_bundle(checkpoint_dir)}) == 3


def test_a_folder_that_cannot_be_exported_is_an_error_of_one_line(
    checkpoint_dir: Path, bundle_dir: Path, hub: Hub, tmp_path: Path
) -> None:
    """Export's own error advises --keep-fp32, which `score` does not have."""
    bert, large, file = (tmp_path / name for name in ("bert", "large", "file"))
    shutil.copytree(checkpoint_dir, bert)
    (bert / "config.json").write_text('{"model_type": "bert"}')
    file.write_text("")
    model = load_checkpoint(checkpoint_dir)
    with torch.no_grad():
        model.get_parameter("albert.encoder.attentions.0.query.weight")[0, 0] = 1e6
    save_checkpoint(model, large, tokenizer_from=checkpoint_dir)
    for folder, words, message, variables in (
        (bert, [], "bert cannot be exported in fp32: ", {}),
        (bundle_dir, ["--precision", "int8"], "--precision", {}),
        (bert, [], "Set ALBERT_SERVE_CACHE", {"ALBERT_SERVE_CACHE": f"{file}/cache"}),
        (large, ["--precision", "fp16"], f"{large} cannot be exported in fp16: ", {}),
    ):
        command = ("score", "--task", "fill-mask", "--bundle", str(folder), *words, "-", "-")
        line = error_of(run(hub, tmp_path, *command, **variables))
        assert message in line
    assert f"the options of `albert-serve export {large} BUNDLE`" in line
    assert "--" not in line
    assert not [*(tmp_path / "cache").glob("exports/*/*")]
