"""The wire contract of zero-shot classification, in Hugging Face's format."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from albert_serve.api.schemas import LabelScore
from albert_serve.api.wire import OneOrMany, Parameters, TaskRequest, Text, contradiction

ZERO_SHOT: Final = "zero-shot-classification"
_MAX_LABELS: Final = 256
_MAX_TEMPLATE_CHARS: Final = 1000
_PLACEHOLDER: Final = "{}"


def _split(value: object) -> object:
    """Return the labels of a text that separates them by commas, as in `transformers`."""
    if not isinstance(value, str):
        return value
    return [label.strip() for label in value.split(",") if label.strip()]


def _check_placeholder(template: str) -> str:
    if template.count(_PLACEHOLDER) != 1:
        raise contradiction("Write {} exactly once, in place of the label.")
    return template


class ZeroShotParameters(Parameters):
    """The parameters of zero-shot classification."""

    candidate_labels: Annotated[
        list[Text],
        Field(min_length=1, max_length=_MAX_LABELS, fail_fast=True),
        BeforeValidator(_split),
    ] = Field(description="Labels: a list, or a text that separates them by commas.")
    hypothesis_template: Annotated[
        str, Field(max_length=_MAX_TEMPLATE_CHARS), AfterValidator(_check_placeholder)
    ] = Field(
        "This example is {}.",
        description="Sentence about a label, with {} in place of the label.",
        json_schema_extra={"pattern": r"^(?![\s\S]*\{\}[\s\S]*\{\})[\s\S]*\{\}"},
    )
    multi_label: bool = Field(
        False,
        description="Whether each label is scored separately; otherwise, the scores sum to 1.",
    )

    @property
    def chars_per_item(self) -> int:
        """Characters of the sentences about the labels, which are read with each text."""
        labels, template = self.candidate_labels, self.hypothesis_template
        return sum(map(len, labels)) + len(labels) * (len(template) - len(_PLACEHOLDER))


class ZeroShotRequest(TaskRequest):
    """Classify one text or several by labels that the model was not trained on."""

    inputs: OneOrMany[Text]
    parameters: ZeroShotParameters


# The labels are sorted by score, the best first.
ZeroShotAnswer: TypeAlias = list[LabelScore]
ZeroShotReply: TypeAlias = list[ZeroShotAnswer] | ZeroShotAnswer
