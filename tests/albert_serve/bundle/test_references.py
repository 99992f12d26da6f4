"""A model by reference: a folder, a checkpoint, a name on the Hub, a tag in BentoML's store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from albert_serve.bundle import store
from albert_serve.bundle.checkpoint import find_bundle
from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from albert_serve.client import AlbertClient
from albert_serve.errors import BundleError, ConfigError
from tests.training.conversion.hub_server import Hub, Repository, serve

# BentoML imports what is deprecated.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TEXT = "the first [MASK] of the year"


@pytest.fixture
def hub(bundle_dir: Path, checkpoint_dir: Path, tmp_path: Path) -> Iterator[Hub]:
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle_dir, damaged)
    content = (damaged / "tokenizer.json").read_bytes()
    (damaged / "tokenizer.json").write_bytes(content[:-2] + b" \n")
    repositories = {
        "us/whole": Repository({"main": bundle_dir}),
        "us/pretrained": Repository({"main": checkpoint_dir}),
        "us/damaged": Repository({"main": damaged}),
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


@pytest.mark.parametrize(
    ("reference", "cache"), [("us/whole", "hub"), ("us/pretrained", "exports")]
)
def test_a_bundle_or_checkpoint_of_the_hub_answers_and_needs_no_connection_again(
    reference: str, cache: str, hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": TEXT}))
    command = ("score", "--task", "fill-mask", "--bundle", reference, "in.jsonl", "-")
    online = run(hub, tmp_path, *command)
    assert online.returncode == 0, online.stderr
    assert json.loads(online.stdout)["text"] == TEXT
    (bundle,) = (tmp_path / "cache" / cache).glob("*/*")
    assert bundle.name == reference.removeprefix("us/")
    hub.requests.clear()
    offline = run(hub, tmp_path, *command, HF_HUB_OFFLINE="1")
    assert offline.stdout == online.stdout
    assert not hub.requests


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("us/nothing", "{url} has no model of this name. If it is private, set HF_TOKEN"),
        ("us/damaged", "tokenizer.json has SHA-256"),
    ],
)
def test_a_name_that_cannot_be_served_is_an_error_of_one_line(
    reference: str, message: str, hub: Hub, tmp_path: Path
) -> None:
    ended = run(hub, tmp_path, "serve", "--bundle", reference)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    *_, line = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert message.format(url=hub.url) in line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for exports and downloads of this process."""
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("cache")
def test_a_folder_is_exported_once_and_again_when_it_changes(
    checkpoint_dir: Path, bundle_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
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
    config = json.loads((checkpoint / "config.json").read_bytes())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with AlbertClient.local(checkpoint) as albert:
        assert albert.fill_mask(TEXT) != expected


def test_a_cache_that_others_can_write_to_is_rejected(checkpoint_dir: Path, cache: Path) -> None:
    (cache / "exports").mkdir(parents=True)
    (cache / "exports").chmod(0o775)
    with pytest.raises(ConfigError, match=r"Other users can write to .*/exports, and so could"):
        find_bundle(checkpoint_dir)


@pytest.mark.usefixtures("cache")
def test_each_precision_has_an_export_of_its_own(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess[bytes]([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    fp32, int8 = find_bundle(checkpoint_dir), find_bundle(checkpoint_dir, "int8")
    assert find_bundle(checkpoint_dir, "fp32") == fp32 != int8


@pytest.mark.usefixtures("cache")
def test_a_folder_that_cannot_be_exported_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(BundleError, match="bert cannot be exported in fp32: ") as caught:
        find_bundle(tmp_path / "bert")
    assert "\n" not in str(caught.value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A BENTOML_HOME of this test, also in this process, where BentoML keeps the first one."""
    from bentoml._internal.configuration.containers import BentoMLContainer as Container
    from bentoml._internal.models import ModelStore

    folder = tmp_path / "home"
    (folder / "models").mkdir(parents=True)
    monkeypatch.setenv("BENTOML_HOME", str(folder))
    Container.model_store.set(ModelStore(folder / "models"))
    Container.model_store_dir.set(str(folder / "models"))
    yield folder
    for provider in (Container.model_store, Container.model_store_dir):
        provider.reset()


def stored(folder: Path, *options: str) -> None:
    assert main(["import", str(folder), *options]) == 0


def test_an_imported_bundle_is_a_model_of_bentomls(bundle_dir: Path, home: Path) -> None:
    revision = Bundle.open(bundle_dir).manifest.revision
    stored(bundle_dir)
    listed = subprocess.run(
        [sys.executable, "-m", "bentoml", "models", "list", "--output", "json"],
        env={**os.environ, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"},
        capture_output=True,
        check=True,
    )
    (model,) = json.loads(listed.stdout)
    assert model["tag"] == f"tiny:{revision}"
    files = {path.name for path in (home / "models/tiny" / revision).iterdir()}
    assert files == {path.name for path in bundle_dir.iterdir()} | {"model.yaml"}


def test_a_tag_without_a_version_is_the_bundle_that_was_imported_last(
    bundle_dir: Path, int8_dir: Path, home: Path
) -> None:
    stored(int8_dir, "--name", "tiny:2")
    stored(bundle_dir)
    revision = Bundle.open(bundle_dir).manifest.revision
    assert store.locate(Path("bentoml:tiny")) == home / "models/tiny" / revision
    assert store.locate(Path("bentoml:tiny:2")) == home / "models/tiny/2"


def test_an_import_that_fails_leaves_the_store_as_it_was(
    bundle_dir: Path, int8_dir: Path, home: Path, failure: Callable[..., str]
) -> None:
    stored(bundle_dir, "--name", "tiny:1")
    line = failure("import", int8_dir, "--name", "tiny:1")
    assert "cannot be imported as tiny:1: Item 'tiny:1' already exists" in line
    imported = Bundle.open(home / "models/tiny/1")
    assert imported.manifest == Bundle.open(bundle_dir).manifest
    assert failure("info", "bentoml:tiny:2").startswith("bentoml:tiny:2 cannot be opened: ")
