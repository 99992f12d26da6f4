"""Comparison of a bundle's answers with torch's.

With labelled data, the metrics of both are compared on all of it. A loss is rejected if the answers
that only torch has right outnumber those that only the bundle has right by more than chance (exact
McNemar test; a sign test where answers have more grades than right and wrong).

Without labels, nothing shows which answer is right, and answers to texts unlike those of training
often differ. So only a large difference of the probabilities is rejected: something is broken.

Shape legend: R rows, K outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.bundle.manifest import HeadEntry, ProblemType, Quality
from albert_serve.bundle.weights import TOKENS
from albert_serve.tasks.base import Logits, Runner, sigmoid, softmax
from albert_serve.tasks.truncation import Truncator
from albert_serve.tokenizer import AlbertTokenizer
from export.config import ExportError
from export.labelled import LabelledData
from export.source import Source
from training.data.corpus import find_files, read_documents
from training.model.provenance import file_names
from training.tasks.engine import EngineItem, predict

# The text is from Wikipedia, CC BY-SA 3.0; examples/README.md names the authors.
_BUILT_IN: Final = Path(__file__).with_name("texts.jsonl")
_NUM_TEXTS: Final = 100
_LENGTH: Final = 64
_MASK_EVERY: Final = 8
_QUESTION_WORDS: Final = 8
# Texts unlike those of training: int8 differs by 0.1 for 77 labels, with wrong scales by 0.3 to 1.
MAX_DIFFERENCE: Final = 0.2
# The probability, by chance alone, of a loss that is rejected.
_LEVEL: Final = 0.01
_ROUNDING: Final = 1e-9
_ADVICE: Final = (
    "To write the bundle, leave the task out (--tasks with the others), keep parts in fp32 "
    "(--keep-fp32 attention ffn), or use --force"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredQuality:
    """A head's quality, and the numbers of answers that are worse and better than torch's."""

    quality: Quality
    num_worse: int
    num_better: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A bundle compared with torch.

    Attributes:
        measured: the heads with labelled data.
        differences: for each other head, the mean difference of its probabilities.
        texts: names of the files of the texts without labels.
    """

    measured: Mapping[str, MeasuredQuality] = field(default_factory=dict)
    differences: Mapping[str, float] = field(default_factory=dict)
    texts: Sequence[str] = ()

    @property
    def quality(self) -> dict[str, Quality]:
        """The quality of each head with labelled data."""
        return {head: result.quality for head, result in self.measured.items()}


def compare(
    source: Source,
    tokenizer: AlbertTokenizer,
    reference: Runner,
    engine: Runner,
    labelled: Mapping[str, LabelledData],
    texts: Sequence[Path] = (),
) -> Comparison:
    """Run a checkpoint in torch and from its bundle.

    Args:
        reference: runs the checkpoint in torch, in fp32.
        engine: runs the bundle.
        labelled: by head.
        texts: files for the other heads; empty for the built-in texts.
    """
    others = {head: entry for head, entry in source.heads.items() if head not in labelled}
    files = find_files(texts or [_BUILT_IN]) if others else []
    lines = _read_lines(files) if others else []
    differences = {}
    for head, entry in others.items():
        items = _text_items(lines, head, entry, tokenizer, source.config.max_positions)
        expected, got = (predict(runner, items, head) for runner in (reference, engine))
        differences[head] = _mean_difference(expected, got, entry.problem_type)
    return Comparison(
        measured={head: _measure(data, reference, engine) for head, data in labelled.items()},
        differences=differences,
        texts=file_names(files),
    )


def check_quality(comparison: Comparison, max_cost: float) -> None:
    """Check that no task certainly loses more than `max_cost` points, or differs too much."""
    faults = [
        *(_describe_loss(head, result, max_cost) for head, result in comparison.measured.items()),
        *(
            f"{head} is broken: its probabilities differ from torch's by {difference:.2f} on "
            f"average ({', '.join(comparison.texts)}); at most {MAX_DIFFERENCE:g} is allowed"
            for head, difference in comparison.differences.items()
            if not difference <= MAX_DIFFERENCE
        ),
    ]
    if found := list(filter(None, faults)):
        raise ExportError(f"{'; '.join(found)}. Nothing was written. {_ADVICE}")


def _describe_loss(head: str, measured: MeasuredQuality, max_cost: float) -> str | None:
    """Describe a head's loss if it is over `max_cost`, and not by chance; None otherwise."""
    quality, worse, better = measured.quality, measured.num_worse, measured.num_better
    if quality.cost <= max_cost + _ROUNDING or _is_chance(worse, better):
        return None
    return (
        f"{head} makes {worse:,} of {quality.count:,} answers worse and {better:,} better: "
        f"{quality.metric} falls from {quality.torch:.2f} to {quality.bundle:.2f}, allowed are "
        f"{max_cost:g} points (--max-cost)"
    )


def _is_chance(num_worse: int, num_better: int) -> bool:
    """Whether chance alone makes so many of the answers that differ worse, or more."""
    from scipy.stats import binomtest  # importing it takes long

    num_changed = num_worse + num_better
    if not num_worse:
        return True
    return bool(binomtest(num_worse, num_changed, alternative="greater").pvalue >= _LEVEL)


def _measure(data: LabelledData, reference: Runner, engine: Runner) -> MeasuredQuality:
    ours, theirs = data.measure(reference), data.measure(engine)
    pairs = list(zip(ours.scores, theirs.scores, strict=True))
    if ours.num_truncated:
        print(f"{ours.num_truncated:,} of {len(pairs):,} texts were truncated", file=sys.stderr)
    return MeasuredQuality(
        quality=Quality(
            metric=data.metric,
            torch=ours.percent,
            bundle=theirs.percent,
            count=len(pairs),
            data=file_names(data.files),
        ),
        num_worse=sum(in_bundle < in_torch for in_torch, in_bundle in pairs),
        num_better=sum(in_bundle > in_torch for in_torch, in_bundle in pairs),
    )


def _read_lines(files: Sequence[Path]) -> list[str]:
    """Return the first lines with text."""
    lines = (line for text in read_documents(files) for line in text.splitlines())
    texts = list(islice(filter(str.strip, lines), _NUM_TEXTS))
    if not texts:
        raise ExportError(f"no text in {', '.join(map(str, files))}")
    return texts


def _text_items(
    texts: Sequence[str],
    head: str,
    entry: HeadEntry,
    tokenizer: AlbertTokenizer,
    max_positions: int,
) -> list[EngineItem]:
    """Return the inputs of a head, read as probabilities.

    A pair for sentence order is a text and the next one; a question is the first words of its text.
    """
    truncator = Truncator(tokenizer, min(_LENGTH, max_positions), "truncate")
    pairs: Iterable[tuple[str, str | None]] = zip(texts, repeat(None))
    if head == "sentence-order":
        pairs = zip(texts, [*texts[1:], texts[0]], strict=True)
    elif head == "question-answering":
        pairs = [(" ".join(text.split()[:_QUESTION_WORDS]), text) for text in texts]
    rows = None if head in ("question-answering", TOKENS) else [0]
    items = []
    for text, second in pairs:
        encoded = truncator.fit_texts(text, second).input_for_rows(head, rows)
        if head == "fill-mask":
            masked = list(range(1, len(encoded.ids), _MASK_EVERY))
            ids = [tokenizer.mask_id if i in masked else id_ for i, id_ in enumerate(encoded.ids)]
            encoded = replace(encoded, ids=ids, rows=masked)
        items.append(EngineItem(inputs=[encoded], decode=partial(_probabilities, head, entry)))
    return items


def _probabilities(head: str, entry: HeadEntry, logits: Sequence[Logits]) -> list[NDArray[Any]]:
    """Return the probabilities (R, K) of a text; of a regression its score."""
    (logits_RK,) = logits
    if entry.problem_type == "regression":
        return [logits_RK]
    if entry.problem_type == "multi_label_classification":
        return [sigmoid(logits_RK / entry.temperature)]
    if head == "question-answering":  # each token is the start or the end of an answer
        logits_RK = logits_RK.T
    return [softmax(logits_RK / entry.temperature)]


def _mean_difference(
    expected: Sequence[NDArray[Any]], got: Sequence[NDArray[Any]], problem: ProblemType | None
) -> float:
    """Return the mean over texts, or tokens, of the largest difference of a probability.

    Of a regression, it is the mean difference of scores over the largest score, or over 1.
    """
    pairs = zip(expected, got, strict=True)
    largest_R = np.concatenate([np.abs(ours - theirs).max(-1) for ours, theirs in pairs])
    scale = max(1.0, np.abs(expected).max()) if problem == "regression" else 1.0
    return float(largest_R.mean() / scale)
