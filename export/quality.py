"""Accuracy loss of each task due to a bundle's precision, against torch on real text.

A loss is refused where the same answers, counted twice, show that it is no chance: those that are
right in torch alone against those that are right in the bundle alone (the exact test of McNemar,
which is a sign test where answers have more grades than right and wrong).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from albert_serve.bundle.manifest import AGREEMENT, Quality
from albert_serve.progress import progress_bar
from albert_serve.tasks.base import Runner
from albert_serve.tokenizer import AlbertTokenizer
from export.errors import ExportError
from export.source import Source
from training.errors import TrainingError
from training.evaluation.real_text import RealData
from training.evaluation.samples import Sample, draw_samples
from training.evaluation.torch_engine import EngineItem, predict

# The share of answers, in percent, that may be others than torch's where no label tells which of
# the two is right.
_MAX_OTHERS: Final = 10.0
# The probability, by chance alone, of a result that is refused.
_LEVEL: Final = 0.01
# Enough for batches of like lengths, few enough for the logits to fit into memory.
_MOST_TOKENS_AT_ONCE: Final = 4096
_BATCHES_AT_ONCE: Final = 8
# A sample is measured in so many parts, after each of which the time is looked at. The first one
# takes xxlarge two minutes on two cores.
_NUM_PARTS: Final = 32
_ROUNDING: Final = 1e-9
_ADVICE: Final = (
    "What helps: leave the task out (--tasks with the others), keep parts in fp32 (--keep-fp32 "
    "attention ffn; with all of embeddings attention ffn heads it is computed in fp32), allow more "
    "(--max-cost), or write it all the same (--force)"
)
_LABELS_FROM: Final[dict[str, str]] = {
    "text-classification": "--text-classification",
    "question-answering": "--question-answering",
    "token-classification": "--token-classification",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredQuality:
    """A task's quality, and the answers that differ in it.

    Attributes:
        num_worse: answers that are worse from the bundle than in torch; of a task without labels
            all that differ.
        num_better: those that are better.
    """

    quality: Quality
    num_worse: int
    num_better: int


def measure_quality(
    source: Source,
    tokenizer_file: Path,
    reference: Runner,
    engine: Runner,
    data: RealData,
    *,
    budget_s: float | None = None,
) -> dict[str, MeasuredQuality]:
    """Run torch and a bundle on the same samples, and score both, for each task.

    fill-mask and sentence-order are asked what pretraining asks, and marked by the text itself:
    accuracy. text-classification, multiple-choice and question-answering are marked by the labels
    of the data that is given: accuracy, and F1. All else, and those without labels, is "agreement":
    the share of predictions that are torch's own, so that torch has 100. Of a classifier's or a
    question's answers, those that disagree bound from above what is lost of accuracy and F1. What
    has one number for a text, as a regression and a multiple choice have, is asked which of four
    has the highest; of many labels, the set of those that apply must be the same.

    Args:
        source: the checkpoint.
        tokenizer_file: its `tokenizer.json`.
        reference: runs the checkpoint in torch, in fp32.
        engine: runs the bundle.
        data: `Quality.count` tells how much of it was used.
        budget_s: the time for all tasks; after it, they are measured on the part of their samples
            that was done by then. None for no limit.

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
        raise ExportError(*error.args) from error
    if not samples:  # embeddings have no head to compare
        return {}
    num_tokens = 2 * sum(item.num_tokens for sample in samples.values() for item in sample.items)
    at_most = "" if budget_s is None else f", within about {budget_s:.0f} s (--quality-budget)"
    print(
        f"measuring {', '.join(samples)} on real text, in torch and from the bundle: "
        f"{num_tokens:,} tokens{at_most}; --no-quality skips it",
        file=sys.stderr,
    )
    quality: dict[str, MeasuredQuality] = {}
    ends_s = None if budget_s is None else time.monotonic() + budget_s
    with progress_bar(title="quality", total=num_tokens, unit="tokens", unit_scale=True) as bar:
        meter = _Meter(reference=reference, engine=engine, bar=bar)
        for number, (task, sample) in enumerate(samples.items()):
            share = (
                None if ends_s is None else (ends_s - time.monotonic()) / (len(samples) - number)
            )
            quality[task] = meter.measure(task, sample, share)
    return quality


def check_quality(measured: Mapping[str, MeasuredQuality], max_cost: float) -> None:
    """Check that no task certainly loses more than `max_cost` points.

    A loss over that counts where chance alone would seldom make so many more answers worse than
    better (level 1 %). Of a task without labels no more than 10 % of the answers (or `max_cost`)
    may be others than torch's, by an exact binomial test of the same level.

    Raises:
        ExportError: a task loses more.
    """
    losses = (_describe_loss(task, result, max_cost) for task, result in measured.items())
    over = [loss for loss in losses if loss]
    if over:
        raise ExportError(f"{'; '.join(over)}. Nothing was written. {_ADVICE}")


def _describe_loss(task: str, measured: MeasuredQuality, max_cost: float) -> str | None:
    """Describe a task's loss if it is over `max_cost`, and no chance; None otherwise."""
    quality, worse, better = measured.quality, measured.num_worse, measured.num_better
    if quality.metric == AGREEMENT:
        most = max(_MAX_OTHERS, max_cost)
        if _is_chance(worse, quality.count, most / 100):
            return None
        name, _, head = task.partition("/")
        option = f"--head {head} {_LABELS_FROM[name]}" if head else _LABELS_FROM.get(name)
        labels = f"; {option} measures it" if option else ""
        return (
            f"{task} gives another answer than torch in {worse:,} of {quality.count:,} cases; "
            f"allowed are {most:g} % (what that costs is not known without labels{labels})"
        )
    if quality.cost <= max_cost + _ROUNDING or _is_chance(worse, worse + better, 0.5):
        return None
    return (
        f"{task} makes {worse:,} of {quality.count:,} answers worse and {better:,} better: "
        f"{quality.metric} falls from {quality.torch:.2f} to {quality.bundle:.2f}, allowed are "
        f"{max_cost:g} points"
    )


def _is_chance(count: int, num_cases: int, rate: float) -> bool:
    """Whether so many cases or more are likely where each is one at this rate (exact test)."""
    if not count:
        return True
    from scipy.stats import binomtest  # importing it takes long

    return bool(binomtest(count, num_cases, rate, alternative="greater").pvalue >= _LEVEL)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meter:
    """Runs the samples of tasks in torch and from the bundle."""

    reference: Runner
    engine: Runner
    bar: tqdm[Any]

    def measure(self, task: str, sample: Sample, budget_s: float | None) -> MeasuredQuality:
        """Measure a task on its sample, or on the part of it that is done within the budget."""
        self.bar.set_description_str(task)
        ends_s = None if budget_s is None else time.monotonic() + budget_s
        expected: list[Any] = []
        predictions: list[Any] = []
        labels: list[Any] = []
        num_parts = min(_NUM_PARTS, len(sample.items))
        for number in range(num_parts):
            if number and ends_s is not None and time.monotonic() >= ends_s:
                self._skip(task, sample, number, num_parts)
                break
            items = sample.items[number::num_parts]
            expected += self._predict(self.reference, items)
            predictions += self._predict(self.engine, items)
            labels += [right for item in items for right in item.rights or ()]
        rights = expected if sample.metric == AGREEMENT else labels
        scores = list(
            zip(sample.scores(expected, rights), sample.scores(predictions, rights), strict=True)
        )
        return MeasuredQuality(
            quality=Quality(
                metric=sample.metric,
                torch=sample.mark(expected, rights),
                bundle=sample.mark(predictions, rights),
                count=len(predictions),
                data=sample.files,
            ),
            num_worse=sum(in_bundle < in_torch for in_torch, in_bundle in scores),
            num_better=sum(in_bundle > in_torch for in_torch, in_bundle in scores),
        )

    def _predict(self, runner: Runner, items: Sequence[EngineItem]) -> list[Any]:
        size = min(_MOST_TOKENS_AT_ONCE, _BATCHES_AT_ONCE * self.engine.max_batch_tokens)
        return predict(runner, items, max_tokens_at_once=size, bar=self.bar)

    def _skip(self, task: str, sample: Sample, number: int, num_parts: int) -> None:
        """Say that the rest of a sample is left out."""
        rest = [item for part in range(number, num_parts) for item in sample.items[part::num_parts]]
        self.bar.update(2 * sum(item.num_tokens for item in rest))
        self.bar.write(
            f"{task} is measured on {number} of {num_parts} parts of its sample: the time of "
            "--quality-budget is over",
            file=sys.stderr,
        )
