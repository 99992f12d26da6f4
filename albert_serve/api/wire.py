"""The base classes of requests and replies (`schemas.py`), and the text of validation errors."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from albert_serve.errors import InvalidInputError

# The limit of one request's list; a service may have a lower one (see `/info`).
MAX_ITEMS: Final = 65_536
# Longer texts are rejected before they are tokenised; no model reads as much.
MAX_CHARS: Final = 1_000_000
# Has the number of truncated tokens, if the request allows truncation.
TRUNCATED_HEADER: Final = "X-Albert-Truncated-Tokens"

_MAX_ERRORS_SHOWN: Final = 3
_MAX_SHOWN_CHARS: Final = 60
# The keys of a JSON schema that describe a field, not its type.
_ANNOTATIONS: Final = ("default", "description", "title")


class Request(BaseModel):
    """The base of requests: no unknown field, no silent conversion, null means the default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        allowed = cls.__pydantic_fields__
        if not body.keys() <= allowed.keys():
            # A body may have very many unknown names; only the first few are shown.
            unknown = (shorten(name) for name in body if name not in allowed)
            raise PydanticCustomError(
                "unknown_field",
                "Unknown field {unknown}. Use {allowed}.",
                {
                    "unknown": ", ".join(islice(unknown, _MAX_ERRORS_SHOWN)),
                    "allowed": ", ".join(allowed),
                },
            )
        return {name: value for name, value in body.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema, in which fields with a default may be null."""
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        required = described.get("required", ())
        for name, field in described.get("properties", {}).items():
            if name not in required:
                described["properties"][name] = _or_null(field)
        return schema


Truncation: TypeAlias = Literal["error", "truncate"]
# Requests have true or false as in transformers, or the older names of these values.
AnyTruncation: TypeAlias = bool | Truncation


def _read_truncation(value: object) -> Truncation:
    if value is True or value == "truncate":
        return "truncate"
    if value is False or value == "error":
        return "error"
    raise PydanticCustomError("bool_type", "Input should be true or false")


TruncationField: TypeAlias = Annotated[
    Truncation, BeforeValidator(_read_truncation), WithJsonSchema({"type": "boolean"})
]


class Parameters(Request):
    """The parameters of every task."""

    truncation: TruncationField = Field(
        "error",
        json_schema_extra={"default": False},
        description="Whether a text with more tokens than the model reads is truncated at its end; "
        f"false rejects it. The reply's header {TRUNCATED_HEADER} has the number of removed "
        "tokens.",
    )

    @property
    def chars_per_item(self) -> int:
        """Number of additional characters that the model reads with each item."""
        return 0


class TaskRequest(Request):
    """The base of a task's requests: one item or a list, and parameters.

    Attributes:
        inputs_field: name of `inputs` in messages to the caller.
    """

    inputs_field: ClassVar[str] = "inputs"
    inputs: Any
    parameters: Any

    @model_validator(mode="before")
    @classmethod
    def _drop_options(cls, body: Any) -> Any:
        """Drop `options`, such as `wait_for_model`, which Hugging Face's older clients send."""
        if isinstance(body, dict) and isinstance(body.get("options"), dict):
            return {name: value for name, value in body.items() if name != "options"}
        return body


class Reply(BaseModel):
    """The base of replies; a client ignores unknown fields of newer services."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Return the choice of the schema or null; the field's description stays outside of it."""
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    outside = {name: value for name, value in schema.items() if name in _ANNOTATIONS}
    inside = {name: value for name, value in schema.items() if name not in outside}
    return {"anyOf": [inside, {"type": "null"}], **outside}


def contradiction(message: str) -> PydanticCustomError:
    """Return the validation error of values that are valid alone, but not together."""
    return PydanticCustomError("contradiction", "{message}", {"message": message})


# No field can have a name like these tags, so that `_path` can omit them.
ONE: Final = "<one>"
MANY: Final = "<many>"

_ItemT = TypeVar("_ItemT")
_RequestT = TypeVar("_RequestT", bound=Request)
_ModelT = TypeVar("_ModelT", bound=BaseModel)


def one_or_many(value: object) -> str:
    """Return the tag of a value's form."""
    return MANY if isinstance(value, list) else ONE


def _default_if_null(value: object) -> object:
    return {} if value is None else value


# The tags make an error refer only to the form that the caller used.
OneOrMany: TypeAlias = Annotated[
    Annotated[_ItemT, Tag(ONE)]
    # Validation ends at the first invalid item, because 65,536 errors would take seconds.
    | Annotated[list[_ItemT], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]
Text: TypeAlias = Annotated[str, Field(max_length=MAX_CHARS)]
OrNull: TypeAlias = Annotated[_RequestT, BeforeValidator(_default_if_null)]


def _describe(error: ValidationError) -> str:
    """Return the text of a validation error: a sentence for each of the first invalid fields."""
    errors = error.errors(include_url=False)
    messages = [_describe_field(details) for details in errors[:_MAX_ERRORS_SHOWN]]
    if len(errors) > _MAX_ERRORS_SHOWN:
        messages.append(f"There are {len(errors) - _MAX_ERRORS_SHOWN} more errors.")
    return " ".join(messages)


def validate(kind: type[_ModelT], value: object) -> _ModelT:
    """Return a caller's value as the model of its kind."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InvalidInputError(_describe(error)) from error


def _describe_field(details: ErrorDetails) -> str:
    path, kind, context = _path(details["loc"]), details["type"], details.get("ctx", {})
    if kind == "missing":
        return f"{path} is missing."
    if kind == "too_short":
        min_length = context["min_length"]
        return f"{path} must have at least {min_length} item{'s' if min_length > 1 else ''}."
    if kind == "too_long":
        return (
            f"{path} has {len(details['input'])} items; at most {context['max_length']} are "
            "allowed. Split the list."
        )
    if kind == "string_too_long":
        return (
            f"{path} has {len(details['input'])} characters; at most {context['max_length']} are "
            "allowed. Shorten or split the text."
        )
    if kind == "string_unicode":
        return f"{path} contains half of a surrogate pair, which is not a character."
    if kind in ("unknown_field", "contradiction"):
        return f"{path}: {details['msg']}" if path else details["msg"]
    message = "must be an object" if kind == "model_type" else details["msg"]
    subject, message = path or "The body", message.replace("Input should", "must")
    return f"{subject} {message}, not {shorten(details['input'])}."


def _path(loc: tuple[int | str, ...]) -> str:
    """Return the path of ("inputs", "<many>", 2, "<object>", "text"), "inputs[2].text"."""
    names = [part for part in loc if isinstance(part, int) or not part.startswith("<")]
    parts = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in names]
    return "".join(parts).removeprefix(".")


class _Brief(reprlib.Repr):
    """Represents the beginning of a value of any size or depth, in ASCII."""

    def repr_str(self, x: str, level: int) -> str:
        return ascii(x[: _MAX_SHOWN_CHARS + 1])


_brief: Final = _Brief()


def shorten(value: object) -> str:
    """Return a caller's value for an error message: in ASCII, and shortened if it is long."""
    text = _brief.repr(value)
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    return f"{text[:_MAX_SHOWN_CHARS]}..."
