"""The files of deploy/, run or rendered; and what the documents say of them."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.api.schemas import ErrorReply
from albert_serve.settings import VARIABLES, Settings
from tests.albert_serve.support import ROOT, Running, free_port
from tests.programs import needs_program

CONFIGURATION = (ROOT / "deploy/nginx.conf").read_text()
BODY = {"inputs": "The [MASK] run."}
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def proxy(service: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of nginx, whose addresses and folders are changed for the test."""
    nginx = needs_program("nginx", "/usr/sbin/nginx")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    changes = {
        "albert:3000": service.url.removeprefix("http://"),
        "listen 8080": f"listen 127.0.0.1:{port}",
        " /tmp/": f" {folder}/",
    }
    text = CONFIGURATION
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    command = [nginx, "-e", "stderr", "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]
    with subprocess.Popen(command) as process, httpx.Client(timeout=TIMEOUT_S) as client:
        client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        try:
            wait_until_listening(port, process)
            yield client
        finally:
            process.terminate()


def wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < give_up_s:
        assert process.poll() is None
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return
        time.sleep(0.05)


def test_it_passes_requests_on(proxy: httpx.Client, client: httpx.Client) -> None:
    for _ in range(3):
        reply = proxy.post("/fill-mask", json=BODY, headers={"X-Request-ID": "by-the-proxy"})
        assert reply.json() == client.post("/fill-mask", json=BODY).json()
        assert reply.headers["X-Request-ID"] == "by-the-proxy"
    assert proxy.post("/fill-mask", json={"inputs": 3}).status_code == 422


def test_bodies_and_heads_have_limits(proxy: httpx.Client) -> None:
    large = proxy.post("/fill-mask", content=b" " * (4 << 20 | 1))
    assert large.status_code == 413
    assert ErrorReply.model_validate_json(large.content).error_type == "body_too_large"
    assert proxy.get("/info", headers={"X": "a" * (1 << 17)}).status_code == 400


PAGES = ("operate.md", "kubernetes.md", "monitoring.md", "security.md", "bentoml.md")
TEXT = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
KUBERNETES = ROOT / "deploy/kubernetes"
IN_FILES = [yaml.safe_load(file.read_text()) for file in sorted(KUBERNETES.glob("*.yaml"))]
READ: list[dict[str, Any]] = IN_FILES + [
    document
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    for document in yaml.safe_load_all(block)
]
DOCUMENTS = {document.get("kind") or next(iter(document)): document for document in READ}
VARIABLE = r"ALBERT_SERVE_[A-Z_]+"


def container() -> Any:
    (only,) = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def test_the_deployments_settings_are_taken(tmp_path: Path) -> None:
    variables = {entry["name"]: entry["value"] for entry in container()["env"]}
    read = Settings.from_environment({"ALBERT_SERVE_BUNDLE": str(tmp_path), **variables})
    assert read.num_threads == int(container()["resources"]["limits"]["cpu"])
    assert read.guard == ("api", "docs")
    assert read.api_keys_file is not None
    mounts = container()["volumeMounts"]
    assert str(read.api_keys_file.parent) in [mount["mountPath"] for mount in mounts]
    pod = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > read.drain_grace_s + read.deadline_s


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("kind", ["Deployment", "Service", "HorizontalPodAutoscaler"])
def test_the_files_are_valid(kind: str, version: str) -> None:
    kubernetes_validate.validate(DOCUMENTS[kind], version, strict=True)


@pytest.mark.parametrize("page", [*PAGES, "serve.md", "tasks.md"])
def test_every_variable_that_is_named_is_one(page: str) -> None:
    named = set(re.findall(VARIABLE, (ROOT / "docs" / page).read_text()))
    assert named
    assert named <= VARIABLES.keys()


def test_the_probes_are_answered(client: httpx.Client) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert client.get(container()[probe]["httpGet"]["path"]).status_code == 200


def test_scaling_and_the_table_ask_for_metrics_that_exist(client: httpx.Client) -> None:
    metrics = client.get("/metrics").text
    query = DOCUMENTS["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    tabled = re.findall(r"^\| `(albert_serve_\w+)` \| ([\w, ]+) \|", TEXT, re.MULTILINE)
    assert len(tabled) > 5
    for name in re.findall(r"albert_serve_\w+", query):
        assert f"\n{name}{{" in metrics
    for name, labels in tabled:
        (label_text, *_) = re.findall(rf"^{name}(?:_count)?{{(.*)}}", metrics, re.MULTILINE)
        assert set(re.findall(r"(\w+)=", label_text)) == set(labels.split(", "))
