"""The files of deploy/, the pages about operation, a restricted container, bentos and images."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from albert_serve.api.schemas import ErrorReply
from albert_serve.server.openapi import EXAMPLES
from albert_serve.settings import VARIABLES, Settings
from tests.albert_serve.support import (
    ROOT,
    RunningService,
    free_port,
    run_module,
    running_service,
    service_environment,
)
from tests.programs import needs_program

BODY = {"inputs": "The [MASK] run."}


@pytest.fixture
def proxy(service: RunningService, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of nginx with our configuration, whose addresses and folders are replaced."""
    nginx = needs_program("nginx", "/usr/sbin/nginx")
    port = free_port()
    configuration = (ROOT / "deploy/nginx.conf").read_text()
    for old, new in (
        ("albert:3000", service.url.removeprefix("http://")),
        ("listen 8080", f"listen 127.0.0.1:{port}"),
        (" /tmp/", f" {tmp_path}/"),
    ):
        assert old in configuration
        configuration = configuration.replace(old, new)
    (tmp_path / "nginx.conf").write_text(configuration)
    command = [nginx, "-e", "stderr", "-p", str(tmp_path), "-c", "nginx.conf", "-g", "daemon off;"]
    url, transport = f"http://127.0.0.1:{port}", httpx.HTTPTransport(retries=5)
    with (
        subprocess.Popen(command) as process,
        httpx.Client(base_url=url, timeout=20, transport=transport) as client,
    ):
        yield client
        process.terminate()


def test_nginx_forwards_requests_and_enforces_the_limits(
    proxy: httpx.Client, client: httpx.Client
) -> None:
    for _ in range(3):
        reply = proxy.post("/fill-mask", json=BODY, headers={"X-Request-ID": "by-the-proxy"})
        assert reply.json() == client.post("/fill-mask", json=BODY).json()
        assert reply.headers["X-Request-ID"] == "by-the-proxy"
    assert proxy.post("/fill-mask", json={"inputs": 3}).status_code == 422
    large = proxy.post("/fill-mask", content=b" " * (4 << 20 | 1))
    assert large.status_code == 413
    assert ErrorReply.model_validate_json(large.content).error_type == "body_too_large"
    assert proxy.get("/info", headers={"X": "a" * (1 << 17)}).status_code == 400


PAGES = ("operate.md", "kubernetes.md", "monitoring.md", "security.md", "bentoml.md")
TEXT = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
YAML_TEXTS = [
    *(file.read_text() for file in sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))),
    *re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL),
]
DOCUMENTS: dict[str, Any] = {
    document.get("kind") or next(iter(document)): document
    for text in YAML_TEXTS
    for document in yaml.safe_load_all(text)
}
POD = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
METRIC = re.compile(r"\b(?:albert_serve|bentoml_service)_\w+(?=[\[{,)]|$)")


def test_the_dashboard_queries_existing_metrics_by_existing_labels(client: httpx.Client) -> None:
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    client.post("/fill-mask", json=BODY).raise_for_status()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > len(dashboard["panels"]) > 5
    for expression in expressions:
        metrics = METRIC.findall(expression)
        assert metrics
        groups = re.findall(r"by \(([^)]*)\)", expression)
        filters = re.findall(r"[{,]\s*(\w+)(?:=~|!~|!=|=)\"", expression)
        used_labels = {label.strip() for group in groups for label in group.split(",")}
        existing_labels = set.union(*(labels[metric] for metric in metrics))
        assert used_labels | set(filters) <= existing_labels, expression
    for variable in dashboard["templating"]["list"]:
        assert set(METRIC.findall(variable["query"])) <= set(labels)


def test_the_deployments_settings_fit_its_limits_and_mounts(tmp_path: Path) -> None:
    variables = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}
    settings = Settings.from_environment({"ALBERT_SERVE_BUNDLE": str(tmp_path), **variables})
    assert settings.num_threads == int(CONTAINER["resources"]["limits"]["cpu"])
    assert settings.api_keys_file is not None
    mount_paths = [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]
    assert str(settings.api_keys_file.parent) in mount_paths
    assert POD["terminationGracePeriodSeconds"] > settings.drain_grace_s + settings.deadline_s


def test_the_kubernetes_files_are_valid() -> None:
    for kind in ("Deployment", "Service", "HorizontalPodAutoscaler"):
        for version in ("1.30", "1.37"):
            kubernetes_validate.validate(DOCUMENTS[kind], version, strict=True)


def test_every_variable_in_the_pages_exists() -> None:
    pages = [(ROOT / "docs" / page).read_text() for page in ("serve.md", "tasks.md")]
    names = set(re.findall(r"ALBERT_SERVE_[A-Z_]+", "\n".join([TEXT, *pages])))
    assert len(names) > 20
    assert names <= VARIABLES.keys()


def test_the_paths_of_probes_and_the_documented_metrics_exist(client: httpx.Client) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert client.get(CONTAINER[probe]["httpGet"]["path"]).status_code == 200
    metrics = client.get("/metrics").text
    query = DOCUMENTS["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    for name in re.findall(r"albert_serve_\w+", query):
        assert f"\n{name}{{" in metrics
    rows = re.findall(r"^\| `(albert_serve_\w+)` \| ([\w, ]+) \|", TEXT, re.MULTILINE)
    assert len(rows) > 5
    for name, labels in rows:
        (label_text, *_) = re.findall(rf"^{name}(?:_count)?{{(.*)}}", metrics, re.MULTILINE)
        assert set(re.findall(r"(\w+)=", label_text)) == set(labels.split(", "))


UID = 12345
# Mounts all file systems read-only, except the folder `scratch`. Then it runs the command as a user
# without a name, a home folder or privileges.
RESTRICTED = f"""
set -e
mount -o remount,bind,ro /
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t tmpfs tmpfs "$1/scratch"
shift
exec unshare --user --map-user={UID} --map-group={UID} setpriv --no-new-privs "$@"
"""


def restricted(folder: Path, *command: str) -> list[str]:
    """Return the command line that runs a command in the restricted environment."""
    shell = ("sh", "-c", RESTRICTED, "sh", str(folder), *command)
    return ["unshare", "--user", "--map-root-user", "--mount", *shell]


@pytest.mark.extended
def test_the_service_runs_unprivileged_on_a_read_only_file_system(
    bundle_dir: Path, tmp_path: Path
) -> None:
    """The folders that scripts/image_setup.sh creates exist, as in the image."""
    for program in ("unshare", "setpriv"):
        needs_program(program, package="util-linux")
    (tmp_path / "scratch").mkdir()
    trial = subprocess.run(restricted(tmp_path, "true"), capture_output=True, check=False)
    if trial.returncode != 0:
        pytest.skip(f"this system allows no user namespaces: {trial.stderr.decode().strip()}")
    script = (ROOT / "scripts/image_setup.sh").read_text()
    [names] = re.findall(r"for folder in (.*);", script)
    for name in names.split():
        (tmp_path / "home" / name).mkdir(parents=True)
    environment = service_environment(bundle_dir, tmp_path / "home")
    environment |= {"TMPDIR": str(tmp_path / "scratch"), "ALBERT_SERVE_WORKERS": "2"}
    for name in ("HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    is_restricted = f"test $(id -u) = {UID} && ! touch {tmp_path}/home/file /file"
    subprocess.run(restricted(tmp_path, "sh", "-c", is_restricted), check=True)

    python = tmp_path / "python"
    command = shlex.join(restricted(tmp_path, sys.executable))
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)
    with running_service(environment, tmp_path, python=python) as running:
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        assert re.search(r"CapEff:\s+0{16}\n", status)
        for _ in range(4):
            assert len(httpx.post(f"{running.url}/fill-mask", json=BODY).json()) == 5
        metrics = httpx.get(f"{running.url}/metrics").text
    assert re.search(r"albert_serve_requests_total{.*fill-mask.*} 4\.0", metrics)
    assert running.process.returncode == 0
    assert "Traceback" not in running.log


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_image_has_one_runtime_and_an_unprivileged_user(
    checkout: Path, environment: dict[str, str]
) -> None:
    for bentofile, runtime in (
        ("bentofile.yaml", "onnxruntime==1.31.1"),
        ("bentofile.gpu.yaml", "onnxruntime-gpu==1.31.1"),
    ):
        _, bento = build(checkout, bentofile, environment)
        requirements = (bento / "env/python/requirements.txt").read_text().splitlines()
        runtimes = [line.split()[0] for line in requirements if line.startswith(("onnx", "torch"))]
        assert runtimes == [runtime]
        steps = (bento / "env/docker/Dockerfile").read_text().splitlines()
        last_run = max(index for index, step in enumerate(steps) if step.startswith("RUN "))
        assert [step for step in steps if step.startswith("USER ")] == ["USER bentoml"]
        assert steps.index("USER bentoml") > last_run
        assert "ARG BENTO_USER_UID=1034" in steps  # docs/kubernetes.md and deployment.yaml have it
