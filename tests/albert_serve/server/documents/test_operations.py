"""deploy/kubernetes/ and what the documents have to copy: valid, and only of what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.settings import VARIABLES, Settings
from tests.albert_serve.support import ROOT
from tests.programs import needs_program

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
PARTS = [document for document in READ if next(iter(document)) == "env"]
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


def test_the_parts_of_a_container_are_taken(tmp_path: Path) -> None:
    models, gpu = PARTS
    (variable,) = gpu["env"]
    assert Settings.from_environment({variable["name"]: variable["value"]}).device == "cuda"
    (variable,) = models["env"]
    assert Settings.from_environment({variable["name"]: str(tmp_path)}).models == tmp_path
    (mount,), (volume,) = models["volumeMounts"], models["volumes"]
    assert mount["name"] == volume["name"]
    assert mount["readOnly"] is volume["persistentVolumeClaim"]["readOnly"] is True
    assert mount["mountPath"] == variable["value"]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_container_has_no_rights_and_a_folder_to_write() -> None:
    pod = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1034  # test_bento.py has the image's
    context = container()["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    paths = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    (written,) = [volume["name"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert paths[written] == "/tmp"
    for variable in yaml.safe_load((ROOT / "bentofile.yaml").read_text())["envs"]:
        assert not variable["value"].startswith("/") or variable["value"].startswith("/tmp/")


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("kind", ["Deployment", "Service", "HorizontalPodAutoscaler"])
def test_the_files_are_valid(kind: str, version: str) -> None:
    kubernetes_validate.validate(DOCUMENTS[kind], version, strict=True)


def test_the_kustomization_is_of_the_files_there_are() -> None:
    kustomization = DOCUMENTS["Kustomization"]
    files = {file.name for file in KUBERNETES.iterdir()} - {"kustomization.yaml", "keys"}
    assert set(kustomization["resources"]) == files
    (image,), (secret,) = kustomization["images"], kustomization["secretGenerator"]
    assert container()["image"] == image["name"]
    volumes = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"secretName": secret["name"]} in [volume.get("secret") for volume in volumes]
    (path,) = [
        entry["value"] for entry in container()["env"] if entry["name"].endswith("KEYS_FILE")
    ]
    assert [Path(path).name] == secret["files"]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert f"deploy/kubernetes/{secret['files'][0]}" in ignored
    registry, _, name = image["newName"].partition("/")
    assert f"REGISTRY={registry} " in TEXT
    assert f"docker push $REGISTRY/{name}:{image['newTag']}\n" in TEXT


def test_kubectl_renders_the_manifests() -> None:
    kubectl = needs_program("kubectl", package="kubernetes-client")
    assert DOCUMENTS["Deployment"]["metadata"]["name"] in rendered(kubectl)


def rendered(kubectl: str) -> str:
    """The documents that `kubectl apply -k` would send; without a file of keys it fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(KUBERNETES, f"{folder}/kubernetes")
        Path(copy, "keys").unlink(missing_ok=True)
        command = [kubectl, "kustomize", copy]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode != 0
        assert "keys" in refused.stderr
        Path(copy, "keys").write_text("a-key\n")
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    for document in yaml.safe_load_all(done.stdout):
        kubernetes_validate.validate(document, "1.37", strict=True)
    return done.stdout


@pytest.mark.parametrize("page", [*PAGES, "serve.md", "tasks.md"])
def test_every_variable_that_is_named_is_one(page: str) -> None:
    named = set(re.findall(VARIABLE, (ROOT / "docs" / page).read_text()))
    assert named
    assert named <= VARIABLES.keys()


def test_the_probes_are_answered(client: httpx.Client) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert client.get(container()[probe]["httpGet"]["path"]).status_code == 200


def test_the_parts_fit_each_other() -> None:
    labels = DOCUMENTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert DOCUMENTS["Service"]["spec"]["selector"] == labels
    assert DOCUMENTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    for scaler in ("ScaledObject", "HorizontalPodAutoscaler"):
        scaled = DOCUMENTS[scaler]["spec"]["scaleTargetRef"]["name"]
        assert scaled == DOCUMENTS["Deployment"]["metadata"]["name"]
    assert "replicas" not in DOCUMENTS["Deployment"]["spec"]  # the scaler's
    (port,) = container()["ports"]
    assert port["containerPort"] == 3000  # BentoML's; the image sets no other
    assert DOCUMENTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    (scrape,) = DOCUMENTS["scrape_configs"]["scrape_configs"]
    assert scrape["authorization"]["type"] == "Bearer"


def test_tracing_is_set_for_the_service_that_there_is(client: httpx.Client) -> None:
    assert list(DOCUMENTS["services"]) == ["services"]  # BentoML refuses a version
    (name,) = DOCUMENTS["services"]["services"]
    assert list(DOCUMENTS["name"]["services"]) == [name]
    assert f'service_name="{name}"' in client.get("/metrics").text


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
