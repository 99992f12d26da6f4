"""References to models: a folder, a checkpoint, a name on the Hub, a tag in BentoML's store."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from albert_serve.bundle import store
from albert_serve.bundle.checkpoint import find_bundle
from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from albert_serve.client import AlbertClient
from albert_serve.errors import BundleError, ConfigError
from tests.training.conversion.hub_server import Hub, Repository, serve

# BentoML imports deprecated modules.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TEXT = "the first [MASK] of the year"


@pytest.fixture
def hub(bundle_dir: Path, checkpoint_dir: Path, tmp_path: Path) -> Iterator[Hub]:
    """A local Hub with a bundle, a checkpoint and a damaged bundle."""
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle_dir, damaged)
    content = (damaged / "tokenizer.json").read_bytes()
    (damaged / "tokenizer.json").write_bytes(content[:-2] + b" \n")
    repositories = {
        "us/bundle": Repository({"main": bundle_dir}),
        "us/pretrained": Repository({"main": checkpoint_dir}),
        "us/damaged": Repository({"main": damaged}),
    }
    with serve(repositories) as hub:
        yield hub


def run(hub: Hub, folder: Path, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `albert-serve` in a folder, with caches there."""
    environment = hub.environment(folder / "hf") | {"ALBERT_SERVE_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "albert_serve", *command],
        cwd=folder,
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("reference", "cache"), [("us/bundle", "hub"), ("us/pretrained", "exports")]
)
def test_a_bundle_or_checkpoint_of_the_hub_is_downloaded_once(
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
def test_a_missing_or_damaged_bundle_of_the_hub_is_an_error_of_one_line(
    reference: str, message: str, hub: Hub, tmp_path: Path
) -> None:
    process = run(hub, tmp_path, "serve", "--bundle", reference)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    *_, line = process.stderr.splitlines()
    assert line.startswith("error: ")
    assert message.format(url=hub.url) in line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where this process stores exports and downloads. No umask protects it."""
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path / "cache"))
    old_umask = os.umask(0)
    yield tmp_path / "cache"
    os.umask(old_umask)


@pytest.mark.usefixtures("cache")
def test_a_checkpoint_is_exported_once_and_again_after_it_changes(
    checkpoint_dir: Path, bundle_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "copied"
    shutil.copytree(checkpoint_dir, checkpoint)
    with AlbertClient.local(bundle_dir) as albert:
        expected = albert.fill_mask(TEXT)
    for _ in range(2):
        with AlbertClient.local(checkpoint) as albert:
            assert albert.fill_mask(TEXT) == expected
            assert albert.info().model_id == "copied"
    assert capfd.readouterr().err.count("Exporting") == 1
    config = json.loads((checkpoint / "config.json").read_bytes())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with AlbertClient.local(checkpoint) as albert:
        assert albert.fill_mask(TEXT) != expected


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that exports ends at once."""
    finished_export = subprocess.CompletedProcess[bytes]([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: finished_export)


@pytest.mark.usefixtures("no_export")
def test_each_precision_has_its_own_folder_that_others_cannot_change(
    checkpoint_dir: Path, cache: Path
) -> None:
    fp32, int8 = find_bundle(checkpoint_dir), find_bundle(checkpoint_dir, "int8")
    assert find_bundle(checkpoint_dir, "fp32") == fp32 != int8
    assert {path.stat().st_mode & 0o777 for path in (cache / "exports").glob("**/")} == {0o755}


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize(
    ("owner", "mode", "is_allowed"),
    [(0, 0o755, True), (7, 0o755, True), (8, 0o755, False), (7, 0o775, False), (7, 0o757, False)],
)
def test_a_cache_that_others_can_change_is_rejected(
    checkpoint_dir: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: int,
    mode: int,
    is_allowed: bool,
) -> None:
    """The user is 7. Root, 0, may own the cache too."""
    (cache / "exports").mkdir(parents=True)
    (cache / "exports").chmod(mode)
    real_stat = Path.stat

    def owned_stat(path: Path, **options: bool) -> os.stat_result:
        status = list(real_stat(path, **options))
        status[stat.ST_UID] = owner
        return os.stat_result(status)

    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setattr(Path, "stat", owned_stat)
    error = r"Other users can write to .*/exports, and so could"
    with nullcontext() if is_allowed else pytest.raises(ConfigError, match=error):
        find_bundle(checkpoint_dir)


@pytest.mark.usefixtures("cache")
def test_a_checkpoint_of_another_architecture_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(BundleError, match=r"bert --precision fp32` failed: [^e]") as caught:
        find_bundle(tmp_path / "bert")
    assert "\n" not in str(caught.value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A separate BENTOML_HOME, also for BentoML in this process, which caches the first home."""
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


def import_bundle(folder: Path, *options: str) -> None:
    assert main(["import", str(folder), *options]) == 0


def test_bentoml_lists_imported_bundles_and_a_tag_without_a_version_means_the_latest(
    bundle_dir: Path, int8_dir: Path, home: Path
) -> None:
    revision = Bundle.open(bundle_dir).manifest.revision
    import_bundle(int8_dir, "--name", "tiny:2")
    import_bundle(bundle_dir)
    models = subprocess.check_output(
        [sys.executable, "-m", "bentoml", "models", "list", "--output", "json"],
        env={**os.environ, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"},
    )
    assert {model["tag"] for model in json.loads(models)} == {"tiny:2", f"tiny:{revision}"}
    assert store.locate(Path("bentoml:tiny:2")) == home / "models/tiny/2"
    latest = store.locate(Path("bentoml:tiny"))
    assert latest == home / "models/tiny" / revision
    files = {path.name for path in latest.iterdir()}
    assert files == {path.name for path in bundle_dir.iterdir()} | {"model.yaml"}


def test_a_failed_import_does_not_change_the_store(
    bundle_dir: Path,
    int8_dir: Path,
    checkpoint_dir: Path,
    home: Path,
    error_of_command: Callable[..., str],
) -> None:
    import_bundle(bundle_dir, "--name", "tiny:1")
    line = error_of_command("import", int8_dir, "--name", "tiny:1")
    assert "cannot be imported as tiny:1: Item 'tiny:1' already exists" in line
    for command in ("import", "info"):
        assert "has no manifest.json" in error_of_command(command, checkpoint_dir)
    imported = Bundle.open(home / "models/tiny/1")
    assert imported.manifest == Bundle.open(bundle_dir).manifest
    assert error_of_command("info", "bentoml:tiny:2").startswith(
        "bentoml:tiny:2 cannot be opened: "
    )
