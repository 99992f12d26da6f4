"""What all requests and replies have in common, and a refusal as one sentence.

`schemas.py` has the requests and replies themselves.
"""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

# Of one request's list; a service may be set to take fewer (`/info` tells).
MAX_ITEMS: Final = 65_536
# Of one text: past any that a model reads, so that none is tokenised only to be refused.
MAX_CHARS: Final = 1_000_000

_MAX_ERRORS_TOLD: Final = 3
_MAX_INPUT_CHARS_TOLD: Final = 60
# What a JSON schema says of a field beside what it takes.
_ANNOTATIONS: Final = ("default", "description", "title")


class Request(BaseModel):
    """Anything a caller sends: no unknown field, no silent conversion, null means the default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # The first few only: there may be as many as the body has room for.
        unknown = (shorten(name) for name in given if name not in cls.model_fields)
        told = list(islice(unknown, _MAX_ERRORS_TOLD))
        if told:
            raise PydanticCustomError(
                "unknown_field",
                "{unknown} is not known here; allowed are {allowed}",
                {
                    "unknown": ", ".join(told),
                    "allowed": ", ".join(cls.model_fields),
                },
            )
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema that takes null, too, for what has a default."""
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        required = described.get("required", ())
        for name, given in described.get("properties", {}).items():
            if name not in required:
                described["properties"][name] = _or_null(given)
        return schema


class Reply(BaseModel):
    """Anything the service sends; a client passes over fields that it does not know yet."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """The schema, or null; what describes the field stays outside of the choice."""
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    outside = {name: value for name, value in schema.items() if name in _ANNOTATIONS}
    inside = {name: value for name, value in schema.items() if name not in outside}
    return {"anyOf": [inside, {"type": "null"}], **outside}


def contradiction(message: str) -> PydanticCustomError:
    """What a validator raises for values that are fine alone, but not together."""
    return PydanticCustomError("contradiction", "{message}", {"message": message})


# No field can have a name such as these tags, so that `_path` can leave them out.
ONE: Final = "<one>"
MANY: Final = "<many>"

ItemT = TypeVar("ItemT")
_RequestT = TypeVar("_RequestT", bound=Request)


def one_or_many(value: object) -> str:
    """Which of both forms a value has."""
    return MANY if isinstance(value, list) else ONE


def _default_if_null(value: object) -> object:
    return {} if value is None else value


# Tagged, so that a wrong value is told against the one form that the caller meant.
OneOrMany: TypeAlias = Annotated[
    Annotated[ItemT, Tag(ONE)]
    # One that is wrong says enough; to tell of 65,536 would take seconds.
    | Annotated[list[ItemT], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]
Text: TypeAlias = Annotated[str, Field(max_length=MAX_CHARS)]
OrNull: TypeAlias = Annotated[_RequestT, BeforeValidator(_default_if_null)]


def describe(error: ValidationError) -> str:
    """What is wrong with a request, as one sentence."""
    found = error.errors(include_url=False)
    told = [_describe_one(details) for details in found[:_MAX_ERRORS_TOLD]]
    if len(found) > _MAX_ERRORS_TOLD:
        told.append(f"and {len(found) - _MAX_ERRORS_TOLD} more")
    return "; ".join(told)


def _describe_one(details: ErrorDetails) -> str:
    path, kind, context = _path(details["loc"]), details["type"], details.get("ctx", {})
    if kind == "missing":
        return f"{path} is missing"
    if kind == "too_short":
        least = context["min_length"]
        return f"{path} must hold at least {'one item' if least == 1 else f'{least} items'}"
    if kind == "too_long":
        return (
            f"{path} holds {len(details['input'])} items; at most {context['max_length']} are "
            "taken: split the list"
        )
    if kind == "string_too_long":
        return (
            f"{path} has {len(details['input'])} characters; at most {context['max_length']} are "
            "taken: shorten or split the text"
        )
    if kind == "string_unicode":
        return f"{path} holds half of a surrogate pair, which stands for no character"
    if kind in ("unknown_field", "contradiction"):
        return f"{path}: {details['msg']}"
    told = "must be an object" if kind == "model_type" else details["msg"]
    return f"{path} {told.replace('Input should', 'must')}, not {shorten(details['input'])}"


def _path(loc: tuple[int | str, ...]) -> str:
    """("inputs", "<many>", 2, "<object>", "text") as "inputs[2].text"."""
    names = [part for part in loc if isinstance(part, int) or not part.startswith("<")]
    parts = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in names]
    return "".join(parts).removeprefix(".") or "the body"


class _Brief(reprlib.Repr):
    """The beginning of a value, however large or deep it is, in ASCII."""

    def repr_str(self, x: str, level: int) -> str:
        return ascii(x[: _MAX_INPUT_CHARS_TOLD + 1])


_brief: Final = _Brief()


def shorten(value: object) -> str:
    """How a value that a caller sent is told back: in ASCII, and never whole if it is long."""
    text = _brief.repr(value)
    if len(text) <= _MAX_INPUT_CHARS_TOLD:
        return text
    return f"{text[:_MAX_INPUT_CHARS_TOLD]}..."
