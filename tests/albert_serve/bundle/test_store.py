"""BentoML's model store: importing bundles, finding and serving them by tag, and errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from albert_serve.bundle import store
from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from tests.albert_serve.support import running_service, service_environment

# BentoML imports what is deprecated.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


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


@pytest.fixture(scope="session")
def other_dir(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, with another label: another revision."""
    folder = tmp_path_factory.mktemp("other") / "tiny"
    shutil.copytree(bundle_dir, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["heads"]["text-classification"]["labels"] = ["bad", "good"]
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def bentoml(home: Path, *arguments: str) -> str:
    """The output of BentoML's own command."""
    done = subprocess.run(
        [sys.executable, "-m", "bentoml", *arguments],
        env={**os.environ, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def stored(folder: Path, *options: str) -> None:
    assert main(["import", str(folder), *options]) == 0


def leftovers(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file() and path.name != "client_id"]


def test_an_imported_bundle_is_a_model_of_bentomls(
    bundle_dir: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    revision = Bundle.open(bundle_dir).manifest.revision
    stored(bundle_dir)
    assert capsys.readouterr().out.startswith(f"tiny:{revision} is in BentoML's model store. ")

    (model,) = json.loads(bentoml(home, "models", "list", "--output", "json"))
    assert model["tag"] == f"tiny:{revision}"
    assert float(model["size"].split()[0]) > 0
    described = json.loads(bentoml(home, "models", "get", "tiny:latest", "--output", "json"))
    assert described["labels"]["precision"] == "fp32"
    tasks = {"fill-mask", "question-answering", "sentence-order", "text-classification"}
    assert set(described["labels"]["tasks"].split(",")) == tasks
    files = {path.name for path in (home / "models/tiny" / revision).iterdir()}
    assert files == {path.name for path in bundle_dir.iterdir()} | {"model.yaml"}


def test_latest_is_the_bundle_that_was_imported_last(
    bundle_dir: Path, other_dir: Path, home: Path
) -> None:
    stored(other_dir, "--tag", "tiny:2")
    stored(bundle_dir, "--tag", "tiny:latest")
    revision = Bundle.open(bundle_dir).manifest.revision
    assert store.locate(Path("bentoml:tiny")) == home / "models/tiny" / revision
    assert store.locate(Path("bentoml:tiny:2")) == home / "models/tiny/2"


def test_an_import_that_fails_leaves_the_store_as_it_was(
    bundle_dir: Path, other_dir: Path, home: Path, failure: Callable[..., str]
) -> None:
    for tag in ("../reviews", "a" * 64):
        line = failure("import", bundle_dir, f"--name={tag}")
        assert line.startswith(f"{bundle_dir} cannot be imported as {tag}:")
        assert not leftovers(home)
    stored(bundle_dir, "--name", "tiny:1")
    line = failure("import", other_dir, "--name", "tiny:1")
    assert "cannot be imported as tiny:1: Item 'tiny:1' already exists" in line
    imported = Bundle.open(home / "models/tiny/1")
    assert imported.manifest == Bundle.open(bundle_dir).manifest


def test_a_store_that_cannot_be_written_to_is_one_line(
    bundle_dir: Path, home: Path, failure: Callable[..., str]
) -> None:
    (home / "models/tiny").write_text("a file")
    assert "another store with BENTOML_HOME." in failure("import", bundle_dir)
    assert leftovers(home) == [home / "models/tiny"]


@pytest.mark.parametrize("tag", ["nobody", "tiny:2", "../tiny", ""])
def test_a_tag_that_is_not_in_the_store_is_one_line(
    tag: str, bundle_dir: Path, home: Path, failure: Callable[..., str]
) -> None:
    stored(bundle_dir, "--name", "tiny:1")
    message = f"bentoml:{tag} cannot be opened: "
    assert failure("info", f"bentoml:{tag}").startswith(message)
    assert failure("serve", "--bundle", f"bentoml:{tag}").startswith(message)


@pytest.mark.extended
def test_the_service_serves_a_tag(bundle_dir: Path, tmp_path: Path, home: Path) -> None:
    stored(bundle_dir)
    environment = service_environment(bundle_dir, home)
    environment["ALBERT_SERVE_BUNDLE"] = "bentoml:tiny:latest"
    with running_service(environment, tmp_path) as service:
        info = httpx.get(f"{service.url}/info").json()
        assert info["model_id"] == "tiny"
        reply = httpx.post(f"{service.url}/fill-mask", json={"inputs": "a [MASK]."})
        assert reply.status_code == 200, reply.text
