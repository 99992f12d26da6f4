"""OpenAI's format of embeddings: `/v1/embeddings`, which most vector stores can call.

A request becomes one of feature extraction, and goes the same way through the same limits.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from albert_serve.api.embeddings import (
    Embedding,
    EmbeddingObject,
    EmbeddingsReply,
    EmbeddingsRequest,
    Usage,
    holds_token_ids,
)
from albert_serve.api.schemas import MODEL_PATH
from albert_serve.api.wire import shorten, validate
from albert_serve.errors import InvalidInputError, NotFoundError
from albert_serve.server.models.hosted_model import HostedModel
from albert_serve.server.task_requests import ParsedRequest
from albert_serve.tasks import Prepared


def read_embeddings(model: HostedModel, _task: str, body: Any) -> ParsedRequest:
    """Read a request; see `task_requests.Reader`."""
    if isinstance(body, dict) and not holds_token_ids(body.get("input")):
        model.check_num_items(body.get("input"), name="input")
    request = validate(EmbeddingsRequest, body)
    _check_model(model, request.model)
    _check_dimensions(model, request.dimensions)
    return ParsedRequest(
        request=request.as_feature_extraction(),
        write=partial(_write, model.name, request),
    )


def _check_model(model: HostedModel, name: str | None) -> None:
    if name is not None and name != model.name:
        raise NotFoundError(
            f"the model that answers here is {model.name!r}, not {shorten(name)}; another one of "
            f"the service answers under {MODEL_PATH.format(model='NAME')}, which a client of "
            "OpenAI's has as its base URL"
        )


def _check_dimensions(model: HostedModel, dimensions: int | None) -> None:
    hidden_size = model.bundle.config.hidden_size
    if dimensions not in (None, hidden_size):
        raise InvalidInputError(
            f"dimensions is {dimensions}, and embeddings of {model.name} have {hidden_size}: the "
            "model was not trained to be cut; leave dimensions out"
        )


def _write(
    name: str, request: EmbeddingsRequest, prepared: Sequence[Prepared[Any]], reply: Any
) -> bytes:
    embeddings: list[Embedding] = reply if isinstance(request.input, list) else [reply]
    num_tokens = sum(item.num_tokens for item in prepared)
    is_base64 = request.encoding_format == "base64"
    data = [
        EmbeddingObject(index=index, embedding=_as_base64(numbers) if is_base64 else numbers)
        for index, numbers in enumerate(embeddings)
    ]
    usage = Usage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return EmbeddingsReply(data=data, model=name, usage=usage).model_dump_json().encode()


def _as_base64(embedding: Embedding) -> str:
    return base64.b64encode(np.array(embedding, "<f4").tobytes()).decode("ascii")
