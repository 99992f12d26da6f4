"""The files of deploy/, run or rendered; what the documents say of them and of the tasks."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
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
from albert_serve.settings import VARIABLES, Settings
from albert_serve.tasks import TASKS
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


@pytest.mark.parametrize("kind", ["Deployment", "Service", "HorizontalPodAutoscaler"])
def test_the_files_are_valid(kind: str) -> None:
    for version in ("1.30", "1.37"):
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


def test_the_message_of_a_long_text_is_the_services(client: httpx.Client) -> None:
    told = section(PAGE, "Long texts")
    [message] = re.findall(r"^    (The text has .*)$", told, re.MULTILINE)
    reply = client.post("/text-classification", json={"inputs": "a " * 300})
    pattern = re.sub(r"\d+", r"\\d+", re.escape(message))
    assert re.fullmatch(pattern, reply.json()["error"])
