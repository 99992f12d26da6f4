"""Bentos, and the images that BentoML makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from albert_serve.server.openapi import EXAMPLES
from tests.albert_serve.support import ROOT, run_module, running_service, service_environment

pytestmark = pytest.mark.slow


@pytest.fixture
def checkout(bundle_dir: Path, tmp_path: Path) -> Path:
    """A copy of the project whose default model is the small bundle."""
    folder = tmp_path / "checkout"
    for name in ("albert_serve", "scripts", "training", "tests", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("bentofile.yaml", "bentofile.gpu.yaml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(bundle_dir, folder / "models/albert-small-en")
    return folder


@pytest.fixture
def environment(bundle_dir: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without the repository and without settings."""
    variables = service_environment(bundle_dir, tmp_path / "home")
    for name in ("PYTHONPATH", "ALBERT_SERVE_BUNDLE"):
        del variables[name]
    return variables


def build(checkout: Path, bentofile: str, environment: dict[str, str]) -> tuple[str, Path]:
    """Build a bento; return its tag and its folder."""
    command = ("bentoml", "build", "--bentofile", bentofile, "--output", "tag")
    output = run_module(*command, cwd=checkout, environment=environment)
    tag = output.strip().removeprefix("__tag__:")
    return tag, Path(environment["BENTOML_HOME"], "bentos", *tag.split(":"))


def test_a_bento_serves_its_own_bundle_on_another_machine(
    checkout: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The other machine has neither the checkout nor its BENTOML_HOME."""
    tag, bento = build(checkout, "bentofile.yaml", environment)
    names = {path.name for path in (bento / "src").iterdir()}
    assert names - {"bentofile.yaml"} == {"albert_serve", "models"}  # BentoML adds bentofile.yaml
    archive, empty = str(tmp_path / "exported.bento"), tmp_path / "empty"
    empty.mkdir()
    run_module("bentoml", "export", tag, archive, cwd=empty, environment=environment)
    shutil.rmtree(checkout)
    shutil.rmtree(environment["BENTOML_HOME"])
    elsewhere = {**environment, "BENTOML_HOME": str(tmp_path / "elsewhere")}
    run_module("bentoml", "import", archive, cwd=empty, environment=elsewhere)
    with running_service(elsewhere, empty, ("bentoml", "serve", tag)) as running:
        info = httpx.get(f"{running.url}/info").json()
        assert info["model_id"] == "albert-small-en"
        for path in ("/web/app.js", "/docs"):
            assert httpx.get(running.url + path).status_code == 200, path
        for task in info["tasks"]:
            reply = httpx.post(f"{running.url}/{task['name']}", json=EXAMPLES[task["name"]])
            assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("bentofile", "runtime"),
    [
        ("bentofile.yaml", "onnxruntime==1.31.1"),
        ("bentofile.gpu.yaml", "onnxruntime-gpu==1.31.1"),
    ],
)
def test_an_image_has_one_runtime_and_an_unprivileged_user(
    bentofile: str, runtime: str, checkout: Path, environment: dict[str, str]
) -> None:
    _, bento = build(checkout, bentofile, environment)
    requirements = (bento / "env/python/requirements.txt").read_text().splitlines()
    runtimes = [line.split()[0] for line in requirements if line.startswith(("onnx", "torch"))]
    assert runtimes == [runtime]
    steps = (bento / "env/docker/Dockerfile").read_text().splitlines()
    last_run = max(index for index, step in enumerate(steps) if step.startswith("RUN "))
    assert [step for step in steps if step.startswith("USER ")] == ["USER bentoml"]
    assert steps.index("USER bentoml") > last_run
    assert "ARG BENTO_USER_UID=1034" in steps  # docs/kubernetes.md and deployment.yaml have it
