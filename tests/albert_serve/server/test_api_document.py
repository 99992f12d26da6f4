"""The API document is true of the running service, and others' tools can use it.

schemathesis asks what it allows and what it forbids: it checks statuses, content types and bodies
against the document, that what the document forbids is refused, that methods which it lacks are
405, and that keys are asked for where it says so. openapi-python-client makes a client of it.
"""

from __future__ import annotations

import importlib
import json
import os
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
from tests.albert_serve.support import Running, run_module, served

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
KEY = "a-key-for-schemathesis"
SEED = "1"


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = client.get("/docs.json").json()
    return document


@pytest.mark.parametrize("endpoint", [name for name in EXAMPLES if name != ZERO_SHOT])
def test_every_example_is_answered(endpoint: str, service_of: Callable[[str], Running]) -> None:
    url, path = service_of(ENDPOINTS[endpoint]).url, DEFAULT_PATHS[endpoint]
    document = httpx.get(f"{url}/docs.json", timeout=30).json()
    operation = document["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]["example"]
    assert body == EXAMPLES[endpoint]
    reply = httpx.post(f"{url}{path}", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}  # where its references point
    jsonschema_rs.validator_for(whole).validate(reply.json())


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
    tasks = {f"{prefix}/{task}" for task in TASKS for prefix in ("", MODEL_PATH)}
    forms = {EMBEDDINGS_PATH, f"/{ZERO_SHOT}"}
    forms |= {f"{MODEL_PATH}/{name}" for name in ("embeddings", ZERO_SHOT)}
    assert posts == tasks | forms | {"/info"}
    assert client.post("/info").json() == client.get("/info").json()


def generate_client(document: dict[str, Any], folder: Path) -> None:
    """Let openapi-python-client generate `generated_client`, without a warning."""
    (folder / "openapi.json").write_text(json.dumps(document))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ("openapi_python_client", "generate", "--path", "openapi.json", "--meta", "none")
    options = ("--output-path", "generated_client", "--fail-on-warning")
    run_module(*command, *options, cwd=folder, environment=environment)


def test_a_generated_python_client_calls_each_task_and_reads_errors(
    document: dict[str, Any],
    service_of: Callable[[str], Running],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generate_client(document, tmp_path)
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
            answered = call.sync_detailed(client=caller, body=body)
            assert answered.status_code == 200
            expected = httpx.post(f"{url}/{task}", json=EXAMPLES[task], timeout=30).json()
            assert plain(answered.parsed) == expected
    fill_mask = importlib.import_module("generated_client.api.service_ap_is.fill_mask")
    with package.Client(base_url=service_of("fill-mask").url) as caller:
        body = models.FillMaskRequest(inputs="no mask", parameters=None)
        refused = fill_mask.sync_detailed(client=caller, body=body)
        assert refused.status_code == 422
        assert refused.parsed.error_type == "no_mask"


def plain(value: Any) -> Any:
    """The values of generated models, as JSON."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if isinstance(value, float) else value.to_dict()


@pytest.mark.extended
def test_the_document_is_true(bundle_dir: Path, tmp_path: Path) -> None:
    header = f"Authorization: Bearer {KEY}"
    options = ["--phases", "examples,fuzzing", "--max-examples", "15", "--header", header]
    with served(bundle_dir, tmp_path, API_KEYS=KEY, GUARD="api,metrics") as guarded:
        examine(guarded, tmp_path, *options)


@pytest.mark.slow
def test_the_document_is_true_where_no_key_is_needed(service: Running, tmp_path: Path) -> None:
    examine(service, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200")


def examine(running: Running, folder: Path, *options: str) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION)),
            *("run", f"{running.url}/docs.json", "--checks", "all", "--seed", SEED),
            *("--continue-on-failure", "--no-color", *options),
        ],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    # A request in its output may have a million characters.
    lines = [line[:300] for line in (ended.stdout + ended.stderr).splitlines()]
    assert ended.returncode == 0, "\n".join(lines)
    assert "Traceback" not in running.log
