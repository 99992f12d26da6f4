"""The format of Hugging Face for zero-shot classification: `/zero-shot-classification`."""

from __future__ import annotations

from typing import Any

import pydantic_core

from albert_serve.api.wire import validate
from albert_serve.api.zero_shot import ZeroShotRequest
from albert_serve.server.models.hosted_model import HostedModel
from albert_serve.server.task_requests import ParsedRequest
from albert_serve.tasks.zero_shot import ZeroShot


def read_zero_shot(model: HostedModel, _task: str, body: Any) -> ParsedRequest:
    """Read a request; see `task_requests.Reader`."""
    task = ZeroShot.open(model.tasks)
    if isinstance(body, dict):
        model.check_num_items(body.get("inputs"))
    return ParsedRequest(
        request=validate(ZeroShotRequest, body),
        write=lambda _, reply: pydantic_core.to_json(reply),
        task=task,
    )
