"""Evaluation of token classification: entity F1, as seqeval's default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from albert_serve.tasks.base import Logits, Runner
from albert_serve.tasks.token_classification.entities import OUTSIDE, Span, find_spans
from albert_serve.tasks.token_classification.task import WindowedText
from albert_serve.tokenizer import AlbertTokenizer
from training.model.heads import AlbertForTasks
from training.tasks.engine import EngineItem, TorchEngine, predict
from training.tasks.token_classification.files import TaggedText, token_task, word_tags, words_of

# The names of the figures begin with it.
PREFIX: Final = "token_classification"
# Decides which validation is best.
FIGURE: Final = "f1"
# The entities of a text, by its words.
Entities: TypeAlias = frozenset[Span]


def entity_items(
    texts: Sequence[TaggedText], tokenizer: AlbertTokenizer, names: Sequence[str], *, length: int
) -> Iterator[EngineItem]:
    """Yield the item of each text that has tokens; its prediction is the entities.

    A word has the label of its first token, as with the service's strategy "first".
    """
    task = token_task(tokenizer, length)
    for text in texts:
        if tokenizer.encode_plain(text.text).ids:
            laid = task.split(text.text)
            read = partial(_read, laid, words_of(laid, text), names)
            right = _entities(word_tags(laid, text)[0])
            yield EngineItem(inputs=laid.inputs, read=read, rights=[right])


def _read(
    laid: WindowedText, words: Sequence[range], names: Sequence[str], logits: list[Logits]
) -> list[Entities]:
    best = laid.scores(logits).argmax(axis=1)
    return [_entities([names[best[word.start]] if word else OUTSIDE for word in words])]


def _entities(tags: Sequence[str]) -> Entities:
    return frozenset(span for span in find_spans(tags) if span.label != OUTSIDE)


def predict_entities(
    runner: Runner, items: Sequence[EngineItem]
) -> list[tuple[Entities, Entities]]:
    """Return the predicted and the right entities of each text."""
    rights = [right for item in items for right in item.rights or ()]
    return list(zip(predict(runner, items, "texts"), rights, strict=True))


def validation_figures(answered: Sequence[tuple[Entities, Entities]]) -> dict[str, float]:
    """Return precision, recall and F1 of all entities, and the F1 of each label."""
    whole, classes = entity_figures(answered)
    return {**whole, **{f"{FIGURE}/{label}": row[FIGURE] for label, row in classes.items()}}


def entity_figures(
    answered: Sequence[tuple[Entities, Entities]],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return precision, recall and F1 of all entities, and of each label's.

    An entity is right if its words and its label are.
    """
    predicted, right, both = (
        Counter(span.label for answer in answered for span in pick(*answer))
        for pick in (lambda a, _: a, lambda _, b: b, lambda a, b: a & b)
    )
    whole = _figures(both.total(), predicted.total(), right.total())
    classes = {
        label: {**_figures(both[label], predicted[label], right[label]), "entities": right[label]}
        for label in sorted(predicted.keys() | right.keys())
    }
    return whole, classes


def _figures(num_both: int, num_predicted: int, num_right: int) -> dict[str, float]:
    return {
        "precision": num_both / num_predicted if num_predicted else 0.0,
        "recall": num_both / num_right if num_right else 0.0,
        "f1": entity_f1(num_both, num_predicted, num_right),
    }


def entity_f1(num_both: int, num_predicted: int, num_right: int) -> float:
    """Return F1 by counts; 0 without any entity."""
    return 2 * num_both / max(1, num_predicted + num_right)


def evaluate_entities(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    texts: Sequence[TaggedText],
    names: Sequence[str],
) -> dict[str, Any]:
    """Return the figures of a model on texts with entities, by name."""
    items = list(entity_items(texts, tokenizer, names, length=model.config.max_positions))
    whole, classes = entity_figures(predict_entities(TorchEngine(model), items))
    figures = {**whole, "texts": len(items), "classes": classes}
    return {f"{PREFIX}_{name}": value for name, value in figures.items()}
