"""Accuracy loss of each task due to a bundle's precision, against torch on real text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from albert_serve.bundle.manifest import AGREEMENT, Quality
from albert_serve.bundle.weights import TaskName
from albert_serve.tasks.base import Runner
from albert_serve.tokenizer import AlbertTokenizer
from export.errors import ExportError
from export.source import Source
from training.errors import TrainingError
from training.evaluation.predictions import predict
from training.evaluation.real_text import RealData
from training.evaluation.samples import Sample, draw_samples

# Without labels it is not known what a disagreement costs, but that it is one point at most.
_LEAST_AGREEMENT: Final = 90.0
# Enough for batches of like lengths, few enough for the logits to fit into memory.
_MOST_TOKENS_AT_ONCE: Final = 4096
_BATCHES_AT_ONCE: Final = 8
_ROUNDING: Final = 1e-9
_LABELS_FROM: Final[dict[TaskName, str]] = {
    "text-classification": "--text-classification",
    "question-answering": "--question-answering",
}


def measure_quality(
    source: Source, tokenizer_file: Path, reference: Runner, engine: Runner, data: RealData
) -> dict[TaskName, Quality]:
    """Run torch and a bundle on the same samples, and score both, for each task.

    fill-mask and sentence-order are asked what pretraining asks, and marked by the text itself:
    accuracy. text-classification and question-answering are marked by the labels of the data that
    is given: accuracy, and F1. All else, and those two without labels, is "agreement": the share
    of predictions that are torch's own, so that torch has 100. Of a classifier's or a question's
    answers, those that disagree bound from above what is lost of accuracy and F1. What has one
    number for a text, as a regression and a multiple choice have, is asked which of four has the
    highest; of many labels, the set of those that apply must be the same.

    Args:
        source: the checkpoint.
        tokenizer_file: its `tokenizer.json`.
        reference: runs the checkpoint in torch, in fp32.
        engine: runs the bundle.
        data: the larger the model, the less of it is used; `Quality.count` tells how much.

    Raises:
        ExportError: a file cannot be read, or has nothing for a task, or there is data for a task
            that the checkpoint has not.
        BundleCorruptError: the tokenizer is none of an ALBERT.
        EngineError: a runtime failed.
    """
    try:
        tokenizer = AlbertTokenizer.from_file(tokenizer_file)
        samples = draw_samples(source.config, source.tasks, tokenizer, data)
    except TrainingError as error:
        raise ExportError(str(error)) from error
    return {task: _measure(task, sample, reference, engine) for task, sample in samples.items()}


def check_quality(quality: Mapping[TaskName, Quality], max_cost: float) -> None:
    """Check that no task loses more than `max_cost` points, as far as that is known.

    A task that is measured by agreement must agree in 90 % of the cases, or in as many as make it
    certain that no more than `max_cost` is lost.

    Raises:
        ExportError: a task loses more.
    """
    losses = (_describe_loss(task, result, max_cost) for task, result in quality.items())
    over = [loss for loss in losses if loss]
    if over:
        raise ExportError(
            f"{'; '.join(over)}. Nothing was written. Keep the parts in fp32 that need it "
            "(--keep-fp32 embeddings attention ffn heads, or some of them), measure on more data "
            "(--text), allow more (--max-cost), or write it all the same (--force)"
        )


def _describe_loss(task: TaskName, quality: Quality, max_cost: float) -> str | None:
    """Describe a task's loss if it is over `max_cost`; None otherwise."""
    if quality.metric == AGREEMENT:
        least = min(_LEAST_AGREEMENT, 100 - max_cost)
        if quality.bundle >= least - _ROUNDING:
            return None
        labels = f"; {_LABELS_FROM[task]} measures it" if task in _LABELS_FROM else ""
        return (
            f"{task} gives torch's answer in {quality.bundle:.2f} % of {quality.count:,} cases, "
            f"less than {least:g} % (what that costs is not known without labels{labels})"
        )
    if quality.cost <= max_cost + _ROUNDING:
        return None
    return (
        f"{task} loses {quality.cost:.2f} points of {quality.metric}, from {quality.torch:.2f} to "
        f"{quality.bundle:.2f} over {quality.count:,} answers (one is {100 / quality.count:.2g} "
        f"points); allowed is {max_cost:g}"
    )


def _measure(task: TaskName, sample: Sample, reference: Runner, engine: Runner) -> Quality:
    size = min(_MOST_TOKENS_AT_ONCE, _BATCHES_AT_ONCE * engine.max_batch_tokens)
    expected, got = (
        predict(runner, sample.items, max_tokens_at_once=size, title=f"{task} {place}")
        for runner, place in ((reference, "in torch"), (engine, "from the bundle"))
    )
    known = [right for item in sample.items for right in item.rights or ()]
    rights = expected if sample.metric == AGREEMENT else known
    return Quality(
        metric=sample.metric,
        torch=sample.mark(expected, rights),
        bundle=sample.mark(got, rights),
        count=len(got),
        data=sample.files,
    )
