"""The endpoints as methods of BentoML's service, for its clients and for calls from Python."""

from __future__ import annotations

from typing import Any, Protocol

import bentoml
from bentoml.exceptions import BentoMLException
from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from albert_serve.api.schemas import InfoReply
from albert_serve.errors import AlbertServeError
from albert_serve.server.handlers import answer_call
from albert_serve.server.models import Models
from albert_serve.tasks import TASKS


class _Described(bentoml.IODescriptor):  # type: ignore[misc]
    """The schema of an input or a reply in `/schema.json`, which BentoML's clients read."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema, because BentoML's additions for tensors break tagged unions."""
        return handler(source)

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the schema without references, and with `oneOf` instead of `anyOf`.

        BentoML drops the definitions, and all schemas of `anyOf` except the first. Its client would
        then ignore misspelt parameters, and fail if a list may be null.
        """
        schema: dict[str, Any] = super().model_json_schema(*args, **kwargs)
        inlined: dict[str, Any] = _inline(schema, schema.pop("$defs", {}))
        return inlined


class Info(_Described, InfoReply):
    """The hosted model, and the service's limits."""


class _Hosting(Protocol):
    """A service that hosts models."""

    @property
    def hosted(self) -> Models:
        """The hosted models."""
        ...


def endpoint(task: str) -> Any:
    """Return the method of a task, with which the default model answers calls from Python.

    The callers are in this process or in another service of the same deployment. HTTP requests have
    separate routes (`server/routes.py`). For an error, the method raises the same exception as
    BentoML's clients.
    """

    async def answer(self: _Hosting, inputs: Any, parameters: Any = None) -> Any:
        try:
            return await answer_call(self.hosted.default, task, inputs, parameters)
        except AlbertServeError as error:
            raise to_bentoml_error(error) from error

    request = TASKS[task].request
    answer.__name__ = task.replace("-", "_")
    answer.__doc__ = request.__doc__
    answer.__annotations__["return"] = TASKS[task].reply
    bases: Any = (_Described, request)
    fields = create_model(request.__name__, __base__=bases, __doc__=request.__doc__)
    return bentoml.api(answer, route=f"/{task}", input_spec=fields)


def to_bentoml_error(error: AlbertServeError) -> BentoMLException:
    """Return BentoML's exception for an error's status."""
    kind = BentoMLException.error_mapping.get(error.status, BentoMLException)
    return kind(str(error), error_code=error.status)


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {
        "oneOf" if name == "anyOf" else name: _inline(value, definitions)
        for name, value in schema.items()
    }
