"""Bentos hold all they need and no more; images have a runtime and a user without rights."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from packaging.utils import canonicalize_name

from albert_serve.server.openapi import EXAMPLES
from tests.albert_serve.support import ROOT, running_service, service_environment
from tests.programs import needs_program

UID = 12345
# Read-only all over but for one folder; then a user with neither name nor home nor rights.
UNPRIVILEGED = f"""
set -e
mount -o remount,bind,ro /
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t tmpfs tmpfs "$1/scratch"
shift
exec unshare --user --map-user={UID} --map-group={UID} setpriv --no-new-privs "$@"
"""


def unprivileged(folder: Path, *command: str) -> list[str]:
    shell = ("sh", "-c", UNPRIVILEGED, "sh", str(folder), *command)
    return ["unshare", "--user", "--map-root-user", "--mount", *shell]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A read-only folder in waiting; skips where nothing can be tried without rights."""
    (tmp_path / "scratch").mkdir()
    for program in ("unshare", "setpriv"):
        needs_program(program, package="util-linux")
    tried = subprocess.run(unprivileged(tmp_path, "true"), capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this system allows no user namespaces: {tried.stderr.decode().strip()}")
    return tmp_path


@pytest.mark.extended
def test_it_serves_without_rights_on_a_read_only_file_system(
    bundle_dir: Path, folder: Path
) -> None:
    made = re.findall(r"for folder in (.*);", (ROOT / "scripts/image_setup.sh").read_text())
    for name in made[0].split():
        (folder / "home" / name).mkdir(parents=True)
    environment = service_environment(bundle_dir, folder / "home")
    environment |= {"TMPDIR": str(folder / "scratch"), "ALBERT_SERVE_WORKERS": "2"}
    for name in ("HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    before = sorted(folder.rglob("*"))
    probe = f"test $(id -u) = {UID} && ! touch {folder}/home/it /it"
    assert subprocess.run(unprivileged(folder, "sh", "-c", probe), check=False).returncode == 0

    python = folder / "python"
    command = shlex.join(unprivileged(folder, sys.executable))
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)
    with running_service(environment, folder, python=python) as running:
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        assert re.search(r"CapEff:\s+0{16}\n", status)
        assert re.search(r"NoNewPrivs:\s+1\n", status)
        body = {"inputs": "The [MASK] run."}
        for _ in range(4):
            assert len(httpx.post(f"{running.url}/fill-mask", json=body).json()) == 5
        metrics = httpx.get(f"{running.url}/metrics").text
    assert re.search(r"albert_serve_requests_total{.*fill-mask.*} 4\.0", metrics)
    assert running.process.returncode == 0
    assert "Traceback" not in running.log
    assert sorted(folder.rglob("*")) == sorted([*before, python, running.log_file])


def bentoml(*arguments: str, cwd: Path, environment: dict[str, str]) -> str:
    """The output of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "bentoml", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def checkout(bundle_dir: Path, tmp_path: Path) -> Path:
    """A copy of the project for `bentoml build`; it ships the small bundle."""
    made = tmp_path / "checkout"
    without = shutil.ignore_patterns("__pycache__")
    for name in ("albert_serve", "scripts", "training", "tests"):
        shutil.copytree(ROOT / name, made / name, ignore=without)
    shutil.copytree(ROOT / "requirements", made / "requirements")
    for name in ("bentofile.yaml", "bentofile.gpu.yaml"):
        shutil.copy(ROOT / name, made)
    shutil.copytree(bundle_dir, made / "models/albert-small-en")
    return made


@pytest.fixture
def environment(bundle_dir: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without the repository, and without settings."""
    made = service_environment(bundle_dir, tmp_path / "home")
    for name in ("PYTHONPATH", "ALBERT_SERVE_BUNDLE"):
        del made[name]
    return made


def build(checkout: Path, bentofile: str, environment: dict[str, str]) -> tuple[str, Path]:
    """The tag of a new bento, and its folder."""
    printed = bentoml(
        "build", "--bentofile", bentofile, "--output", "tag", cwd=checkout, environment=environment
    )
    tag = printed.strip().removeprefix("__tag__:")
    return tag, Path(environment["BENTOML_HOME"], "bentos", *tag.split(":"))


@pytest.mark.slow
def test_a_bento_serves_its_own_bundle_on_another_machine(
    checkout: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Where neither the checkout nor its BENTOML_HOME is."""
    tag, bento = build(checkout, "bentofile.yaml", environment)
    held = {path.name for path in (bento / "src").iterdir()}
    assert held - {"bentofile.yaml"} == {"albert_serve", "models"}  # that one BentoML puts there
    archive, empty = str(tmp_path / "exported.bento"), tmp_path / "empty"
    empty.mkdir()
    bentoml("export", tag, archive, cwd=empty, environment=environment)
    shutil.rmtree(checkout)
    shutil.rmtree(environment["BENTOML_HOME"])
    elsewhere = {**environment, "BENTOML_HOME": str(tmp_path / "elsewhere")}
    bentoml("import", archive, cwd=empty, environment=elsewhere)
    with running_service(elsewhere, empty, ("bentoml", "serve", tag)) as running:
        info = httpx.get(f"{running.url}/info").json()
        assert info["model_id"] == "albert-small-en"
        for path in ("/", "/web/app.js", "/docs", "/docs.json", "/metrics", "/livez"):
            assert httpx.get(running.url + path).status_code == 200, path
        for task in (each["name"] for each in info["tasks"]):
            reply = httpx.post(f"{running.url}/{task}", json=EXAMPLES[task])
            assert reply.status_code == 200, reply.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bentofile", "runtime"),
    [
        ("bentofile.yaml", "onnxruntime==1.31.1"),
        ("bentofile.gpu.yaml", "onnxruntime-gpu==1.31.1"),
    ],
)
def test_an_image_has_its_runtime_and_a_user_without_rights(
    bentofile: str, runtime: str, checkout: Path, environment: dict[str, str]
) -> None:
    _, bento = build(checkout, bentofile, environment)
    requirements = (bento / "env/python/requirements.txt").read_text().splitlines()
    heavy = [line.split()[0] for line in requirements if line.startswith(("onnx", "torch"))]
    assert heavy == [runtime]
    steps = (bento / "env/docker/Dockerfile").read_text().splitlines()
    last_to_run = max(n for n, step in enumerate(steps) if step.startswith("RUN "))
    (user,) = [n for n, step in enumerate(steps) if step.startswith("USER ")]
    assert steps[user] == "USER bentoml"
    assert user > last_to_run
    assert "ARG BENTO_USER_UID=1034" in steps  # docs/kubernetes.md has it
    for variable in yaml.safe_load((ROOT / bentofile).read_text())["envs"]:
        assert f"ENV {variable['name']}=${variable['name']}" in steps
    (script,) = (bento / "env/docker").glob("script__*")
    assert script.read_bytes() == (ROOT / "scripts/image_setup.sh").read_bytes()


def pins_of(text: str) -> dict[str, str]:
    """The pinned versions of a requirements file, by canonical name."""
    return {canonicalize_name(name): pin for name, pin in re.findall(r"(?m)^([\w-]+)==(\S+)", text)}


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_an_image_installs_the_tested_versions_by_hash(image: str) -> None:
    folder = ROOT / "requirements"
    lock = (folder / f"image-{image}.txt").read_text()
    tested = pins_of((ROOT / "constraints.txt").read_text())
    for name in re.findall(r"(?m)^[\w-]+", (folder / f"image-{image}.in").read_text()):
        assert pins_of(lock)[canonicalize_name(name)] == tested[canonicalize_name(name)]
    assert not re.search(r"(?m)^\S+==.*(?<!\\)$", lock)  # a hash follows each pin
    assert len(re.findall(r"(?m)^\S+==.*\\\n +--hash=sha256:\w{64}", lock)) == len(pins_of(lock))
