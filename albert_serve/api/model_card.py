"""The model card in the reply of `/info`: what the model is, and how it was trained and measured.

Its names are those of the model cards of the Hugging Face Hub where these have the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pydantic import Field

from albert_serve.api.wire import Reply
from albert_serve.names import listed

if TYPE_CHECKING:
    from albert_serve.api.schemas import HeadInfo, InfoReply, TaskInfo

_SHOWN_NAMES: Final = 3


class ModelSizes(Reply):
    """The sizes of the model."""

    num_parameters: int = Field(description="Stored; those that layers share count once.")
    weights_bytes: int = Field(description="Of the file of weights.")
    num_layers: int = Field(description="Applied; how many are stored depends on sharing.")
    hidden_size: int
    embedding_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int


class TrainingStage(Reply):
    """One stage of the model's training."""

    program: str = Field(description="Such as training.pretrain.")
    steps: int | None = None
    tokens: int | None = None
    seconds: int | None = None
    data: list[str] = Field(default_factory=list, description="The names of the files it read.")


class ModelCard(Reply):
    """The content of a model card; a field is absent where the bundle does not have it."""

    license: str | None = Field(None, description="As the bundle's README.md has it.")
    language: list[str] = Field(default_factory=list)
    base_model: list[str] = Field(default_factory=list)
    sizes: ModelSizes
    evaluation: dict[str, float] = Field(
        default_factory=dict, description="Figures on held-out data, by name."
    )
    training: list[TrainingStage] = Field(default_factory=list)


def card_text(info: InfoReply) -> str:
    """Return the description of a model as text of several lines."""
    lines = [
        f"{info.model_id}: an ALBERT in {info.precision}, revision {info.revision or 'unknown'}"
    ]
    lines += _about(info.card) if info.card else []
    lines += ["tasks:", *(f"  {line}" for task in info.tasks for line in _task(task))]
    lines += _history(info.card) if info.card else []
    lines.append(
        f"limits: {info.max_positions:,} tokens a text, {info.max_items:,} items and "
        f"{info.max_body_bytes:,} bytes a request{', with a key' if info.needs_key else ''}"
    )
    return "\n".join(lines)


def _about(card: ModelCard) -> Iterator[str]:
    named = {
        "license": card.license,
        "language": ", ".join(card.language),
        "base model": ", ".join(card.base_model),
    }
    yield from (f"{name}: {value}" for name, value in named.items() if value)
    sizes = card.sizes
    yield (
        f"sizes: {sizes.num_parameters:,} parameters in {sizes.weights_bytes / 1e6:,.1f} MB, "
        f"{sizes.num_layers} layers of {sizes.hidden_size:,} with {sizes.num_heads} heads, "
        f"a vocabulary of {sizes.vocab_size:,}"
    )


def _task(task: TaskInfo) -> Iterator[str]:
    if not task.heads:
        yield _head(task)
        return
    yield f"{task.name}, by its heads:"
    yield from (f"  {_head(head)}" for head in task.heads)


def _head(head: TaskInfo | HeadInfo) -> str:
    text = head.name
    if head.labels:
        text += f" ({listed(head.labels)})"
    if head.quality:
        quality = head.quality
        text += f": {quality.metric} {quality.percent:.1f} % of {quality.count:,}"
        text += f" ({quality.data})" if quality.data else ""
    return text


def _history(card: ModelCard) -> Iterator[str]:
    if card.evaluation:
        yield "evaluation:"
        yield from (f"  {name}: {_number(value)}" for name, value in card.evaluation.items())
    if card.training:
        yield "training:"
        yield from (f"  {_stage(stage)}" for stage in card.training)


def _stage(stage: TrainingStage) -> str:
    counted = {"steps": stage.steps, "tokens": stage.tokens, "s": stage.seconds}
    counts = [f"{value:,} {unit}" for unit, value in counted.items() if value is not None]
    more = [f"{len(stage.data) - _SHOWN_NAMES} more"] if len(stage.data) > _SHOWN_NAMES else []
    data = ", ".join([*stage.data[:_SHOWN_NAMES], *more])
    return f"{stage.program}: {', '.join([*counts, *([f'on {data}'] if data else [])])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
