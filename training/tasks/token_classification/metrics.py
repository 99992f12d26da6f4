"""Evaluation of token classification: entity F1, as in seqeval's default mode."""

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

# Prefix of the metrics' names.
PREFIX: Final = "token_classification"
# Name of the metric that selects the best checkpoint.
METRIC: Final = "f1"
# The entities of a text, as ranges of words.
Entities: TypeAlias = frozenset[Span]


def entity_items(
    texts: Sequence[TaggedText], tokenizer: AlbertTokenizer, names: Sequence[str], *, length: int
) -> Iterator[EngineItem]:
    """Yield an item for each text with tokens, whose prediction is its entities.

    A word gets the label of its first token, as with the service's strategy "first".
    """
    task = token_task(tokenizer, length)
    for text in texts:
        if tokenizer.encode_plain(text.text).ids:
            windowed = task.split(text.text)
            decode = partial(_decode, windowed, words_of(windowed, text), names)
            target = _entities(word_tags(windowed, text)[0])
            yield EngineItem(inputs=windowed.inputs, decode=decode, targets=[target])


def _decode(
    windowed: WindowedText, words: Sequence[range], names: Sequence[str], logits: list[Logits]
) -> list[Entities]:
    best = windowed.scores(logits).argmax(axis=1)
    return [_entities([names[best[word.start]] if word else OUTSIDE for word in words])]


def _entities(tags: Sequence[str]) -> Entities:
    return frozenset(span for span in find_spans(tags) if span.label != OUTSIDE)


def predict_entities(
    runner: Runner, items: Sequence[EngineItem]
) -> list[tuple[Entities, Entities]]:
    """Return the predicted and the correct entities of each text."""
    targets = [target for item in items for target in item.targets or ()]
    return list(zip(predict(runner, items, "texts"), targets, strict=True))


def validation_metrics(answers: Sequence[tuple[Entities, Entities]]) -> dict[str, float]:
    """Return precision, recall and F1 of all entities, and the F1 of each label."""
    total, classes = entity_metrics(answers)
    return {**total, **{f"{METRIC}/{label}": row[METRIC] for label, row in classes.items()}}


def entity_metrics(
    answers: Sequence[tuple[Entities, Entities]],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return precision, recall and F1 of all entities, and of the entities of each label.

    An entity is right if its words and its label are right.
    """
    predicted, correct, both = (
        Counter(span.label for answer in answers for span in pick(*answer))
        for pick in (lambda a, _: a, lambda _, b: b, lambda a, b: a & b)
    )
    total = _f1_metrics(both.total(), predicted.total(), correct.total())
    classes = {
        label: {
            **_f1_metrics(both[label], predicted[label], correct[label]),
            "entities": correct[label],
        }
        for label in sorted(predicted.keys() | correct.keys())
    }
    return total, classes


def _f1_metrics(num_both: int, num_predicted: int, num_correct: int) -> dict[str, float]:
    return {
        "precision": num_both / num_predicted if num_predicted else 0.0,
        "recall": num_both / num_correct if num_correct else 0.0,
        "f1": entity_f1(num_both, num_predicted, num_correct),
    }


def entity_f1(num_both: int, num_predicted: int, num_correct: int) -> float:
    """Return the F1 from the numbers of entities, or 0 without any entity."""
    return 2 * num_both / max(1, num_predicted + num_correct)


def evaluate_entities(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    texts: Sequence[TaggedText],
    names: Sequence[str],
) -> dict[str, Any]:
    """Return the metrics of a model for texts with entities, by name."""
    items = list(entity_items(texts, tokenizer, names, length=model.config.max_positions))
    total, classes = entity_metrics(predict_entities(TorchEngine(model), items))
    figures = {**total, "texts": len(items), "classes": classes}
    return {f"{PREFIX}_{name}": value for name, value in figures.items()}
