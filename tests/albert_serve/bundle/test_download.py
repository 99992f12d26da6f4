"""Bundles on the Hugging Face Hub, from a server on this machine that speaks its protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from albert_serve.bundle.manifest import Bundle
from tests.albert_serve.support import running_service, service_environment
from tests.training.conversion.hub_server import Hub, Repository, serve

pytestmark = pytest.mark.process

CARD = "---\nlicense: mit\n---\n# A model\n"


@pytest.fixture
def hub(bundle_dir: Path, tmp_path: Path) -> Iterator[Hub]:
    damaged, lacking, empty = (tmp_path / name for name in ("damaged", "lacking", "empty"))
    for folder in (damaged, lacking):
        shutil.copytree(bundle_dir, folder)
    content = (damaged / "tokenizer.json").read_bytes()
    (damaged / "tokenizer.json").write_bytes(content[:-2] + b" \n")
    (lacking / "encoder.onnx").unlink()
    empty.mkdir()
    carded = tmp_path / "carded"
    shutil.copytree(bundle_dir, carded)
    (carded / "README.md").write_text(CARD)
    (empty / "README.md").write_text("nothing")
    repositories = {
        "us/whole": Repository({"main": carded, "v1": bundle_dir}),
        "us/private": Repository({"main": bundle_dir}, is_private=True),
        "us/damaged": Repository({"main": damaged}),
        "us/lacking": Repository({"main": lacking}),
        "us/empty": Repository({"main": empty}),
    }
    with serve(repositories) as hub:
        yield hub


def run(
    hub: Hub, folder: Path, *command: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `albert-serve` in a folder, with caches there."""
    given = {
        **hub.environment(folder / "hf"),
        "ALBERT_SERVE_CACHE": str(folder / "cache"),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-m", "albert_serve", *command],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


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
        body = {"inputs": "the first [MASK] of the year"}
        reply = httpx.post(f"{service.url}/fill-mask", json=body, timeout=30)
    assert reply.status_code == 200
    assert service.log.count("downloading us/whole from the Hub\n") == 1
    assert info["model_id"] == "whole"
    assert info["revision"] == Bundle.open(bundle_dir).manifest.revision
    (folder,) = folders(tmp_path / "cache")
    assert folder.parent.name == hub.repositories["us/whole"].commit("main")
    assert not [file for file in folder.iterdir() if file.is_symlink()]
    listed = Bundle.open(bundle_dir).manifest.files.keys() | {"manifest.json", "README.md"}
    assert {file.name for file in folder.iterdir()} == listed
    assert (folder / "README.md").read_text() == CARD


@pytest.mark.parametrize(
    "path", ["./us/whole", "us/whole/", "~/whole", "linked/whole", "linked/missing"]
)
def test_a_path_is_never_asked_of_the_hub(path: str, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/whole").symlink_to("nothing")
    ended = run(hub, tmp_path, "info", path, HOME=str(tmp_path))
    assert ended.returncode == 1
    assert not hub.requests
    *_, line = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert path.strip("./~") in line


@pytest.mark.extended
def test_what_is_in_the_cache_is_not_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    first = run(hub, tmp_path, "info", "us/whole", "--json")
    assert first.returncode == 0, first.stderr
    assert len(hub.downloads) == len(set(hub.downloads))
    hub.requests.clear()
    offline = run(hub, tmp_path, "info", "us/whole", "--json", HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout
    assert not hub.requests
    of_tag = run(hub, tmp_path, "info", "us/whole@v1", "--json")
    assert json.loads(of_tag.stdout).keys() == json.loads(first.stdout).keys()
    commits = [hub.repositories["us/whole"].commit(name) for name in ("main", "v1")]
    assert [folder.parent.name for folder in folders(tmp_path / "cache")] == sorted(
        map(str, commits)
    )
    # The Hub's own cache can be removed: the links hold the content.
    shutil.rmtree(tmp_path / "hf")
    assert Bundle.open(folders(tmp_path / "cache")[0])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("us/nothing", "us/nothing is no folder here, and {url} has no model of that name"),
        ("us/private", "if it is private, set HF_TOKEN"),
        ("us/whole@v9", "us/whole has no revision v9"),
        ("us/empty", "us/empty is not a bundle: it has no manifest.json"),
        ("us/lacking", "us/lacking lacks encoder.onnx, which its manifest.json lists"),
        ("us/damaged", "tokenizer.json has SHA-256"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_one_line(
    reference: str, message: str, hub: Hub, tmp_path: Path
) -> None:
    ended = run(hub, tmp_path, "serve", "--bundle", reference)
    assert ended.returncode == 1
    *_, line = ended.stderr.splitlines()  # after bars and warnings of the Hub's client
    assert line.startswith("error: ")
    assert message.format(url=hub.url) in line
    assert "Traceback" not in ended.stderr


@pytest.mark.extended
def test_errors_without_a_connection(hub: Hub, tmp_path: Path) -> None:
    offline = run(hub, tmp_path, "info", "us/whole", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "HF_HUB_OFFLINE forbids a download" in offline.stderr
    assert run(hub, tmp_path, "info", "us/whole").returncode == 0
    (snapshot,) = (tmp_path / "hf/hub/models--us--whole/snapshots").iterdir()
    (snapshot / "encoder.onnx").unlink()
    half = run(hub, tmp_path, "info", "us/whole", HF_HUB_OFFLINE="1")
    assert half.returncode == 1
    assert "us/whole" in half.stderr
    assert "HF_HUB_OFFLINE forbids a download" in half.stderr
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    full = run(hub, tmp_path, "info", "us/whole", ALBERT_SERVE_CACHE=str(unwritable / "cache"))
    assert full.returncode == 1
    assert "set ALBERT_SERVE_CACHE to a folder that can" in full.stderr


def test_a_folder_wins_over_a_bundle_of_the_hub(hub: Hub, bundle_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle_dir, tmp_path / "us/whole")
    assert run(hub, tmp_path, "info", "us/whole").returncode == 0
    assert not hub.requests
