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

# The Hub's names of tasks, where they differ from ours.
_HUB_TASKS: Final[Mapping[str, str]] = {
    "sentence-order": "text-classification",
    "feature-extraction": "sentence-similarity",
}
# The card's `model-index` contains these metrics, by which the Hub compares models.
_METRICS: Final = (
    *("accuracy", "subset_accuracy", "f1", "macro_f1", "micro_f1", "exact_match"),
    *("matthews_correlation", "pearson", "spearman", "recall_at_1", "mrr_at_10"),
)

_MAX_CELL_LENGTH: Final = 300


def model_card(manifest: Manifest, name: str) -> str:
    """Return the card: labels, metrics on held-out data, and the quality lost to lower precision.

    The metrics are also in the `model-index`, by which the Hub shows and compares models.

    Args:
        manifest: manifest of the bundle.
        name: name of the model.
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
        (
            head,
            entry.problem_type or "",
            listed(entry.labels or []),
            _quality(manifest, head),
        )
        for head, entry in manifest.heads.items()
    ]
    lines += ["## Tasks", "", *_table(["task", "problem type", "labels", "measured"], rows)]
    metrics = [
        (metric_name(key, heads), value)
        for key, value in manifest.evaluation.items()
        if is_number(value)
    ]
    lines += ["## Metrics on held-out data", "", *_table(["metric", "value"], metrics)]
    lines += _question_requests(manifest.evaluation)
    costs = [
        (head, quality.metric, quality.torch, quality.bundle, quality.count)
        for head, entry in manifest.heads.items()
        if (quality := entry.quality) is not None
    ]
    if costs:
        header = ["task", "metric", "the checkpoint, in percent", "this bundle", "answers"]
        lines += ["## Cost of precision", "", *_table(header, costs)]
    return "\n".join(lines).rstrip() + "\n"


def _quality(manifest: Manifest, head: str) -> str:
    """Return a head's quality and the name of its labelled data."""
    quality = read_quality(manifest, head)
    return "not on labelled data" if quality is None else quality_text(quality)


def _question_requests(evaluation: Mapping[str, Any]) -> list[str]:
    """Return lines on the request parameters with which question answering was measured."""
    parameters = evaluation.get("question_answering_parameters")
    if not isinstance(parameters, dict):
        return []
    line = (
        f'Question answering was measured by requests with `"parameters": {json.dumps(parameters)}`'
    )
    threshold = evaluation.get(BEST_F1_THRESHOLD)
    if is_number(threshold):
        line += f', and its best F1 with `"null_score_diff_threshold": {threshold}`'
    return [f"{line}. These are not the service's defaults.", ""]


def _results(evaluation: Mapping[str, Any], heads: Sequence[str]) -> Iterator[EvalResult]:
    for head in heads:
        prefix, task, name = metric_prefix(head), task_of(head), name_of(head)
        names = (evaluation.get(f"{prefix}_{key}") for key in ("task", "data"))
        default = f"held-out data of {name}" if name else "held-out data"
        data = next(map(str, filter(None, names)), default)
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
    """Return the lines of a table, in whose cells Markdown and HTML are escaped."""
    return [
        _line(header),
        _line(["---"] * len(header)),
        *(_line([_cell(value) for value in row]) for row in rows),
        "",
    ]


def _cell(value: object) -> str:
    """Return a value as a cell's text, with numbers rounded and long texts shortened."""
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    text = " ".join(str(value).split())
    if len(text) > _MAX_CELL_LENGTH:
        text = text[: _MAX_CELL_LENGTH - 3] + "..."
    escaped = html.escape(text, quote=False)
    for character in ("\\", "|", "`", "*", "_", "[", "]"):
        escaped = escaped.replace(character, f"\\{character}")
    return escaped


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
