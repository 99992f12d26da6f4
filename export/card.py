"""The model card of a bundle: `README.md` with the metadata of the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from albert_serve.bundle.card import is_number, read_figure, read_stages
from albert_serve.bundle.manifest import Manifest
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.compute import train_flops_per_token
from albert_serve.config import AlbertConfig
from albert_serve.names import listed
from training.evaluation.markdown import table
from training.evaluation.questions import BEST_F1_THRESHOLD

CARD_FILE: Final = "README.md"
# The beginnings of the figures' names, and the Hub's names of their tasks.
_TASK_OF: Final[Mapping[str, str]] = {
    "masked": "fill-mask",
    "sentence_order": "text-classification",
    "text_classification": "text-classification",
    "multiple_choice": "multiple-choice",
    "question_answering": "question-answering",
    "embeddings": "sentence-similarity",
}
# The figures that the Hub compares.
_METRICS: Final = (
    *("accuracy", "subset_accuracy", "f1", "macro_f1", "micro_f1", "exact_match"),
    *("matthews_correlation", "pearson", "spearman", "recall_at_1", "mrr_at_10"),
)


def model_card(manifest: Manifest, name: str) -> str:
    """Return the card: labels, held-out figures, cost of precision and depth, and training.

    The figures stand in the `model-index` too, by which the Hub shows and compares models.

    Args:
        name: of the model.
    """
    figures: dict[str, Any] = {
        key: value for key, value in manifest.evaluation.items() if is_number(value)
    }
    further = [head for head in manifest.heads if head not in manifest.tasks]
    task_of = {**_TASK_OF, **{head.replace("-", "_", 1): CLASSIFICATION for head in further}}
    results = list(_results(manifest.evaluation, figures, task_of))
    metadata: dict[str, Any] = {"library_name": "albert-serve", "tags": ["albert", *manifest.tasks]}
    if results:
        metadata["model-index"] = [{"name": name, "results": results}]
    # JSON is YAML.
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---", ""]
    lines += [f"# {name}", "", f"An ALBERT in {manifest.precision}.", ""]
    rows = [
        (task, entry.problem_type or "", listed(entry.labels or []), _measured(manifest, task))
        for task, entry in manifest.heads.items()
    ]
    lines += ["## Tasks", "", *table(["task", "problem type", "labels", "measured"], rows)]
    lines += ["## Figures on held-out data", "", *table(["figure", "value"], figures.items())]
    lines += _question_requests(manifest.evaluation)
    if manifest.head_quality:
        costs = [
            (task, measured.metric, measured.torch, measured.bundle, measured.count)
            for task, measured in manifest.head_quality.items()
        ]
        header = ["task", "metric", "the checkpoint, in percent", "this bundle", "answers"]
        lines += ["## What precision and depth cost", "", *table(header, costs)]
    lines += _training(manifest)
    return "\n".join(lines).rstrip() + "\n"


def _measured(manifest: Manifest, head: str) -> str:
    """Return a head's figure and the data that it was measured on."""
    figure = read_figure(manifest, head)
    if figure is None:
        return "not on labelled data"
    data = f" answers of {figure.data}" if figure.data else " answers"
    return f"{figure.metric} {figure.percent:.1f} % of {figure.count:,}{data}"


def _training(manifest: Manifest) -> list[str]:
    """Return the section on the stages of training, which is empty where none is known."""
    stages = read_stages(manifest)
    if not stages:
        return []
    rows = [
        (
            stage["program"],
            ", ".join(_without_numbers(stage["data"])),
            stage.get("steps", ""),
            stage.get("tokens", ""),
            f"{stage['seconds'] / 3600:.1f}" if "seconds" in stage else "",
        )
        for stage in stages
    ]
    tokens = sum(stage.get("tokens", 0) for stage in stages)
    hours = sum(stage.get("seconds", 0) for stage in stages) / 3600
    flops = tokens * train_flops_per_token(
        AlbertConfig.from_hf(manifest.config), length=0, masked_rate=0, num_sentence_outputs=0
    )
    total = (
        f"These stages have {tokens:,} tokens, {hours:.1f} hours and {flops:.2g} operations: "
        "those of the layers' matrix products, without attention's scores and sums, and without "
        "the heads."
    )
    return [
        "## Training",
        "",
        *table(["program", "data", "steps", "tokens", "hours"], rows),
        total,
        "",
    ]


def _without_numbers(names: Sequence[str]) -> list[str]:
    """Return the names of files, those that differ in numbers alone as one: `train-*.jsonl`."""
    patterns = [re.sub(r"\d+", "*", name) for name in names]
    counts = Counter(patterns)
    shown = [
        pattern if counts[pattern] > 1 else name
        for name, pattern in zip(names, patterns, strict=True)
    ]
    return list(dict.fromkeys(shown))


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


def _results(
    evaluation: Mapping[str, Any], figures: Mapping[str, float], task_of: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for beginning, task in task_of.items():
        metrics = [
            {"type": metric, "value": round(figures[f"{beginning}_{metric}"], 4)}
            for metric in _METRICS
            if f"{beginning}_{metric}" in figures
        ]
        if metrics:
            names = (evaluation.get(f"{beginning}_{kind}") for kind in ("task", "data"))
            name = next(map(str, filter(None, names)), "held-out data")
            yield {
                "task": {"type": task},
                "dataset": {"type": name.lower().replace(" ", "-"), "name": name},
                "metrics": metrics,
            }
