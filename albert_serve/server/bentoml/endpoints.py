"""The endpoints as methods of BentoML's service: for its clients, and for calls from Python."""

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


class _Hosting(Protocol):
    """A service that hosts models."""

    @property
    def hosted(self) -> Models:
        """The models that it hosts."""
        ...


def endpoint(task: str) -> Any:
    """Return the method of a task, for calls from Python, which the default model answers.

    Calls come from this process, or from another service of the same deployment; HTTP requests
    have routes of their own (`server/routes.py`). The method raises the exception that BentoML's
    clients raise for an error's status.
    """

    async def answer(self: _Hosting, inputs: Any, parameters: Any = None) -> Any:
        try:
            return await answer_call(self.hosted.default, task, inputs, parameters)
        except AlbertServeError as error:
            raise as_bentomls(error) from error

    request = TASKS[task].request
    answer.__name__ = task.replace("-", "_")
    answer.__doc__ = request.__doc__
    answer.__annotations__["return"] = TASKS[task].reply
    bases: Any = (_Described, request)
    fields = create_model(request.__name__, __base__=bases, __doc__=request.__doc__)
    return bentoml.api(answer, route=f"/{task}", input_spec=fields)


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
