"""The wire contract of reranking, in the format of text-embeddings-inference."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from albert_serve.api.wire import MAX_ITEMS, Reply, Request, TaskRequest, Text

RERANK: Final = "rerank"

# Read as "Right", too, as clients of text-embeddings-inference write it. It is not in the schema:
# generated clients would give both the same name.
_Right: TypeAlias = Annotated[
    Literal["right"], BeforeValidator(lambda value: "right" if value == "Right" else value)
]


class RerankRequest(Request):
    """Sort texts by how well they answer a query."""

    query: Text
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    raw_scores: bool = Field(
        False, description="The classifier's output itself, not its sigmoid; a cosine is the same."
    )
    top_n: int | None = Field(None, ge=1, description="The number of texts returned; all.")
    return_text: bool = Field(False, description="Whether each text comes back with its score.")
    truncate: bool = Field(False, description="Whether texts that are too long are cut.")
    truncation_direction: _Right = Field(
        "right", description="The end at which they are cut; no other is possible."
    )


class RerankItem(TaskRequest):
    """The same as a request of one item."""

    inputs_field: ClassVar[str] = ""
    inputs: RerankRequest
    parameters: None = None


class RankedText(Reply):
    """One text of a request."""

    index: int = Field(description="The place of the text in the request.")
    score: float
    text: str | None = Field(None, description="With return_text.")


# The texts are sorted by score, the best first.
RerankReply: TypeAlias = list[RankedText]
