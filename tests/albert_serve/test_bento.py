"""A bento made by `bentoml build` holds all it needs, and no more."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from tests.albert_serve.support import ROOT, running_service, service_environment


def build(source: Path, environment: dict[str, str]) -> Path:
    built = subprocess.run(
        [sys.executable, "-m", "bentoml", "build", "--output", "tag"],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    bentos = Path(environment["BENTOML_HOME"]) / "bentos/albert-serve"
    return bentos / (bentos / "latest").read_text().strip()


@pytest.mark.slow
def test_a_bento_serves_its_own_bundle_from_an_empty_folder(
    bundle_dir: Path, tmp_path: Path
) -> None:
    source = tmp_path / "checkout"
    without = shutil.ignore_patterns("__pycache__")
    for name in ("albert_serve", "training", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=without)
    shutil.copy(ROOT / "bentofile.yaml", source)
    shutil.copytree(bundle_dir, source / "models/tiny")
    environment = service_environment(bundle_dir, tmp_path / "home")
    for name in ("PYTHONPATH", "ALBERT_SERVE_BUNDLE"):
        del environment[name]
    bento = build(source, environment)
    shutil.rmtree(source)

    assert {path.name for path in (bento / "src").iterdir()} >= {"albert_serve", "models"}
    for name in ("training", "tests"):
        assert not (bento / "src" / name).exists()
    requirements = (bento / "env/python/requirements.txt").read_text()
    assert "onnxruntime-gpu==1.31.1; sys_platform" in requirements
    assert "torch" not in requirements
    (tmp_path / "empty").mkdir()
    with running_service(
        environment, tmp_path / "empty", ("bentoml", "serve", "albert-serve:latest")
    ) as running:
        assert httpx.get(f"{running.url}/info").json()["model_id"] == "tiny"
        reply = httpx.post(f"{running.url}/fill-mask", json={"inputs": "The [MASK] run."})
        assert len(reply.json()) == 5


def test_the_bentos_pins_are_the_tested_ones() -> None:
    packages = yaml.safe_load((ROOT / "bentofile.yaml").read_text())["python"]["packages"]
    pins = {package.split(";")[0].strip() for package in packages}
    assert pins <= set((ROOT / "constraints.txt").read_text().splitlines())
