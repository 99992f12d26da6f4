"""The wheel serves the int8 form of the default model, with the lowest versions it declares too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.default_bundle import shipped_bundle
from tests.albert_serve.support import running_service

ROOT = Path(__file__).parent.parent
PACKAGED = ROOT / "albert_serve/models/albert-small-en"


def clean_environment(folder: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if "ALBERT_SERVE" not in name},
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOME": str(folder / "home"),
    }


def python_with_lowest_versions(folder: Path, extras: str) -> Path:
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-config"]
    python = folder / "bin/python"
    subprocess.run([*uv, "venv", "--python", sys.executable, str(folder)], check=True)
    install = ["pip", "install", "--resolution", "lowest-direct", "--python", str(python)]
    subprocess.run([*uv, *install, f"{ROOT}{extras}"], check=True)
    return python


def test_the_packaged_bundle_is_the_int8_form_of_the_one_in_models() -> None:
    packaged, shipped = Bundle.open(PACKAGED).manifest, Bundle.open(shipped_bundle()).manifest
    assert packaged.precision == "int8"
    assert packaged.provenance["training"] == shipped.provenance["training"]
    assert packaged.evaluation == shipped.evaluation
    assert {*packaged.tasks} == {*shipped.tasks}
    assert sum(file.stat().st_size for file in PACKAGED.iterdir()) < 8_000_000


@pytest.mark.extended
@pytest.mark.process
def test_the_wheel_serves_its_own_bundle(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, tmp_path / "dist"], cwd=ROOT, check=True, capture_output=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, tmp_path / "site", wheel], check=True, capture_output=True)
    environment = {**clean_environment(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    with running_service(environment, tmp_path, ("albert_serve", "serve")) as service:
        info = httpx.get(f"{service.url}/info").json()
        asked = {"inputs": "She was [MASK] in London in 1950.", "parameters": {"top_k": 1}}
        [best] = httpx.post(f"{service.url}/fill-mask", json=asked, timeout=30).json()
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [info["version"]] == [wheel.name.split("-")[1]] == cited
    assert info["precision"] == "int8"
    assert best["token_str"] == "born"


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the lowest versions are for Python 3.11")
def test_service_and_client_run_with_the_lowest_declared_versions(tmp_path: Path) -> None:
    client = python_with_lowest_versions(tmp_path / "client", "")
    server = python_with_lowest_versions(tmp_path / "server", "[serve]")
    command = ("albert_serve", "serve")
    with running_service(clean_environment(tmp_path), tmp_path, command, server) as service:
        for script in ("fill_mask", "question_answering", "sentence_order", "batch_stream"):
            example = str(ROOT / f"examples/{script}.py")
            run = [str(client), "-W", "error", example, "--url", service.url]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            assert (done.stderr, done.returncode) == ("", 0)
            assert re.search(r"[01]\.\d{4}", done.stdout)
    assert "Warning" not in service.log
