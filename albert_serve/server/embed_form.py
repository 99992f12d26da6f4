"""The format of text-embeddings-inference for embeddings: `/embed`."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from albert_serve.api.embeddings import FeatureExtractionRequest
from albert_serve.api.schemas import FeatureExtractionReply
from albert_serve.api.wire import validate
from albert_serve.server.models.hosted_model import HostedModel
from albert_serve.server.task_requests import ParsedRequest

_REPLY: TypeAdapter[FeatureExtractionReply] = TypeAdapter(FeatureExtractionReply)


def read_embed(model: HostedModel, _task: str, body: Any) -> ParsedRequest:
    """Read a request; see `task_requests.Reader`. By default, vectors have length 1."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
        inputs, direction = body.get("inputs"), body.get("truncation_direction")
        model.check_num_items(inputs)
        body = {"normalize": True, **body}
        if isinstance(inputs, str):  # the reply is a list
            body["inputs"] = [inputs]
        if direction in ("Right", "Left"):
            body["truncation_direction"] = direction.lower()
    return ParsedRequest(
        request=validate(FeatureExtractionRequest, body),
        write=lambda _, reply: _REPLY.dump_json(reply),
    )
