"""Labels of a checkpoint's classifiers in its `config.json`.

The default classifier has the keys of `transformers`. `albert_heads` contains the same keys for
each named classifier, and `albert_default_head` is the name of the default one.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, get_args

from albert_serve.bundle.manifest import DEFAULT_HEAD, ProblemType
from albert_serve.bundle.weights import CLASSIFICATION, HEAD_NAME, TOKENS, name_of
from training.model.checkpoint import TEMPERATURE_KEY, CheckpointError, label_keys
from training.model.heads import Task, is_classifier, is_named

_DEFAULT_KEY: Final = "albert_default_head"
_HEADS_KEY: Final = "albert_heads"
_HEAD_KEYS: Final = (*label_keys([]), TEMPERATURE_KEY)


class Labels(NamedTuple):
    """A classifier's label names in the order of its outputs, and its problem type."""

    names: list[str]
    problem: ProblemType


def default_name(hf: Mapping[str, Any]) -> str | None:
    """Return the name of the default classifier, or None if it is called `default`."""
    name = hf.get(_DEFAULT_KEY)
    if name is not None and not (isinstance(name, str) and re.fullmatch(HEAD_NAME, name)):
        raise CheckpointError(f"{_DEFAULT_KEY} of config.json is {reprlib.repr(name)}, not a name.")
    return name


def find_head(hf: Mapping[str, Any], heads: Iterable[Task], name: str) -> Task:
    """Return the head of the classifier with this name."""
    default = default_name(hf) or DEFAULT_HEAD
    by_name = {
        default if head == CLASSIFICATION else name_of(head): head
        for head in heads
        if is_classifier(head)
    }
    if name not in by_name:
        existing = f"Choose one of {', '.join(by_name)}." if by_name else "It has no classifiers."
        raise CheckpointError(f"The checkpoint has no classifier {name!r}. {existing}")
    return by_name[name]


def head_record(hf: Mapping[str, Any], head: Task) -> dict[str, Any]:
    """Return the keys of a classifier, which are its `label_keys` and its temperature."""
    record: Any = hf
    if is_named(head):
        records = hf.get(_HEADS_KEY) or {}
        record = records.get(name_of(head), {}) if isinstance(records, dict) else records
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{_HEADS_KEY} of config.json is {reprlib.repr(record)}, not an object."
        )
    return {key: record[key] for key in _HEAD_KEYS if key in record}


def labels_config(
    records: Mapping[Task, Mapping[str, Any]], default: str | None = None
) -> dict[str, Any]:
    """Return the keys of `config.json` that name the labels of all classifiers.

    Args:
        records: `head_record` of each classifier.
        default: name of the default classifier, or None if it is called `default`.
    """
    keys = dict(records.get(CLASSIFICATION) or records.get(TOKENS, {}))
    named = {name_of(head): dict(record) for head, record in records.items() if is_named(head)}
    if named:
        keys[_HEADS_KEY] = named
    if default is not None and CLASSIFICATION in records:
        keys[_DEFAULT_KEY] = default
    return keys


def with_temperatures(hf: Mapping[str, Any], temperatures: Mapping[Task, float]) -> dict[str, Any]:
    """Return the keys of `config.json` with new temperatures of classifiers."""
    keys, named = dict(hf), dict(hf.get(_HEADS_KEY, {}))
    for head, temperature in temperatures.items():
        if is_named(head):
            named[name_of(head)] = named[name_of(head)] | {TEMPERATURE_KEY: temperature}
        else:
            keys[TEMPERATURE_KEY] = temperature
    return keys | ({_HEADS_KEY: named} if named else {})


def read_temperature(hf: Mapping[str, Any], head: Task) -> float:
    """Read the temperature of a classifier, which is 1 by default."""
    temperature = head_record(hf, head).get(TEMPERATURE_KEY, 1.0)
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise CheckpointError(
            f"{TEMPERATURE_KEY} of config.json is {reprlib.repr(temperature)}. "
            "Use a number greater than 0."
        )
    return float(temperature)


def read_labels(hf: Mapping[str, Any], num_outputs: int, head: Task = CLASSIFICATION) -> Labels:
    """Read the labels in `id2label`, by default LABEL_0 and so on, as in `transformers`."""
    hf = head_record(hf, head)
    id2label = hf.get("id2label") or {str(index): f"LABEL_{index}" for index in range(num_outputs)}
    if not isinstance(id2label, dict):
        raise CheckpointError(
            f"id2label of config.json is {reprlib.repr(id2label)}, not an object."
        )
    has_all = len(id2label) == num_outputs
    names = [id2label.get(str(index)) for index in range(num_outputs)] if has_all else []
    if not has_all or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"id2label of config.json is {reprlib.repr(id2label)}. The classifier has "
            f'{num_outputs} outputs, so give "0" to "{num_outputs - 1}" a name each.'
        )
    # A `transformers` pipeline treats a single output as a label that applies or does not.
    inferred = "multi_label_classification" if num_outputs == 1 else "single_label_classification"
    problem: Any = hf.get("problem_type") or inferred
    if problem not in get_args(ProblemType):
        allowed = ", ".join(get_args(ProblemType))
        raise CheckpointError(f"problem_type of config.json is {problem!r}. Use one of {allowed}.")
    return Labels([str(name) for name in names], problem)
