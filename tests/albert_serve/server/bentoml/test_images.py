"""The two images: what sets them apart, and that the service lives with the rights they give it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from tests.albert_serve.support import (
    ROOT,
    SERVICE,
    Running,
    free_port,
    service_environment,
    wait_until_ready,
)
from tests.programs import needs_program

GPU_VARIABLES = {"LD_LIBRARY_PATH", "NVIDIA_DRIVER_CAPABILITIES"}
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


def definition(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return read


def unprivileged(folder: Path, *command: str) -> list[str]:
    shell = ("sh", "-c", UNPRIVILEGED, "sh", str(folder), *command)
    return ["unshare", "--user", "--map-root-user", "--mount", *shell]


@contextlib.contextmanager
def unprivileged_service(folder: Path, environment: dict[str, str]) -> Iterator[Running]:
    port, log_file = free_port(), folder / "log.txt"
    options = ("serve", SERVICE, "--port", str(port), "--host", "127.0.0.1")
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            unprivileged(folder, sys.executable, "-m", "bentoml", *options),
            cwd="/",
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    running = Running(process=process, url=f"http://127.0.0.1:{port}", log_file=log_file)
    try:
        wait_until_ready(running)
        yield running
    finally:
        process.terminate()
        process.wait(timeout=60)


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

    with unprivileged_service(folder, environment) as running:
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
    assert sorted(folder.rglob("*")) == sorted([*before, running.log_file])


def test_the_images_differ_in_what_cuda_needs_and_nothing_else() -> None:
    cpu, gpu = definition("bentofile.yaml"), definition("bentofile.gpu.yaml")
    assert gpu.pop("name") == f"{cpu.pop('name')}-gpu"
    there = {variable["name"] for variable in gpu["envs"]}
    assert there - {variable["name"] for variable in cpu["envs"]} == GPU_VARIABLES
    gpu["envs"] = [variable for variable in gpu["envs"] if variable["name"] not in GPU_VARIABLES]
    gpu["python"]["packages"] = [
        package.replace("-gpu[cuda,cudnn]", "")
        for package in gpu["python"]["packages"]
        if not package.startswith("nvidia-")
    ]
    assert gpu == cpu


def test_the_libraries_are_looked_for_under_the_images_python() -> None:
    gpu = definition("bentofile.gpu.yaml")
    paths = {variable["name"]: variable["value"] for variable in gpu["envs"]}["LD_LIBRARY_PATH"]
    for path in paths.split(":"):
        assert f"/python{gpu['docker']['python_version']}/" in path


def test_the_setup_script_can_be_run() -> None:
    script = ROOT / definition("bentofile.yaml")["docker"]["setup_script"]
    assert os.access(script, os.X_OK)
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
