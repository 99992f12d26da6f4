"""The model card of a bundle: `README.md` with the metadata of the Hugging Face Hub."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from huggingface_hub import EvalResult, ModelCardData

from albert_serve.api.model_card import heads_of, metric_name, metric_prefix, quality_text
from albert_serve.bundle.manifest import Manifest
from albert_serve.bundle.weights import name_of, task_of
from albert_serve.errors import listed
from albert_serve.tasks.description import describe, is_number, read_quality
from training.tasks.question_answering.metrics import BEST_F1_THRESHOLD

# The Hub's names of tasks, where they are others.
_HUB_TASKS: Final[Mapping[str, str]] = {
    "sentence-order": "text-classification",
    "feature-extraction": "sentence-similarity",
}
# The figures that the Hub compares.
_METRICS: Final = (
    *("accuracy", "subset_accuracy", "f1", "macro_f1", "micro_f1", "exact_match"),
    *("matthews_correlation", "pearson", "spearman", "recall_at_1", "mrr_at_10"),
)

_LONGEST_CELL: Final = 300


def model_card(manifest: Manifest, name: str) -> str:
    """Return the card: labels, held-out figures, and the cost of precision.

    The figures stand in the `model-index` too, by which the Hub shows and compares models.

    Args:
        name: of the model.
    """
    model = describe(manifest, name)
    heads = heads_of(model.tasks)
    results = list(_results(manifest.evaluation, heads))
    metadata = ModelCardData(
        library_name="albert-serve",
        tags=["albert", *manifest.tasks],
        model_name=name if results else None,
        eval_results=results or None,
    )
    lines = ["---", metadata.to_yaml(), "---", ""]
    lines += [f"# {name}", "", f"An ALBERT in {model.precision}.", ""]
    rows = [
        (task, entry.problem_type or "", listed(entry.labels or []), _measured(manifest, task))
        for task, entry in manifest.heads.items()
    ]
    lines += ["## Tasks", "", *_table(["task", "problem type", "labels", "measured"], rows)]
    figures = [
        (metric_name(key, heads), value)
        for key, value in manifest.evaluation.items()
        if is_number(value)
    ]
    lines += ["## Figures on held-out data", "", *_table(["figure", "value"], figures)]
    lines += _question_requests(manifest.evaluation)
    costs = [
        (head, measured.metric, measured.torch, measured.bundle, measured.count)
        for head, entry in manifest.heads.items()
        if (measured := entry.quality) is not None
    ]
    if costs:
        header = ["task", "metric", "the checkpoint, in percent", "this bundle", "answers"]
        lines += ["## What precision costs", "", *_table(header, costs)]
    return "\n".join(lines).rstrip() + "\n"


def _measured(manifest: Manifest, head: str) -> str:
    """Return a head's quality and the data that it was measured on."""
    quality = read_quality(manifest, head)
    return "not on labelled data" if quality is None else quality_text(quality)


def _question_requests(evaluation: Mapping[str, Any]) -> list[str]:
    """Return the lines that say by which requests questions have the figures."""
    parameters = evaluation.get("question_answering_parameters")
    if not isinstance(parameters, dict):
        return []
    line = (
        "The figures of question answering are those of requests with "
        f'`"parameters": {json.dumps(parameters)}`'
    )
    threshold = evaluation.get(BEST_F1_THRESHOLD)
    if is_number(threshold):
        line += f', the best F1 with `"null_score_diff_threshold": {threshold}`'
    return [f"{line}; the service's defaults are others.", ""]


def _results(evaluation: Mapping[str, Any], heads: Sequence[str]) -> Iterator[EvalResult]:
    for head in heads:
        prefix, task, name = metric_prefix(head), task_of(head), name_of(head)
        names = (evaluation.get(f"{prefix}_{kind}") for kind in ("task", "data"))
        unnamed = f"held-out data of {name}" if name else "held-out data"
        data = next(map(str, filter(None, names)), unnamed)
        for metric in _METRICS:
            if is_number(value := evaluation.get(f"{prefix}_{metric}")):
                yield EvalResult(
                    task_type=_HUB_TASKS.get(task, task),
                    dataset_type=data.lower().replace(" ", "-"),
                    dataset_name=data,
                    metric_type=metric,
                    metric_value=round(float(value), 4),
                )


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table; cells are shown as text, whatever they hold."""
    return [
        _line(header),
        _line(["---"] * len(header)),
        *(_line([_cell(value) for value in row]) for row in rows),
        "",
    ]


def _cell(value: object) -> str:
    """Return a value as the text of a cell: numbers rounded, long texts shortened."""
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    text = " ".join(str(value).split())
    if len(text) > _LONGEST_CELL:
        text = text[: _LONGEST_CELL - 3] + "..."
    escaped = html.escape(text, quote=False)
    for mark in ("\\", "|", "`", "*", "_", "[", "]"):
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
