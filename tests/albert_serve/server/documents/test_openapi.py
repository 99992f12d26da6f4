"""The API document against the running service: what it shows works, and what it says is so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import jsonschema_rs
import pytest

from albert_serve.api.embeddings import EMBEDDINGS_PATH
from albert_serve.api.examples import EMBEDDINGS_EXAMPLES, EXAMPLES, RERANK_EXAMPLES, RequestExample
from albert_serve.api.rerank import RERANK
from albert_serve.api.schemas import MODEL_PATH
from albert_serve.api.zero_shot import ZERO_SHOT
from albert_serve.tasks import TASKS
from tests.albert_serve.support import Running

ALL = [
    pytest.param(task, example, id=f"{task}: {example.summary}")
    for task, examples in EXAMPLES.items()
    for example in examples
]


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = client.get("/docs.json").json()
    assert client.get("/openapi.json").json() == document
    return document


def content(part: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = part["content"]["application/json"]
    return schema


def check_reply(reply: httpx.Response, path: str, document: dict[str, Any]) -> None:
    """See that a reply is one that the document describes."""
    assert reply.status_code == 200, reply.text
    schema = content(document["paths"][path]["post"]["responses"]["200"])["schema"]
    whole = {**schema, "components": document["components"]}  # where its references point
    jsonschema_rs.validator_for(whole).validate(reply.json())


@pytest.mark.parametrize(("task", "example"), ALL)
def test_every_example_is_answered(
    task: str, example: RequestExample, service_of: Callable[[str], Running]
) -> None:
    url = service_of(task).url
    reply = httpx.post(f"{url}/{task}", json=example.body, timeout=30)
    check_reply(reply, f"/{task}", httpx.get(f"{url}/docs.json", timeout=30).json())
    if isinstance(example.body["inputs"], list):
        assert len(reply.json()) == len(example.body["inputs"])


@pytest.mark.parametrize(
    ("path", "example"),
    [
        *((EMBEDDINGS_PATH, example) for example in EMBEDDINGS_EXAMPLES),
        *(("/rerank", example) for example in RERANK_EXAMPLES),
    ],
)
def test_every_example_in_another_format_is_answered(
    path: str, example: RequestExample, client: httpx.Client, document: dict[str, Any]
) -> None:
    reply = client.post(path, json=example.body)
    check_reply(reply, path, document)
    shown = content(document["paths"][path]["post"]["requestBody"])["examples"]
    assert example.body in [one["value"] for one in shown.values()]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_shows_its_examples(task: str, document: dict[str, Any]) -> None:
    shown = content(document["paths"][f"/{task}"]["post"]["requestBody"])["examples"]
    assert [(one["summary"], one["value"]) for one in shown.values()] == [
        (example.summary, example.body) for example in EXAMPLES[task]
    ]


def test_every_operation_without_a_body_answers_as_it_is(
    document: dict[str, Any], client: httpx.Client
) -> None:
    name = client.get("/info").json()["model_id"]
    gets = [path for path, operations in document["paths"].items() if "get" in operations]
    assert {"/info", "/health", "/livez", "/readyz", "/metrics"} <= set(gets)
    for path in gets:
        assert client.get(path.format(model=name)).status_code == 200, path
    posts = {path for path, operations in document["paths"].items() if "post" in operations}
    tasks = {f"{prefix}/{task}" for task in TASKS for prefix in ("", MODEL_PATH)}
    names = ("embeddings", RERANK, ZERO_SHOT)
    forms = {EMBEDDINGS_PATH, f"/{RERANK}", f"/{ZERO_SHOT}"}
    forms |= {f"{MODEL_PATH}/{name}" for name in names}
    assert posts == tasks | forms | {"/info"}
    assert client.post("/info").json() == client.get("/info").json()


@pytest.mark.parametrize("name", ["parameters", "truncation", "top_k", "targets"])
def test_null_means_the_default_and_the_document_says_so(
    client: httpx.Client, document: dict[str, Any], name: str
) -> None:
    null = {"parameters": None} if name == "parameters" else {"parameters": {name: None}}
    reply = client.post("/fill-mask", json={"inputs": "A [MASK].", **null})
    assert reply.json() == client.post("/fill-mask", json={"inputs": "A [MASK]."}).json()
    schemas = document["components"]["schemas"]
    described = schemas["FillMaskRequest" if name == "parameters" else "FillMaskParameters"]
    assert {"type": "null"} in described["properties"][name]["anyOf"]
