"""The inputs of BentoML's endpoints, and how one is answered: over HTTP, or in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final, Self, cast

import bentoml
from bentoml.exceptions import BentoMLException
from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from albert_serve.api.schemas import InfoReply
from albert_serve.errors import AlbertServeError
from albert_serve.server.answering import answer_call, answer_request, reply_to_error
from albert_serve.server.error_replies import (
    JSON,
    error_response,
    keep_error,
    media_type_of,
    not_json,
)
from albert_serve.server.models.registry import Models
from albert_serve.tasks import TASKS

# BentoML's format between the services of one deployment.
_INTERNAL: Final = "application/vnd.bentoml+pickle"


class MediaTypes:
    """ASGI middleware that answers 415 to what is declared as anything but JSON.

    BentoML takes any media type. Its pickles it refuses too, but logs each as a failure.

    Args:
        is_internal: whether only services of the same deployment can call; these send pickles.
    """

    def __init__(self, app: ASGIApp, *, is_internal: bool) -> None:
        self.app = app
        self._allowed = {"", JSON, _INTERNAL} if is_internal else {"", JSON}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before any of its body is read."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        media_type = media_type_of(Headers(scope=scope)) if is_post else ""
        if media_type in self._allowed:
            await self.app(scope, receive, send)
        else:
            await error_response(not_json(media_type), scope)(scope, receive, send)


class _Described(bentoml.IODescriptor):  # type: ignore[misc]
    """An input or a reply, as `/schema.json` has it for BentoML's clients."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's own schema: BentoML's additions, for tensors, break tagged unions."""
        return handler(source)

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the schema without references and with `oneOf` for `anyOf`.

        BentoML drops what references refer to, and of `anyOf` keeps the first: its client would
        pass over misspelt parameters, and fail where a list may be null.
        """
        schema: dict[str, Any] = super().model_json_schema(*args, **kwargs)
        described: dict[str, Any] = _inlined(schema, schema.pop("$defs", {}))
        return described


class NoInput(_Described):
    """No input."""

    @classmethod
    async def from_http_request(cls, request: Request, serde: Any) -> Self:
        """Read the input of another service; leave any other to the endpoint, with fields None.

        BentoML would read a body of any size and content type, take any time for it, refuse an
        invalid one with another status and format, and log it as a failure (docs/decisions.md).
        """
        if serde.media_type == _INTERNAL:
            try:
                read: Self = await super().from_http_request(request, serde)
            except AlbertServeError as error:  # admission control refuses it within its body
                keep_error(error, request.scope)
                raise as_bentomls(error) from error
            return read
        # BentoML reads `model_fields` of the instance; of a model pydantic would warn each time.
        fields = cls.model_fields
        return cast("Self", SimpleNamespace(model_fields=fields, **dict.fromkeys(fields)))


class Info(_Described, InfoReply):
    """The hosted model, and the service's limits."""


def input_of(task: str) -> type[NoInput]:
    """Return the input of a task: its fields are those of the request."""
    request = TASKS[task].request
    bases: Any = (NoInput, request)
    return cast(
        "type[NoInput]", create_model(request.__name__, __base__=bases, __doc__=request.__doc__)
    )


async def answer(models: Models, task: str, inputs: Any, parameters: Any, ctx: Any) -> Any:
    """Answer a call of an endpoint by the default model.

    Args:
        inputs: None for a request whose body has not been read.
        ctx: BentoML's context over HTTP; None for a call in this process.

    Returns:
        The reply's value, or over HTTP the reply itself or an error reply.

    Raises:
        BentoMLException: a call in this process cannot be answered; it is the exception that
            BentoML's clients raise for the error's status.
    """
    try:
        if ctx is None or inputs is not None:
            return await answer_call(models.default, task, inputs, parameters)
        reply = await answer_request(models.default, task, ctx.request)
    except AlbertServeError as error:
        if ctx is None:
            raise as_bentomls(error) from error
        reply = reply_to_error(error, ctx.request)
    return _with_status(reply, ctx)


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {
        "oneOf" if name == "anyOf" else name: _inlined(value, definitions)
        for name, value in schema.items()
    }


def as_bentomls(error: AlbertServeError) -> BentoMLException:
    """Return BentoML's exception of an error's status."""
    kind = BentoMLException.error_mapping.get(error.status, BentoMLException)
    return kind(str(error), error_code=error.status)


def _with_status(reply: Response, ctx: Any) -> Response:
    """Return the reply, whose status BentoML replaces by the context's."""
    ctx.response.status_code = reply.status_code
    return reply
