"""The endpoints as methods of BentoML's service: for its clients, and for calls from Python."""

from __future__ import annotations

from typing import Any, cast

import bentoml
from bentoml.exceptions import BentoMLException
from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from albert_serve.api.schemas import InfoReply
from albert_serve.errors import AlbertServeError
from albert_serve.server.answering import answer_call
from albert_serve.server.models.registry import Models
from albert_serve.tasks import TASKS


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


class Info(_Described, InfoReply):
    """The hosted model, and the service's limits."""


def input_of(task: str) -> type[bentoml.IODescriptor]:
    """Return the input of a task: its fields are those of the request."""
    request = TASKS[task].request
    bases: Any = (_Described, request)
    return cast(
        "type[bentoml.IODescriptor]",
        create_model(request.__name__, __base__=bases, __doc__=request.__doc__),
    )


async def answer(models: Models, task: str, inputs: Any, parameters: Any) -> Any:
    """Answer a call from Python by the default model.

    Calls come from this process, or from another service of the same deployment; HTTP requests
    have routes of their own (`server/routes.py`).

    Returns:
        The reply's value.

    Raises:
        BentoMLException: the call cannot be answered; it is the exception that BentoML's clients
            raise for the error's status.
    """
    try:
        return await answer_call(models.default, task, inputs, parameters)
    except AlbertServeError as error:
        raise as_bentomls(error) from error


def as_bentomls(error: AlbertServeError) -> BentoMLException:
    """Return BentoML's exception of an error's status."""
    kind = BentoMLException.error_mapping.get(error.status, BentoMLException)
    return kind(str(error), error_code=error.status)


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
