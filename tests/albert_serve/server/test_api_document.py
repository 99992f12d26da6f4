"""The API document and docs/tasks.md describe the running service.

schemathesis sends requests that the document allows, and requests that it forbids. It compares
statuses, content types and bodies with the document. It checks that the service rejects forbidden
requests, replies 405 to undocumented methods, and requires keys as documented.
openapi-python-client generates a client.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from albert_serve.api.embeddings import EMBEDDINGS_PATH
from albert_serve.api.schemas import MODEL_PATH
from albert_serve.api.zero_shot import ZERO_SHOT
from albert_serve.server.openapi import EXAMPLES
from albert_serve.server.paths import DEFAULT_PATHS, ENDPOINTS
from albert_serve.tasks import TASKS
from tests.albert_serve.support import ROOT, RunningService, run_module, served

KEY = "a-key-for-schemathesis"


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = client.get("/docs.json").json()
    return document


@pytest.mark.parametrize("endpoint", [name for name in EXAMPLES if name != ZERO_SHOT])
def test_the_reply_to_each_example_fits_its_schema(
    endpoint: str, service_of: Callable[[str], RunningService]
) -> None:
    url, path = service_of(ENDPOINTS[endpoint]).url, DEFAULT_PATHS[endpoint]
    document = httpx.get(f"{url}/docs.json", timeout=30).json()
    operation = document["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]["example"]
    assert body == EXAMPLES[endpoint]
    reply = httpx.post(f"{url}{path}", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    resolvable = {**schema, "components": document["components"]}
    jsonschema_rs.validator_for(resolvable).validate(reply.json())


def test_the_document_is_valid_and_has_every_operation(
    document: dict[str, Any], client: httpx.Client
) -> None:
    OpenAPIV31SpecValidator(document).validate()
    assert client.get("/openapi.json").json() == document
    name = client.get("/info").json()["model_id"]
    gets = [path for path, operations in document["paths"].items() if "get" in operations]
    assert {"/info", "/health", "/livez", "/readyz", "/metrics"} <= set(gets)
    for path in gets:
        assert client.get(path.format(model=name)).status_code == 200, path
    posts = {path for path, operations in document["paths"].items() if "post" in operations}
    endpoints = {f"{prefix}/{name}" for name in [*TASKS, ZERO_SHOT] for prefix in ("", MODEL_PATH)}
    assert posts == endpoints | {EMBEDDINGS_PATH, f"{MODEL_PATH}/embeddings", "/info"}
    assert client.post("/info").json() == client.get("/info").json()


def test_a_generated_python_client_calls_each_task_and_reads_errors(
    document: dict[str, Any],
    service_of: Callable[[str], RunningService],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The generator prints no warning."""
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ("openapi_python_client", "generate", "--path", "openapi.json", "--meta", "none")
    options = ("--output-path", "generated_client", "--fail-on-warning")
    run_module(*command, *options, cwd=tmp_path, environment=environment)
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("generated_client")
    models = importlib.import_module("generated_client.models")
    for task in TASKS:
        url, name = service_of(task).url, task.replace("-", "_")
        call = importlib.import_module(f"generated_client.api.service_ap_is.{name}")
        request = getattr(models, f"{name.title().replace('_', '')}Request")
        with package.Client(base_url=url) as caller:
            body = request.from_dict(EXAMPLES[task])
            assert body.to_dict() == EXAMPLES[task]
            reply = call.sync_detailed(client=caller, body=body)
            assert reply.status_code == 200
            expected = httpx.post(f"{url}/{task}", json=EXAMPLES[task], timeout=30).json()
            assert as_json(reply.parsed) == expected
    fill_mask = importlib.import_module("generated_client.api.service_ap_is.fill_mask")
    with package.Client(base_url=service_of("fill-mask").url) as caller:
        body = models.FillMaskRequest(inputs="no mask", parameters=None)
        reply = fill_mask.sync_detailed(client=caller, body=body)
        assert reply.status_code == 422
        assert reply.parsed.error_type == "no_mask"


def as_json(value: Any) -> Any:
    """Convert the values of generated models to JSON."""
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return value if isinstance(value, float) else value.to_dict()


@pytest.mark.extended
def test_a_service_with_keys_behaves_as_documented(bundle_dir: Path, tmp_path: Path) -> None:
    header = f"Authorization: Bearer {KEY}"
    options = ["--phases", "examples,fuzzing", "--max-examples", "15", "--header", header]
    with served(bundle_dir, tmp_path, API_KEYS=KEY, GUARD="api,metrics") as guarded:
        run_schemathesis(guarded, tmp_path, *options)


@pytest.mark.slow
def test_a_service_without_keys_behaves_as_documented(
    service: RunningService, tmp_path: Path
) -> None:
    options = ["--phases", "examples,coverage,fuzzing", "--max-examples", "200"]
    run_schemathesis(service, tmp_path, *options)


def run_schemathesis(running: RunningService, folder: Path, *options: str) -> None:
    configuration = str(Path(__file__).with_name("schemathesis.toml"))
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", configuration),
            *("run", f"{running.url}/docs.json", "--checks", "all", "--seed", "1"),
            *("--continue-on-failure", "--no-color", *options),
        ],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    # A printed request may have a million characters.
    lines = [line[:300] for line in (run.stdout + run.stderr).splitlines()]
    assert run.returncode == 0, "\n".join(lines)
    assert "Traceback" not in running.log


PAGE = (ROOT / "docs/tasks.md").read_text()
ADDRESS = "http://127.0.0.1:3000"
EXAMPLE = re.compile(r"```sh\n(curl .*?)```\n+```json\n(.*?)```", re.DOTALL)
PARAMETER = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>.+?) \|", re.MULTILINE)


def section(title: str) -> str:
    """Return the text below a heading, up to the next heading of its level."""
    [(level, text)] = re.findall(rf"^(#+) {title}\n([\s\S]*)", PAGE, re.MULTILINE)
    return re.split(rf"^#{{1,{len(level)}}} ", str(text), maxsplit=1, flags=re.MULTILINE)[0]


SECTIONS = {
    task: section("Fill-mask" if task == "fill-mask" else task.replace("-", " ").capitalize())
    for task in TASKS
    if task != "feature-extraction"
}


def shape(value: Any) -> Any:
    """Return a reply with types in place of its texts and numbers."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value)


def test_the_replies_to_the_commands_have_the_printed_shapes(service: RunningService) -> None:
    """The entities in the section "Token classification" depend on the model."""
    examples = [example for text in SECTIONS.values() for example in EXAMPLE.findall(text)]
    assert len(examples) > 4
    for command, printed in examples:
        local_command = command.replace(ADDRESS, service.url)
        reply = subprocess.check_output(["bash", "-c", local_command], timeout=60)
        assert shape(json.loads(reply)) == shape(json.loads(printed))


def test_the_page_lists_all_parameters_and_their_defaults() -> None:
    """The section "Long texts" describes `truncation`, for all tasks."""
    for task, text in SECTIONS.items():
        defaults = {match["name"]: match["default"] for match in PARAMETER.finditer(text)}
        fields = TASKS[task].parameters.model_json_schema()["properties"]
        assert {*defaults, "truncation"} == set(fields)
        for name, default in defaults.items():
            value = fields[name].get("default")
            assert default.strip("`") == ("none" if value is None else json.dumps(value)), name
    names = re.findall(r"^\| `(\w+)` \|", section("Hugging Face's format"), re.MULTILINE)
    assert {*names, "truncation"} == {*TASKS["feature-extraction"].parameters.model_fields}
