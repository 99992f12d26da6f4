"""The labels of a checkpoint's classifier, by its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, get_args

from albert_serve.bundle.manifest import ProblemType
from training.model.checkpoint import CheckpointError

_SHOWN_CHARACTERS: Final = 80


class Labels(NamedTuple):
    """The names of a classifier's labels in the order of its outputs, and the kind of its task."""

    names: list[str]
    problem: ProblemType


def read_labels(hf: Mapping[str, Any], num_outputs: int) -> Labels:
    """Read the labels: those of `id2label` or, without any, LABEL_0 and so on, as `transformers`.

    Args:
        hf: content of `config.json`.

    Raises:
        CheckpointError: the keys are not the numbers of the outputs, or `problem_type` is none.
    """
    id2label = hf.get("id2label") or {str(index): f"LABEL_{index}" for index in range(num_outputs)}
    if not isinstance(id2label, dict):
        raise CheckpointError(f"id2label of config.json is {_shortened(id2label)}, not an object")
    is_named = len(id2label) == num_outputs
    names = [id2label.get(str(index)) for index in range(num_outputs)] if is_named else []
    if not is_named or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"id2label of config.json names {len(id2label)} labels; the classifier has "
            f'{num_outputs} outputs, so it must name "0" to "{num_outputs - 1}", each by a text; '
            f"it is {_shortened(id2label)}"
        )
    inferred = "regression" if num_outputs == 1 else "single_label_classification"
    problem: Any = hf.get("problem_type") or inferred
    if problem not in get_args(ProblemType):
        allowed = ", ".join(get_args(ProblemType))
        raise CheckpointError(f"problem_type is {problem!r} in config.json; allowed are {allowed}")
    return Labels([str(name) for name in names], problem)


def _shortened(id2label: object) -> str:
    text = repr(id2label)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
