"""Clients that others' tools generate from the API document, against the running service."""

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
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from albert_serve.api.examples import EXAMPLES
from albert_serve.tasks import TASKS
from tests.albert_serve.support import Running


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    read: dict[str, Any] = client.get("/docs.json").json()
    return read


@pytest.fixture(scope="module")
def generated(
    document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Imports modules of the client that openapi-python-client generates, without a warning."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_text(json.dumps(document))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [
        "-m",
        "openapi_python_client",
        "generate",
        "--path",
        "openapi.json",
        "--meta",
        "none",
    ]
    done = subprocess.run(
        [sys.executable, *command, "--output-path", "generated_client", "--fail-on-warning"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.append(str(folder))
    return lambda name: importlib.import_module(f"generated_client{name}")


def answer_of(service: Running, task: str, body: dict[str, Any]) -> Any:
    """The reply of the service to a plain HTTP client."""
    return httpx.post(f"{service.url}/{task}", json=body, timeout=30).json()


def test_the_document_is_valid_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    OpenAPIV31SpecValidator(document).validate()


@pytest.mark.parametrize("task", TASKS)
def test_a_generated_python_client_calls_each_task(
    task: str, generated: Callable[[str], Any], service_of: Callable[[str], Running]
) -> None:
    service = service_of(task)
    models = generated(".models")
    name = task.replace("-", "_")
    request = getattr(models, f"{name.title().replace('_', '')}Request")
    with generated("").Client(base_url=service.url) as caller:
        for example in EXAMPLES[task]:
            body = request.from_dict(example.body)
            assert body.to_dict() == example.body
            reply = generated(f".api.service_ap_is.{name}").sync_detailed(client=caller, body=body)
            assert reply.status_code == 200
            assert plain(reply.parsed) == answer_of(service, task, example.body)
        # The same by the model's name.
        by_name = generated(f".api.one_model_of_several.post_v1_models_model_{name}")
        model = generated(".api.service_ap_is.get_info").sync(client=caller).model_id
        assert plain(by_name.sync(model, client=caller, body=body)) == plain(reply.parsed)


def test_a_generated_python_client_reads_errors_and_models(
    generated: Callable[[str], Any], service: Running
) -> None:
    models = generated(".models")
    with generated("").Client(base_url=service.url) as caller:
        body = models.FillMaskRequest(inputs="no mask", parameters=None)
        refused = generated(".api.service_ap_is.fill_mask").sync_detailed(client=caller, body=body)
        assert refused.status_code == 422
        assert refused.parsed.error_type == "no_mask"
        listed = generated(".api.service_ap_is.get_v1_models").sync(client=caller)
        assert [model.model_id for model in listed.models] == [listed.default]


def plain(value: Any) -> Any:
    """The values of generated models, as JSON."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if isinstance(value, float) else value.to_dict()
