"""The wire contract of embeddings, in Hugging Face's format (feature extraction) and OpenAI's.

Hugging Face's clients send the parameters of this task next to `inputs`, not in `parameters`. Both
are accepted.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from albert_serve.api.wire import (
    OneOrMany,
    OrNull,
    Parameters,
    Reply,
    Request,
    TaskRequest,
    Text,
    Truncation,
    TruncationField,
    contradiction,
)

FEATURE_EXTRACTION: Final = "feature-extraction"
# OpenAI's path. For a named model, it is `/embeddings` after the model's path.
EMBEDDINGS: Final = "embeddings"
# The path of text-embeddings-inference.
EMBED: Final = "embed"
EMBEDDINGS_PATH: Final = f"/v1/{EMBEDDINGS}"

Pooling: TypeAlias = Literal["mean", "cls", "max", "none"]
Pooled: TypeAlias = Literal["mean", "cls", "max"]
TruncationDirection: TypeAlias = Literal["right", "left"]
_EncodingFormat: TypeAlias = Literal["float", "base64"]

# Hugging Face's clients can send these fields, but no model supports them.
_REMEDIES: Final = {
    "prompt_name": "Write the prompt before the text.",
    "dimensions": "Omit it; an embedding has all dimensions of the model.",
    "encoding_format": f"Omit it, or use {EMBEDDINGS_PATH}, which supports base64.",
}


class FeatureExtractionParameters(Parameters):
    """The parameters of feature extraction."""

    pooling: Pooling | None = Field(
        None,
        description="Embedding of a text: the mean of all tokens' vectors including [CLS] and "
        "[SEP], the vector of [CLS], or the maximum over all tokens in each "
        'dimension; "none" returns the vectors of all tokens (default: the model\'s,'
        " which /info shows; otherwise mean).",
    )
    normalize: bool | None = Field(
        None,
        description="Whether vectors are scaled to length 1 (default: the model's, which /info "
        "shows; otherwise false).",
    )
    truncate: bool | None = Field(None, description="Hugging Face's name for `truncation`.")
    truncation_direction: TruncationDirection = Field(
        "right", description="End of the text at which tokens are removed."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        has_both = "truncation" in self.model_fields_set and self.truncate is not None
        if has_both and self.truncate != (self.truncation == "truncate"):
            raise contradiction("truncate and truncation contradict each other. Send one of them.")
        return self

    @property
    def effective_truncation(self) -> Truncation:
        """The value of `truncate` or `truncation`."""
        return "truncate" if self.truncate else self.truncation


class FeatureExtractionRequest(TaskRequest):
    """Return the embedding of one text or of several, or the vectors of their tokens."""

    inputs: OneOrMany[Text]
    parameters: OrNull[FeatureExtractionParameters] = FeatureExtractionParameters()

    @model_validator(mode="before")
    @classmethod
    def _gather_parameters(cls, body: Any) -> Any:
        """Move parameters from the top level of the body into `parameters`."""
        if not isinstance(body, dict):
            return body
        sent = {name: value for name, value in body.items() if value is not None}
        for name, remedy in _REMEDIES.items():
            if name in sent:
                raise contradiction(f"{name} is not supported. {remedy}")
        top_level = {
            name: sent.pop(name)
            for name in FeatureExtractionParameters.model_fields
            if name in sent
        }
        nested = sent.get("parameters", {})
        if not top_level or not isinstance(nested, dict):
            return sent
        duplicates = [name for name in top_level if nested.get(name) is not None]
        if duplicates:
            raise contradiction(
                f"{duplicates[0]} is in parameters and next to inputs. Send it only once."
            )
        return {**sent, "parameters": {**nested, **top_level}}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema; it also has the parameters at the top level."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        described = handler.resolve_ref_schema(schema)
        described["properties"] |= FeatureExtractionParameters.model_json_schema()["properties"]
        return schema


Embedding: TypeAlias = list[float]
# As in a pipeline of `transformers`, the list of the tokens' vectors is in a list.
TokenFeatures: TypeAlias = list[list[list[float]]]
FeatureExtractionAnswer: TypeAlias = Embedding | TokenFeatures


class _TextsOfEmbeddings(FeatureExtractionRequest):
    """A request in OpenAI's format as one of feature extraction."""

    inputs_field: ClassVar[str] = "input"


def holds_token_ids(texts: object) -> bool:
    """Return whether the input of a request begins like a list of token ids, or of such lists."""
    return isinstance(texts, list) and bool(texts) and isinstance(texts[0], int | list)


class EmbeddingsRequest(Request):
    """Return the embedding of one text or of several, in OpenAI's format, of length 1."""

    input: OneOrMany[Text] = Field(
        description="One text or a list of texts. Token ids are rejected."
    )
    model: str | None = Field(
        None, description="Name of the model at this path (default: that model)."
    )
    encoding_format: _EncodingFormat = Field(
        "float", description="Format of the vectors; base64 has float32 numbers, little-endian."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Number of dimensions, which must be the model's own."
    )
    user: str | None = Field(None, description="Ignored.")
    pooling: Pooled | None = Field(
        None,
        description="Pooling, as in feature extraction (an "
        "extension of OpenAI's format; default: "
        "the model's).",
    )
    truncation: TruncationField = Field(
        "error",
        json_schema_extra={"default": False},
        description="Whether a text with more tokens than the model reads is truncated (an "
        "extension of OpenAI's format); false rejects it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _reject_token_ids(cls, body: Any) -> Any:
        if isinstance(body, dict) and holds_token_ids(body.get("input")):
            raise contradiction(
                "input contains token ids, which may be another tokenizer's. Send texts "
                "(LangChain: check_embedding_ctx_length=False)."
            )
        return body

    def as_feature_extraction(self) -> FeatureExtractionRequest:
        """Return the same request in Hugging Face's format."""
        return _TextsOfEmbeddings(
            inputs=self.input,
            parameters=FeatureExtractionParameters(
                pooling=self.pooling, normalize=True, truncation=self.truncation
            ),
        )


class EmbeddingObject(Reply):
    """The embedding of one text of a request."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Index of the text in the request, from 0.")
    embedding: Embedding | str = Field(
        description="List of numbers, or a base64 text if requested."
    )


class Usage(Reply):
    """The number of tokens that the model read, including [CLS] and [SEP]."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(Reply):
    """The embeddings of a request's texts, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: Usage


class OpenAIError(Reply):
    """The error in OpenAI's format; its clients show only the message."""

    message: str
    type: str = Field(description="Same value as `error_type`.")
    param: str | None = None
    code: str | None = None


class OpenAIErrorReply(Reply):
    """The body of every reply that is not a success, in OpenAI's format."""

    error: OpenAIError
    error_type: str
    request_id: str | None = None
