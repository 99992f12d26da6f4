"""The OpenAPI document, which adds the tasks' endpoints to BentoML's document."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from albert_serve import __version__
from albert_serve.api.embeddings import (
    EMBEDDINGS,
    EmbeddingsReply,
    EmbeddingsRequest,
    OpenAIErrorReply,
)
from albert_serve.api.schemas import (
    MODEL_PATH,
    MODELS_PATH,
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    ErrorReply,
    ModelReply,
    ModelsReply,
)
from albert_serve.api.zero_shot import ZERO_SHOT, ZeroShotReply, ZeroShotRequest
from albert_serve.server.paths import DEFAULT_PATHS
from albert_serve.tasks import TASKS

# pydantic writes JSON Schema 2020-12, which OpenAPI 3.0 does not support.
_OPENAPI: Final = "3.1.0"
_REF: Final = "#/components/schemas/{model}"
_TAG: Final = "Service APIs"
_MODEL_TAG: Final = "One model of several"

_SECURITY: Final = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "API key, if the service requires one.",
    }
}
_REPLY_HEADERS: Final = {
    TRUNCATED_HEADER: {
        "description": "Number of removed tokens, if `truncation` is set and a text was too long.",
        "schema": {"type": "integer", "minimum": 1},
    },
    WARNINGS_HEADER: {
        "description": "Warnings about the answer, as a JSON array of strings.",
        "schema": {"type": "string"},
    },
}
_RETRY_HEADERS: Final = {
    "Retry-After": {
        "description": "Seconds to wait before the next attempt.",
        "schema": {"type": "integer", "minimum": 0},
    }
}
_MODEL: Final = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "Name of a model that /v1/models lists.",
    "schema": {"type": "string"},
}
_ERRORS: Final[dict[str, str]] = {
    "400": "The body is not JSON in UTF-8, or is incomplete.",
    "401": "The service requires a key, and the request's key is missing or invalid.",
    "404": "The model does not have this task.",
    "413": "The body exceeds max_body_bytes of /info.",
    "415": "The content type is not application/json, or the body is compressed.",
    "422": "A value is invalid, or a field is unknown.",
    "429": "The service is overloaded. Try again after Retry-After seconds.",
    "500": "The model or the service failed.",
    "503": "The service is starting or shutting down.",
    "504": "The answer missed the deadline.",
}
_CONTEXT: Final = (
    "The bridge over the river was built in 1932. It was designed by an engineer from Vienna, and "
    "was closed to cars in 1988."
)
# An example of a request body for each endpoint.
EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "fill-mask": {"inputs": "He was born in the United [MASK].", "parameters": {"top_k": 3}},
    "text-classification": {
        "inputs": ["A moving film.", {"text": "A dog runs.", "text_pair": "It moves."}],
        "parameters": {"top_k": 1, "function_to_apply": "sigmoid", "truncation": True},
    },
    "question-answering": {
        "inputs": {"question": "Who designed it?", "context": _CONTEXT},
        "parameters": {"top_k": 3, "handle_impossible_answer": True, "max_answer_len": 8},
    },
    "sentence-order": {
        "inputs": [
            {"text": "It rained.", "text_pair": "So we stayed in."},
            {"sentences": ["It rained.", "So we stayed in.", "We played cards."]},
        ]
    },
    "token-classification": {
        "inputs": ["Anna Berg lives in Vienna.", "She was born in Graz."],
        "parameters": {"aggregation_strategy": "none", "ignore_labels": []},
    },
    "feature-extraction": {
        "inputs": ["It rained.", "The weather was bad.", "He studied physics."],
        "parameters": {"normalize": True, "truncation": True},
    },
    EMBEDDINGS: {"input": ["It rained.", "He studied physics."], "encoding_format": "base64"},
    ZERO_SHOT: {
        "inputs": "My card was stolen this morning.",
        "parameters": {"candidate_labels": ["card", "loan", "exchange rate"]},
    },
}
# The type of requests and the type of replies for each endpoint.
_SCHEMAS: Final[dict[str, tuple[type[BaseModel], Any]]] = {
    **{name: (task.request, task.reply) for name, task in TASKS.items()},
    EMBEDDINGS: (EmbeddingsRequest, EmbeddingsReply),
    ZERO_SHOT: (ZeroShotRequest, ZeroShotReply),
}


def describe_service(base: dict[str, Any]) -> dict[str, Any]:
    """Return BentoML's document with our paths and schemas, which are more detailed.

    BentoML's schemas are omitted, because only the replaced paths refer to them.

    Args:
        base: document that BentoML generates.
    """
    schemas, replies = _schemas()
    operations = {
        name: {"post": _operation(name, request, replies[name])}
        for name, (request, _) in _SCHEMAS.items()
    }
    info = {"get": _get("The model with its tasks, and the limits of the service.", ModelReply)}
    health = {"get": _health()}
    by_name = {"": info, "/info": info, "/health": health}
    by_name |= {f"/{name}": operation for name, operation in operations.items()}
    return {
        **base,
        "openapi": _OPENAPI,
        "tags": [*base.get("tags", []), {"name": _MODEL_TAG}],
        "info": {
            "title": "albert_serve",
            "version": __version__,
            "description": "ALBERT: fill-mask, text classification, question answering, sentence "
            "order, token classification and embeddings, in Hugging Face's "
            "format; embeddings in OpenAI's, too.",
        },
        "components": {"schemas": schemas, "securitySchemes": _SECURITY},
        "security": [{}, {"key": []}],
        "paths": {
            **base.get("paths", {}),
            **{DEFAULT_PATHS[name]: operation for name, operation in operations.items()},
            # BentoML's clients call endpoints by POST only.
            "/info": {**info, "post": info["get"]},
            "/health": health,
            MODELS_PATH: {"get": _get("All models of the service.", ModelsReply)},
            **{MODEL_PATH + path: _by_name(operation) for path, operation in by_name.items()},
        },
    }


def _schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all schemas by name, and the schemas of the tasks' replies."""
    types = [request for request, _ in _SCHEMAS.values()]
    types += [ErrorReply, OpenAIErrorReply, ModelReply, ModelsReply]
    adapters: list[tuple[str, Literal["serialization"], TypeAdapter[Any]]] = [
        (name, "serialization", TypeAdapter(reply)) for name, (_, reply) in _SCHEMAS.items()
    ]
    _, requests = models_json_schema([(kind, "validation") for kind in types], ref_template=_REF)
    replies, parts = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    schemas = {**requests["$defs"], **parts["$defs"]}
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            # Code generators reject an object as a default. The object's fields have the same
            # defaults.
            if isinstance(field.get("default"), dict):
                del field["default"]
    return schemas, {name: schema for (name, _), schema in replies.items()}


def _by_name(operations: dict[str, Any]) -> dict[str, Any]:
    """Return the operations for paths that contain a model's name."""
    by_name: dict[str, Any] = {"parameters": [_MODEL]}
    for method, operation in operations.items():
        not_found = {
            "content": _json(_reference(ErrorReply)),
            **operation["responses"].get("404", {}),
            "description": "The model does not exist, or does not have this task.",
        }
        by_name[method] = {
            **{key: value for key, value in operation.items() if key != "operationId"},
            "tags": [_MODEL_TAG],
            "responses": {**operation["responses"], "404": not_found},
        }
    return by_name


def _operation(name: str, request: type[BaseModel], reply: dict[str, Any]) -> dict[str, Any]:
    content = _json(_reference(request))
    content["application/json"]["example"] = EXAMPLES[name]
    return {
        "tags": [_TAG],
        "operationId": name.replace("-", "_"),
        "summary": (request.__doc__ or "").strip(),
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "The answer.",
                "headers": _REPLY_HEADERS,
                "content": _json(reply),
            },
            **_error_responses(OpenAIErrorReply if name == EMBEDDINGS else ErrorReply),
        },
    }


def _get(summary: str, reply: type[BaseModel]) -> dict[str, Any]:
    return {
        "tags": [_TAG],
        "summary": summary,
        "responses": {"200": {"description": summary, "content": _json(_reference(reply))}},
    }


def _health() -> dict[str, Any]:
    reply = {"type": "object", "properties": {"status": {"const": "ok"}}}
    return {
        "tags": [_TAG],
        "summary": "Whether the service accepts requests.",
        "responses": {
            "200": {"description": "The service accepts requests.", "content": _json(reply)},
            "503": {"description": _ERRORS["503"], "content": _json(_reference(ErrorReply))},
        },
    }


def _error_responses(error: type[BaseModel]) -> dict[str, Any]:
    content = _json(_reference(error))
    replies: dict[str, Any] = {
        status: {"description": text, "content": content} for status, text in _ERRORS.items()
    }
    replies["429"]["headers"] = _RETRY_HEADERS
    return replies


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
