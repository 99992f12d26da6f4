"""Accuracy loss of each task due to a bundle's precision, against torch on real text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from albert_serve.bundle.manifest import Quality
from albert_serve.bundle.weights import TaskName
from albert_serve.tasks.base import Runner
from albert_serve.tokenizer import AlbertTokenizer
from export.draws import draw_samples
from export.errors import ExportError
from export.real_text import DEFAULT_TEXT, RealData
from export.samples import AGREEMENT, Item, Sample
from export.source import Source
from training.errors import TrainingError

__all__ = ["DEFAULT_TEXT", "RealData", "check_quality", "measure_quality"]

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
        samples = draw_samples(source, AlbertTokenizer.from_file(tokenizer_file), data)
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
    # Sorted by length, for less padding.
    items = sorted(sample.items, key=lambda item: -item.num_tokens)
    size = min(_MOST_TOKENS_AT_ONCE, _BATCHES_AT_ONCE * engine.max_batch_tokens)
    bar = tqdm(
        total=sum(item.num_tokens for item in items),
        desc=f"{task} beside torch",
        unit="token",
        unit_scale=True,
        disable=None,
        leave=False,
    )
    expected: list[Any] = []
    got: list[Any] = []
    with bar:
        for chunk in _chunks(items, size):
            expected += _ask(reference, chunk)
            got += _ask(engine, chunk)
            bar.update(sum(item.num_tokens for item in chunk))
    known = [right for item in items for right in item.rights or ()]
    rights = expected if sample.metric == AGREEMENT else known
    return Quality(
        metric=sample.metric,
        torch=sample.mark(expected, rights),
        bundle=sample.mark(got, rights),
        count=len(got),
        data=sample.files,
    )


def _ask(runner: Runner, items: Sequence[Item]) -> list[Any]:
    """Return the predictions of all items."""
    logits = iter(runner.run([encoded for item in items for encoded in item.inputs]))
    return [
        prediction
        for item in items
        for prediction in item.read(list(islice(logits, len(item.inputs))))
    ]


def _chunks(items: Sequence[Item], num_tokens: int) -> Iterator[list[Item]]:
    """Yield chunks of the items, in order, of about `num_tokens` tokens."""
    chunk: list[Item] = []
    for item in items:
        chunk.append(item)
        if sum(item.num_tokens for item in chunk) >= num_tokens:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
