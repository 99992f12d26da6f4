"""The format of text-embeddings-inference for reranking: `/rerank`."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from albert_serve.api.rerank import RerankItem, RerankReply, RerankRequest
from albert_serve.api.wire import validate
from albert_serve.server.models.hosted_model import HostedModel
from albert_serve.server.task_requests import ParsedRequest
from albert_serve.tasks.rerank import Rerank

_REPLY: TypeAdapter[RerankReply] = TypeAdapter(RerankReply)


def read_rerank(model: HostedModel, _task: str, body: Any) -> ParsedRequest:
    """Read a request; see `task_requests.Reader`.

    Raises:
        InvalidInputError: it cannot be answered.
    """
    if isinstance(body, dict):
        model.check_num_items(body.get("texts"), name="texts")
    return ParsedRequest(
        request=RerankItem(inputs=validate(RerankRequest, body)),
        write=lambda _, reply: _REPLY.dump_json(reply, exclude_none=True),
        task=Rerank.open(model.tasks),
    )
