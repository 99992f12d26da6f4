"""Comparison of a bundle's answers with torch's.

With labelled data, export compares the metrics of both. It rejects a significant loss: more answers
became worse than better, and chance does not explain this. The test is McNemar's exact test, or a
sign test if answers can be partly right.

Without labels, the right answers are unknown, and answers to unusual texts often differ. So export
rejects only a large difference in the probabilities, which shows that something is broken.

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

# The texts are from Wikipedia (CC BY-SA 3.0). examples/README.md names the authors.
_DEFAULT_TEXTS: Final = Path(__file__).with_name("texts.jsonl")
_NUM_TEXTS: Final = 100
_MAX_TOKENS: Final = 64
_MASK_STEP: Final = 8
_NUM_QUESTION_WORDS: Final = 8
# Maximum mean difference of the probabilities. On unusual texts, int8 differs by 0.1 with 77
# labels. With wrong scales, it differs by 0.3 to 1.
MAX_DIFFERENCE: Final = 0.2
_SIGNIFICANCE_LEVEL: Final = 0.01
_ROUNDING: Final = 1e-9
_ADVICE: Final = (
    "To write the bundle, omit the task (--tasks with the other tasks), keep parts in fp32 "
    "(--keep-fp32 attention ffn), or use --force."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredQuality:
    """A head's quality on labelled data.

    Attributes:
        quality: metric of the answers from torch and from the bundle.
        num_worse: number of answers with a lower score than in torch.
        num_better: number of answers with a higher score than in torch.
    """

    quality: Quality
    num_worse: int
    num_better: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison of a bundle with torch.

    Attributes:
        measurements: quality of each head with labelled data.
        differences: mean difference of the probabilities of each head without labelled data.
        texts: names of the files with unlabelled texts.
    """

    measurements: Mapping[str, MeasuredQuality] = field(default_factory=dict)
    differences: Mapping[str, float] = field(default_factory=dict)
    texts: Sequence[str] = ()

    @property
    def quality(self) -> dict[str, Quality]:
        """The quality of each head with labelled data."""
        return {head: result.quality for head, result in self.measurements.items()}


def compare(
    source: Source,
    tokenizer: AlbertTokenizer,
    reference: Runner,
    engine: Runner,
    labelled: Mapping[str, LabelledData],
    texts: Sequence[Path] = (),
) -> Comparison:
    """Compare a checkpoint's answers in torch with those from its bundle.

    Args:
        source: checkpoint.
        tokenizer: tokenizer of the bundle.
        reference: engine that runs the checkpoint in torch, in fp32.
        engine: engine that runs the bundle.
        labelled: labelled data by head.
        texts: files of texts for heads without labelled data, or empty for the built-in texts.
    """
    unlabelled = {head: entry for head, entry in source.heads.items() if head not in labelled}
    files = find_files(texts or [_DEFAULT_TEXTS]) if unlabelled else []
    lines = _read_lines(files) if unlabelled else []
    differences = {}
    for head, entry in unlabelled.items():
        items = _text_items(lines, head, entry, tokenizer, source.config.max_positions)
        expected, actual = (predict(runner, items, head) for runner in (reference, engine))
        differences[head] = _mean_difference(expected, actual, entry.problem_type)
    return Comparison(
        measurements={head: _measure(data, reference, engine) for head, data in labelled.items()},
        differences=differences,
        texts=file_names(files),
    )


def check_quality(comparison: Comparison, max_cost: float) -> None:
    """Check that no head loses significantly more than `max_cost` points or differs too much."""
    failures = [
        *(_describe_loss(head, item, max_cost) for head, item in comparison.measurements.items()),
        *(
            f"{head} is broken: its probabilities differ from torch's by {difference:.2f} on "
            f"average ({', '.join(comparison.texts)}); the limit is {MAX_DIFFERENCE:g}"
            for head, difference in comparison.differences.items()
            if not difference <= MAX_DIFFERENCE
        ),
    ]
    if messages := list(filter(None, failures)):
        raise ExportError(f"{'; '.join(messages)}. Nothing was written. {_ADVICE}")


def _describe_loss(head: str, measurement: MeasuredQuality, max_cost: float) -> str | None:
    """Describe a head's significant loss of more than `max_cost` points, or return None."""
    quality, worse, better = measurement.quality, measurement.num_worse, measurement.num_better
    if quality.cost <= max_cost + _ROUNDING or _is_chance(worse, better):
        return None
    return (
        f"{head} makes {worse:,} of {quality.count:,} answers worse and {better:,} better: "
        f"{quality.metric} falls from {quality.torch:.2f} to {quality.bundle:.2f}; the limit is "
        f"{max_cost:g} points (--max-cost)"
    )


def _is_chance(num_worse: int, num_better: int) -> bool:
    """Return whether chance explains how many of the changed answers are worse."""
    from scipy.stats import binomtest  # importing scipy takes long

    num_changed = num_worse + num_better
    if not num_worse:
        return True
    test = binomtest(num_worse, num_changed, alternative="greater")
    return bool(test.pvalue >= _SIGNIFICANCE_LEVEL)


def _measure(data: LabelledData, reference: Runner, engine: Runner) -> MeasuredQuality:
    in_torch, in_bundle = data.measure(reference), data.measure(engine)
    pairs = list(zip(in_torch.scores, in_bundle.scores, strict=True))
    if in_torch.num_truncated:
        print(f"{in_torch.num_truncated:,} of {len(pairs):,} texts are truncated.", file=sys.stderr)
    return MeasuredQuality(
        quality=Quality(
            metric=data.metric,
            torch=in_torch.percent,
            bundle=in_bundle.percent,
            count=len(pairs),
            data=file_names(data.files),
        ),
        num_worse=sum(new < reference for reference, new in pairs),
        num_better=sum(new > reference for reference, new in pairs),
    )


def _read_lines(files: Sequence[Path]) -> list[str]:
    """Return the first non-blank lines of the files."""
    lines = (line for text in read_documents(files) for line in text.splitlines())
    texts = list(islice(filter(str.strip, lines), _NUM_TEXTS))
    if not texts:
        raise ExportError(f"{', '.join(map(str, files))} contain no text. Use other --text files.")
    return texts


def _text_items(
    texts: Sequence[str],
    head: str,
    entry: HeadEntry,
    tokenizer: AlbertTokenizer,
    max_positions: int,
) -> list[EngineItem]:
    """Return a head's items, which are decoded to probabilities.

    A pair for sentence order is a text and the next text. A question is the first words of a text.
    """
    truncator = Truncator(tokenizer, min(_MAX_TOKENS, max_positions), "truncate")
    pairs: Iterable[tuple[str, str | None]] = zip(texts, repeat(None))
    if head == "sentence-order":
        pairs = zip(texts, [*texts[1:], texts[0]], strict=True)
    elif head == "question-answering":
        pairs = [(" ".join(text.split()[:_NUM_QUESTION_WORDS]), text) for text in texts]
    rows = None if head in ("question-answering", TOKENS) else [0]
    items = []
    for text, second in pairs:
        encoded = truncator.fit_texts(text, second).input_for_rows(head, rows)
        if head == "fill-mask":
            positions = list(range(1, len(encoded.ids), _MASK_STEP))
            ids = np.array(encoded.ids)
            ids[positions] = tokenizer.mask_id
            encoded = replace(encoded, ids=ids.tolist(), rows=positions)
        items.append(EngineItem(inputs=[encoded], decode=partial(_probabilities, head, entry)))
    return items


def _probabilities(head: str, entry: HeadEntry, logits: Sequence[Logits]) -> list[NDArray[Any]]:
    """Return the probabilities (R, K) of a text, or the score (1, 1) of a regression."""
    (logits_RK,) = logits
    if entry.problem_type == "regression":
        return [logits_RK]
    if entry.problem_type == "multi_label_classification":
        return [sigmoid(logits_RK / entry.temperature)]
    if head == "question-answering":  # starts and ends have separate distributions
        logits_RK = logits_RK.T
    return [softmax(logits_RK / entry.temperature)]


def _mean_difference(
    expected: Sequence[NDArray[Any]], actual: Sequence[NDArray[Any]], problem: ProblemType | None
) -> float:
    """Return the largest difference of a probability, averaged over texts or tokens.

    A regression's mean difference is divided by the largest score, if it is above 1.
    """
    pairs = zip(expected, actual, strict=True)
    largest_R = np.concatenate([np.abs(reference - new).max(-1) for reference, new in pairs])
    scale = max(1.0, np.abs(expected).max()) if problem == "regression" else 1.0
    return float(largest_R.mean() / scale)
