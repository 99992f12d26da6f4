"""The model card in the reply of `/info`, and the text of a model's description.

Fields that model cards of the Hugging Face Hub also have, have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pydantic import Field

from albert_serve.api.wire import Reply
from albert_serve.errors import listed, printable

if TYPE_CHECKING:
    from albert_serve.api.schemas import (
        HeadInfo,
        InfoReply,
        ModelDescription,
        TaskInfo,
        TaskQuality,
    )

# The keys of a task's metrics have this prefix.
METRIC_PREFIXES: Final[Mapping[str, str]] = {
    "fill-mask": "masked",
    "sentence-order": "sentence_order",
    "text-classification": "text_classification",
    "token-classification": "token_classification",
    "question-answering": "question_answering",
    "feature-extraction": "embeddings",
}
# The names of these metrics do not follow from their keys.
_METRIC_NAMES: Final[Mapping[str, str]] = {
    "unigram_entropy": "fill-mask: loss of token frequencies alone",
    "sentence_order_paired_accuracy": "sentence-order: accuracy when both orders are compared",
}
# The keys of metrics on single sentences have this prefix.
_SINGLE: Final = "single_"
_WORDS: Final[Mapping[str, str]] = {
    **{word: word.upper() for word in ("f1", "mrr", "mse")},
    **{word: word.capitalize() for word in ("matthews", "pearson", "spearman")},
}


class ModelSizes(Reply):
    """The sizes of the model."""

    num_parameters: int = Field(
        description="Number of stored parameters; shared parameters count once."
    )
    weights_bytes: int = Field(description="Size of the weights file in bytes.")
    num_layers: int = Field(description="Number of times that layers are applied.")
    hidden_size: int
    embedding_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int


class ModelCard(Reply):
    """The content of a model card; a field is absent if the bundle does not have it."""

    license: str | None = Field(None, description="License in the bundle's README.md.")
    language: list[str] = Field(default_factory=list)
    base_model: list[str] = Field(default_factory=list)
    sizes: ModelSizes
    evaluation: dict[str, float] = Field(
        default_factory=dict, description="Metrics on held-out data, by name."
    )


def describe_model(model: ModelDescription) -> str:
    """Return the description of a model as text of several lines."""
    revision = model.revision or "unknown"
    lines = [f"{model.model_id}: an ALBERT in {model.precision}, revision {revision}"]
    lines += _about(model.card) if model.card else []
    lines += ["tasks:", *(f"  {line}" for task in model.tasks for line in _task(task))]
    lines += _evaluation(model.card, heads_of(model.tasks)) if model.card else []
    return "\n".join(map(printable, lines))


def describe_limits(info: InfoReply) -> str:
    """Return a line with the limits of a service."""
    return (
        f"limits: {info.max_positions:,} tokens a text, {info.max_items:,} items and "
        f"{info.max_body_bytes:,} bytes a request{', with a key' if info.needs_key else ''}"
    )


def heads_of(tasks: Iterable[TaskInfo]) -> list[str]:
    """Return the names of heads, such as "fill-mask" and "text-classification/topic"."""
    heads = [f"{task.name}/{head.name}" for task in tasks for head in task.heads or ()]
    # A name may be another name's prefix.
    return [*sorted(heads, key=len, reverse=True), *METRIC_PREFIXES]


def metric_prefix(head: str) -> str:
    """Return the prefix of the keys of a head's metrics, such as "question_answering"."""
    task, slash, name = head.partition("/")
    return f"{METRIC_PREFIXES.get(task, task)}{slash}{name}"


def metric_name(key: str, heads: Iterable[str]) -> str:
    """Return the displayed name of a metric: `masked_f1` is "fill-mask: F1".

    Args:
        key: key of the metric in the evaluation.
        heads: names of heads whose prefix the key may have, longer names first.
    """
    if key in _METRIC_NAMES:
        return _METRIC_NAMES[key]
    if key.startswith(_SINGLE):
        return f"{metric_name(key.removeprefix(_SINGLE), heads)}, single sentences"
    for head in heads:
        prefix = f"{metric_prefix(head)}_"
        if key.startswith(prefix):
            return f"{head}: {_words(key.removeprefix(prefix))}"
    return _words(key)


def _words(key: str) -> str:
    return " ".join(_WORDS.get(word, word) for word in key.split("_"))


def quality_text(quality: TaskQuality) -> str:
    """Return a metric with its value, its number of predictions and its data."""
    text = f"{quality.metric} {quality.percent:.1f} % of {quality.count:,}"
    return f"{text} ({quality.data})" if quality.data else text


def _about(card: ModelCard) -> Iterator[str]:
    fields = {
        "license": card.license,
        "language": ", ".join(card.language),
        "base model": ", ".join(card.base_model),
    }
    yield from (f"{name}: {value}" for name, value in fields.items() if value)
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
        text += f": {quality_text(head.quality)}"
    return text


def _evaluation(card: ModelCard, heads: Iterable[str]) -> Iterator[str]:
    if card.evaluation:
        yield "evaluation:"
        for key, value in card.evaluation.items():
            yield f"  {metric_name(key, heads)} {_number(value)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
