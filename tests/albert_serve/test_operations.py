"""What docs/operations.md has to copy: it parses, and names only what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.settings import Settings
from tests.albert_serve.support import ROOT

TEXT = (ROOT / "docs/operations.md").read_text()
DOCUMENTS: dict[str, Any] = {
    document.get("kind") or next(iter(document)): document
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    for document in yaml.safe_load_all(block)
}
VARIABLE = r"ALBERT_SERVE_[A-Z_]+"


def container() -> Any:
    (found,) = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


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


@pytest.mark.parametrize("page", ["operations.md", "security.md"])
def test_every_variable_that_is_named_is_one(page: str) -> None:
    named = set(re.findall(VARIABLE, (ROOT / "docs" / page).read_text()))
    known = set(re.findall(VARIABLE, (ROOT / "albert_serve/settings.py").read_text()))
    assert named
    assert named <= known


def test_the_probes_are_answered(client: httpx.Client) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert client.get(container()[probe]["httpGet"]["path"]).status_code == 200


def test_the_parts_fit_each_other() -> None:
    labels = DOCUMENTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert DOCUMENTS["Service"]["spec"]["selector"] == labels
    assert DOCUMENTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    scaled = DOCUMENTS["ScaledObject"]["spec"]["scaleTargetRef"]["name"]
    assert scaled == DOCUMENTS["Deployment"]["metadata"]["name"]
    (scrape,) = DOCUMENTS["scrape_configs"]["scrape_configs"]
    assert scrape["authorization"]["type"] == "Bearer"


def test_tracing_is_set_for_the_service_that_there_is(client: httpx.Client) -> None:
    assert list(DOCUMENTS["services"]) == ["services"]  # BentoML refuses a version
    (name,) = DOCUMENTS["services"]["services"]
    assert f'service_name="{name}"' in client.get("/metrics").text


def test_scaling_and_the_table_ask_for_metrics_that_exist(client: httpx.Client) -> None:
    metrics = client.get("/metrics").text
    query = DOCUMENTS["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    tabled = re.findall(r"^\| `(albert_serve_\w+)` \| ([\w, ]+) \|", TEXT, re.MULTILINE)
    assert len(tabled) > 5
    for name in re.findall(r"albert_serve_\w+", query):
        assert f"\n{name}{{" in metrics
    for name, labels in tabled:
        (given, *_) = re.findall(rf"^{name}(?:_count)?{{(.*)}}", metrics, re.MULTILINE)
        assert set(re.findall(r"(\w+)=", given)) == set(labels.split(", "))
