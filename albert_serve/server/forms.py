"""Readers of requests, and writers of replies, in several formats (wire forms).

The tasks use Hugging Face's formats. Feature extraction also reads OpenAI's format
(`/v1/embeddings`, which most vector stores can call) and the format of text-embeddings-inference
(`/embed`). All formats have the same limits.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import pydantic_core
from pydantic import TypeAdapter

from albert_serve.api.embeddings import (
    EMBED,
    EMBEDDINGS,
    Embedding,
    EmbeddingObject,
    EmbeddingsReply,
    EmbeddingsRequest,
    FeatureExtractionRequest,
    Usage,
    holds_token_ids,
)
from albert_serve.api.schemas import MODEL_PATH, FeatureExtractionReply, TaskRequest
from albert_serve.api.wire import shorten, validate
from albert_serve.api.zero_shot import ZERO_SHOT, ZeroShotRequest
from albert_serve.errors import InvalidInputError, NotFoundError
from albert_serve.server.models import HostedModel
from albert_serve.tasks import TASKS, Prepared, Task
from albert_serve.tasks.zero_shot import ZeroShot

_EMBED_REPLY: TypeAdapter[FeatureExtractionReply] = TypeAdapter(FeatureExtractionReply)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """A request of a task, read from any wire form.

    Attributes:
        request: request in Hugging Face's format.
        write: function that returns the reply's body, given the prepared items and the reply in
            Hugging Face's format.
        task: task that answers, or None for the model's usual task at the endpoint.
    """

    request: TaskRequest
    write: Callable[[Sequence[Prepared[Any]], Any], Any] = lambda _, reply: pydantic_core.to_json(
        reply
    )
    task: Task | None = None


def _read_task(task: str, model: HostedModel, body: Any) -> ParsedRequest:
    if isinstance(body, dict):
        model.limits.check_num_items(body.get("inputs"))
    return ParsedRequest(request=validate(TASKS[task].request, body))


def _read_zero_shot(model: HostedModel, body: Any) -> ParsedRequest:
    task = ZeroShot.open(model.tasks)
    if isinstance(body, dict):
        model.limits.check_num_items(body.get("inputs"))
    return ParsedRequest(request=validate(ZeroShotRequest, body), task=task)


def _read_embed(model: HostedModel, body: Any) -> ParsedRequest:
    """Read a request of text-embeddings-inference, whose vectors have length 1 by default."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
        inputs, direction = body.get("inputs"), body.get("truncation_direction")
        model.limits.check_num_items(inputs)
        body = {"normalize": True, **body}
        if isinstance(inputs, str):  # the reply is a list in any case
            body["inputs"] = [inputs]
        if direction in ("Right", "Left"):
            body["truncation_direction"] = direction.lower()
    return ParsedRequest(
        request=validate(FeatureExtractionRequest, body),
        write=lambda _, reply: _EMBED_REPLY.dump_json(reply),
    )


def _read_embeddings(model: HostedModel, body: Any) -> ParsedRequest:
    """Read a request in OpenAI's format."""
    if isinstance(body, dict) and not holds_token_ids(body.get("input")):
        model.limits.check_num_items(body.get("input"), name="input")
    request = validate(EmbeddingsRequest, body)
    if request.model not in (None, model.name):
        raise NotFoundError(
            f"The model at this address is {model.name!r}, not {shorten(request.model)}. To use "
            f"another model, set the client's base URL to {MODEL_PATH.format(model='NAME')}."
        )
    hidden_size = model.bundle.config.hidden_size
    if request.dimensions not in (None, hidden_size):
        raise InvalidInputError(
            f"dimensions is {request.dimensions}, but embeddings of {model.name} have "
            f"{hidden_size}. Omit dimensions, because this model cannot shorten embeddings."
        )
    return ParsedRequest(
        request=request.as_feature_extraction(),
        write=partial(_write_embeddings, model.name, request),
    )


def _write_embeddings(
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


# A reader of a body's JSON value. It raises an InvalidInputError if the value is not a request.
Reader: TypeAlias = Callable[[HostedModel, Any], ParsedRequest]
# The reader of each endpoint's requests.
READERS: Final[dict[str, Reader]] = {
    **{task: partial(_read_task, task) for task in TASKS},
    ZERO_SHOT: _read_zero_shot,
    EMBED: _read_embed,
    EMBEDDINGS: _read_embeddings,
}
