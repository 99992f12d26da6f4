"""The files of deploy/, bentos and images; what the documents say of them and of the tasks."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from albert_serve.api.schemas import ErrorReply
from albert_serve.server.openapi import EXAMPLES as REQUESTS
from albert_serve.settings import VARIABLES, Settings
from albert_serve.tasks import TASKS
from tests.albert_serve.support import (
    ROOT,
    Running,
    free_port,
    run_module,
    running_service,
    service_environment,
)
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
            while not is_listening(port):
                assert process.poll() is None
            yield client
        finally:
            process.terminate()


def is_listening(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    time.sleep(0.05)
    return False


def test_it_passes_requests_on_within_its_limits(proxy: httpx.Client, client: httpx.Client) -> None:
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
KUBERNETES = ROOT / "deploy/kubernetes"
IN_FILES = [yaml.safe_load(file.read_text()) for file in sorted(KUBERNETES.glob("*.yaml"))]
READ: list[dict[str, Any]] = IN_FILES + [
    document
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    for document in yaml.safe_load_all(block)
]
DOCUMENTS = {document.get("kind") or next(iter(document)): document for document in READ}
VARIABLE = r"ALBERT_SERVE_[A-Z_]+"
METRIC = re.compile(r"\b(?:albert_serve|bentoml_service)_\w+(?=[\[{,)]|$)")


def container() -> Any:
    (only,) = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def test_the_dashboard_asks_for_metrics_that_exist_with_labels_that_they_have(
    client: httpx.Client,
) -> None:
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    client.post("/fill-mask", json=BODY).raise_for_status()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > len(dashboard["panels"]) > 5
    for expression in expressions:
        names = METRIC.findall(expression)
        assert names
        known = set.union(*(labels[name] for name in names))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        matched = re.findall(r"[{,]\s*(\w+)(?:=~|!~|!=|=)\"", expression)
        used = {label.strip() for group in grouped for label in group.split(",")} | set(matched)
        assert used <= known, expression
    for variable in dashboard["templating"]["list"]:
        assert set(METRIC.findall(variable["query"])) <= set(labels)


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
def test_the_files_are_valid(version: str) -> None:
    for kind in ("Deployment", "Service", "HorizontalPodAutoscaler"):
        kubernetes_validate.validate(DOCUMENTS[kind], version, strict=True)


def test_every_variable_that_is_named_is_one() -> None:
    pages = [(ROOT / "docs" / page).read_text() for page in ("serve.md", "tasks.md")]
    named = set(re.findall(VARIABLE, "\n".join([TEXT, *pages])))
    assert len(named) > 20
    assert named <= VARIABLES.keys()


def test_probes_scaling_and_the_table_ask_for_what_exists(client: httpx.Client) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert client.get(container()[probe]["httpGet"]["path"]).status_code == 200
    metrics = client.get("/metrics").text
    query = DOCUMENTS["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    tabled = re.findall(r"^\| `(albert_serve_\w+)` \| ([\w, ]+) \|", TEXT, re.MULTILINE)
    assert len(tabled) > 5
    for name in re.findall(r"albert_serve_\w+", query):
        assert f"\n{name}{{" in metrics
    for name, labels in tabled:
        (label_text, *_) = re.findall(rf"^{name}(?:_count)?{{(.*)}}", metrics, re.MULTILINE)
        assert set(re.findall(r"(\w+)=", label_text)) == set(labels.split(", "))


PAGE = (ROOT / "docs/tasks.md").read_text()
ADDRESS = "http://127.0.0.1:3000"


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next one of its level."""
    [(level, start)] = re.findall(rf"^(#+) {title}\n([\s\S]*)", page, re.MULTILINE)
    return re.split(rf"^#{{1,{len(level)}}} ", str(start), maxsplit=1, flags=re.MULTILINE)[0]


TASK_PAGES = {
    task: section(PAGE, task.replace("-", " ").capitalize().replace("Fill mask", "Fill-mask"))
    for task in TASKS
    if task != "feature-extraction"
}
EXAMPLE = re.compile(r"```sh\n(?P<command>curl .*?)```\n+```json\n(?P<reply>.*?)```", re.DOTALL)
PARAMETER = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>.+?) \|", re.MULTILINE)
EXAMPLES = [
    pytest.param(task, example, id=f"{task} {number}")
    for task, page in TASK_PAGES.items()
    for number, example in enumerate(EXAMPLE.finditer(page))
]


def shape(value: Any) -> Any:
    """The keys, lengths and types of a reply, without its words and figures."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return type(value)


@pytest.mark.parametrize(("task", "example"), EXAMPLES)
def test_a_command_works_as_printed(
    task: str, example: re.Match[str], service_of: Callable[[str], Running]
) -> None:
    command = example["command"].replace(ADDRESS, service_of(task).url)
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, check=True, timeout=60, text=True
    )
    assert shape(json.loads(done.stdout)) == shape(json.loads(example["reply"]))


def test_the_parameters_have_their_defaults() -> None:
    for task, page in TASK_PAGES.items():
        listed = {match["name"]: match["default"] for match in PARAMETER.finditer(page)}
        fields = TASKS[task].parameters.model_json_schema()["properties"]
        assert {*listed, "truncation"} == set(fields)  # "Long texts" has truncation, for all tasks
        for name, default in listed.items():
            value = fields[name].get("default")
            assert default.strip("`") == ("none" if value is None else json.dumps(value)), name
    listed_names = re.findall(
        r"^\| `(\w+)` \|", section(PAGE, "Hugging Face's format"), re.MULTILINE
    )
    assert {*listed_names, "truncation"} == {*TASKS["feature-extraction"].parameters.model_fields}


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


@pytest.mark.extended
def test_it_serves_without_rights_on_a_read_only_file_system(
    bundle_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path
    (folder / "scratch").mkdir()
    for program in ("unshare", "setpriv"):
        needs_program(program, package="util-linux")
    tried = subprocess.run(unprivileged(folder, "true"), capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this system allows no user namespaces: {tried.stderr.decode().strip()}")
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
    printed = run_module(
        "bentoml",
        "build",
        "--bentofile",
        bentofile,
        "--output",
        "tag",
        cwd=checkout,
        environment=environment,
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
    run_module("bentoml", "export", tag, archive, cwd=empty, environment=environment)
    shutil.rmtree(checkout)
    shutil.rmtree(environment["BENTOML_HOME"])
    elsewhere = {**environment, "BENTOML_HOME": str(tmp_path / "elsewhere")}
    run_module("bentoml", "import", archive, cwd=empty, environment=elsewhere)
    with running_service(elsewhere, empty, ("bentoml", "serve", tag)) as running:
        info = httpx.get(f"{running.url}/info").json()
        assert info["model_id"] == "albert-small-en"
        for path in ("/", "/web/app.js", "/docs", "/metrics"):
            assert httpx.get(running.url + path).status_code == 200, path
        for task in (each["name"] for each in info["tasks"]):
            reply = httpx.post(f"{running.url}/{task}", json=REQUESTS[task])
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
