"""The wire contract: what each endpoint takes and gives, in Hugging Face's inference format.

A request is `{"inputs": ..., "parameters": {...}}`; `inputs` is one item or a list of them. A
parameter that is left out, or null, has its default. Replies have Hugging Face's shapes exactly;
what they have no room for travels in the two headers named here.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

# A JSON array of what the caller should know about a reply, in ASCII.
WARNINGS_HEADER: Final = "X-Albert-Warnings"
# How many tokens were left out, where the request allowed it.
TRUNCATED_HEADER: Final = "X-Albert-Truncated-Tokens"

Truncation: TypeAlias = Literal["error", "truncate"]
ScoreFunction: TypeAlias = Literal["sigmoid", "softmax", "none"]
ProblemType: TypeAlias = Literal[
    "regression", "single_label_classification", "multi_label_classification"
]
ItemT = TypeVar("ItemT")

_MAX_TOP_K: Final = 1000
_MAX_ERRORS_TOLD: Final = 3
_MAX_INPUT_CHARS_TOLD: Final = 60


class _Request(BaseModel):
    """Anything a caller sends: no unknown field, no silent conversion, null means the default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        unknown = [_shorten(name) for name in given if name not in cls.model_fields]
        if unknown:
            raise PydanticCustomError(
                "unknown_field",
                "{unknown} is not known here; allowed are {allowed}",
                {
                    "unknown": ", ".join(unknown[:_MAX_ERRORS_TOLD]),
                    "allowed": ", ".join(cls.model_fields),
                },
            )
        return {name: value for name, value in given.items() if value is not None}


class _Reply(BaseModel):
    """Anything the service sends; a client passes over fields that it does not know yet."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


# No field can have such a name, so that `_path` can leave tags out.
_ONE: Final = "<one>"
_MANY: Final = "<many>"
_TEXT: Final = "<text>"
_OBJECT: Final = "<object>"


def _shape(value: object) -> str:
    return _MANY if isinstance(value, list) else _ONE


def _text_or_object(value: object) -> str:
    return _TEXT if isinstance(value, str) else _OBJECT


# Tagged, so that a wrong value is told against the one form that the caller meant.
OneOrMany: TypeAlias = Annotated[
    Annotated[ItemT, Tag(_ONE)] | Annotated[list[ItemT], Field(min_length=1), Tag(_MANY)],
    Discriminator(_shape),
]


class TextPair(_Request):
    """Two texts that are read together."""

    text: str = Field(description="The first text.")
    text_pair: str = Field(description="The second text.")


class TextInput(_Request):
    """A text, or two that are read together."""

    text: str = Field(description="The first, or only, text.")
    text_pair: str | None = Field(None, description="The second text.")


class QuestionContext(_Request):
    """A question, and the text that its answer is looked for in."""

    question: str
    context: str


TextItem: TypeAlias = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[TextInput, Tag(_OBJECT)],
    Discriminator(_text_or_object),
]


class Parameters(_Request):
    """What every task takes."""

    truncation: Truncation = Field(
        "error",
        description="What becomes of a text of more tokens than the model has positions.",
    )


class FillMaskParameters(Parameters):
    """How a mask is filled."""

    top_k: int = Field(5, ge=1, le=_MAX_TOP_K, description="Predictions for each mask.")
    targets: OneOrMany[str] | None = Field(
        None,
        description="Score these tokens only. One that the vocabulary lacks stands for its first "
        f"piece, which the {WARNINGS_HEADER} header then says.",
    )


class TextClassificationParameters(Parameters):
    """How labels are scored."""

    function_to_apply: ScoreFunction | None = Field(
        None, description="Left out, the model's problem type decides."
    )
    top_k: int | None = Field(
        None, ge=1, le=_MAX_TOP_K, description="The best so many labels; left out, all."
    )


class QuestionAnsweringParameters(Parameters):
    """How an answer is looked for; lengths count tokens."""

    top_k: int = Field(1, ge=1, le=_MAX_TOP_K, description="Answers; over 1 replies with a list.")
    doc_stride: int | None = Field(
        None, ge=0, description="Tokens that neighbouring windows share; left out, 128 or fewer."
    )
    max_answer_len: int = Field(15, ge=1, le=512, description="Longest answer.")
    max_question_len: int | None = Field(
        None, ge=1, description="Cut a longer question to this; left out, it is not cut."
    )
    max_seq_len: int | None = Field(
        None, ge=4, description="Question and window together; left out, 384 or fewer."
    )
    handle_impossible_answer: bool = Field(
        False, description='Let "no answer" compete, as an empty answer.'
    )
    align_to_words: bool = Field(True, description="Widen an answer to whole words.")


class SentenceOrderParameters(Parameters):
    """How sentence order is scored."""


def _default_if_null(value: object) -> object:
    return {} if value is None else value


_ParametersT = TypeVar("_ParametersT", bound=Parameters)
_OrNull: TypeAlias = Annotated[_ParametersT, BeforeValidator(_default_if_null)]


class FillMaskRequest(_Request):
    """Fill the masks of one text or of several."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "The capital of France is [MASK].", "parameters": {"top_k": 3}},
                {"inputs": ["a [MASK]", "b [MASK]"], "parameters": {"targets": ["x", "y"]}},
            ]
        }
    )
    inputs: OneOrMany[str]
    parameters: _OrNull[FillMaskParameters] = FillMaskParameters()


class TextClassificationRequest(_Request):
    """Classify one text, or pair of texts, or several."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A film to remember.", "parameters": {"top_k": 1}},
                {"inputs": {"text": "A dog runs.", "text_pair": "An animal moves."}},
            ]
        }
    )
    inputs: OneOrMany[TextItem]
    parameters: _OrNull[TextClassificationParameters] = TextClassificationParameters()


class QuestionAnsweringRequest(_Request):
    """Find the answer to a question in a text, for one such pair or several."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "inputs": {"question": "Who wrote it?", "context": "It was written by Ada."},
                    "parameters": {"handle_impossible_answer": True},
                }
            ]
        }
    )
    inputs: OneOrMany[QuestionContext]
    parameters: _OrNull[QuestionAnsweringParameters] = QuestionAnsweringParameters()


class SentenceOrderRequest(_Request):
    """Say whether the second text follows the first, for one pair or several."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": {"text": "It rained.", "text_pair": "So we stayed in."}}]
        }
    )
    inputs: OneOrMany[TextPair]
    parameters: _OrNull[SentenceOrderParameters] = SentenceOrderParameters()


TaskRequest: TypeAlias = (
    FillMaskRequest | TextClassificationRequest | QuestionAnsweringRequest | SentenceOrderRequest
)


class FilledToken(_Reply):
    """One way to fill a mask."""

    score: float = Field(description="Probability over the whole vocabulary.")
    token: int
    token_str: str
    sequence: str = Field(description="The text with this mask filled.")


class LabelScore(_Reply):
    """How much a label fits."""

    label: str
    score: float


class Answer(_Reply):
    """A part of the context: `context[start:end] == answer`, in code points."""

    answer: str = Field(description='"" where "no answer" is the answer.')
    score: float
    start: int
    end: int


class Order(_Reply):
    """How a pair of texts is ordered."""

    in_order: float = Field(description="Probability that the second text follows the first.")


FillMaskAnswer: TypeAlias = list[FilledToken] | list[list[FilledToken]]
QuestionAnsweringAnswer: TypeAlias = Answer | list[Answer]

FillMaskReply: TypeAlias = FillMaskAnswer | list[FillMaskAnswer]
# Nested for a single text too: Hugging Face's clients take the first element.
TextClassificationReply: TypeAlias = list[list[LabelScore]]
QuestionAnsweringReply: TypeAlias = QuestionAnsweringAnswer | list[QuestionAnsweringAnswer]
SentenceOrderReply: TypeAlias = Order | list[Order]


class TaskInfo(_Reply):
    """One task that the service answers."""

    name: str
    labels: list[str] | None = None
    problem_type: ProblemType | None = None


class InfoReply(_Reply):
    """What the service runs, and what it accepts."""

    model_id: str
    version: str
    precision: str
    tasks: list[TaskInfo]
    max_positions: int
    mask_token: str
    max_items: int = Field(description="Items that one request may hold.")
    max_body_bytes: int


class ErrorReply(_Reply):
    """The body of every reply that is not a success."""

    error: str
    error_type: str
    request_id: str | None = None


def describe(error: ValidationError) -> str:
    """What is wrong with a request, as one sentence."""
    found = error.errors(include_url=False)
    told = [_describe_one(details) for details in found[:_MAX_ERRORS_TOLD]]
    if len(found) > _MAX_ERRORS_TOLD:
        told.append(f"and {len(found) - _MAX_ERRORS_TOLD} more")
    return "; ".join(told)


# pydantic's type of error -> what to say instead of its message.
_PHRASES: Final = {
    "missing": "is missing",
    "too_short": "must hold at least one item",
    "model_type": "must be an object",
}


def _describe_one(details: ErrorDetails) -> str:
    path = _path(details["loc"])
    if details["type"] in ("missing", "too_short"):
        return f"{path} {_PHRASES[details['type']]}"
    if details["type"] == "unknown_field":
        return f"{path}: {details['msg']}"
    message = _PHRASES.get(details["type"], details["msg"].replace("Input should", "must"))
    return f"{path} {message}, not {_shorten(details['input'])}"


def _path(loc: tuple[int | str, ...]) -> str:
    """("inputs", "<many>", 2, "<object>", "text") as "inputs[2].text"."""
    names = [part for part in loc if isinstance(part, int) or not part.startswith("<")]
    parts = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in names]
    return "".join(parts).removeprefix(".") or "the body"


def _shorten(value: object) -> str:
    text = ascii(value)
    if len(text) <= _MAX_INPUT_CHARS_TOLD:
        return text
    return f"{text[:_MAX_INPUT_CHARS_TOLD]}..."
