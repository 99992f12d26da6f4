"""Pretraining examples from a tokenised corpus: segment bounds and the sentence task's label.

Segments are stored as bounds in the corpus, so an example is only a few numbers. The examples
depend only on (seed, epoch, part), so a run can be resumed anywhere.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.data.shards import Shard
from training.errors import RunError

SentenceTask = Literal["sop", "nsp", "none"]
# Pairs of unmasked segments, which train sentence order (training/tasks/pretraining/files.py).
Pairs = Literal["pairs"]

IGNORED: Final = -100  # torch's losses skip this target by default (ignore_index)
# Minimum number of tokens in a pair: three special tokens and a few from each segment.
MIN_LENGTH: Final = 8
# With `single_sentences`, sentences with fewer tokens are skipped: most of them are headings.
_MIN_SENTENCE: Final = 8
# Maximum ratio of the lengths of two single sentences, so that lengths do not reveal the order.
_MAX_LENGTH_RATIO: Final = 1.2
# Numbers that distinguish the seeds of an epoch's random generators.
_EXAMPLES, _MASKS = 0, 1


def check_length(option: str, length: int, max_positions: int) -> None:
    """Check the number of tokens of an example against the model's number of positions."""
    if not MIN_LENGTH <= length <= max_positions:
        raise RunError(
            f"{option} {length} is not between {MIN_LENGTH} and the model's {max_positions} "
            "positions. Use another length, or a model with more positions."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleSettings:
    """Settings for cutting examples from documents.

    Attributes:
        length: maximum number of tokens in an example, including special tokens.
        sentence_task: task that determines the second segment. `sop`: the first segment's
            neighbour, and the two are in order or swapped. `nsp`: the next segment, or one from a
            random document. `none`: no second segment. `pairs`: both segments are complete
            sentences, in order. A chunk with too few sentences gives no example.
        short_rate: fraction of the documents that are cut into shorter examples.
        min_sentences: minimum number of sentences in each segment, with `pairs`.
        single_sentences: whether segments of `pairs` are single sentences of similar lengths.
    """

    length: int
    sentence_task: SentenceTask | Pairs = "sop"
    short_rate: float = 0.1
    min_sentences: int = 1
    single_sentences: bool = False

    @property
    def room(self) -> int:
        """Maximum number of tokens in an example, excluding special tokens."""
        return self.length - (2 if self.sentence_task == "none" else 3)


class Example(NamedTuple):
    """A pretraining example: its part of the corpus, segment bounds and label.

    Attributes:
        part: number of the corpus part. `part`, `epoch` and `number` seed the masks.
        number: number of the example within the part.
        bounds: start and end of the first and of the second segment, as indices into the part's
            tokens. The second segment may be empty.
        label: label of the sentence task. `sop`: 0 if in order, 1 if swapped. `nsp`: 0 for the next
            segment, 1 for a random one. IGNORED if there is only one segment.
    """

    part: int
    epoch: int
    number: int
    bounds: tuple[int, int, int, int]
    label: int

    def tokens(self, part: Shard) -> tuple[NDArray[np.int64], int]:
        """Return [CLS] A [SEP] B [SEP] (N,), and the index of B's first token (N if B is empty)."""
        first_begin, first_end, second_begin, second_end = self.bounds
        cls, sep = [part.cls_id], [part.sep_id]
        pieces: list[ArrayLike] = [cls, part.tokens[first_begin:first_end], sep]
        if second_end > second_begin:
            pieces += [part.tokens[second_begin:second_end], sep]
        ids: NDArray[np.int64] = np.concatenate(pieces).astype(np.int64)
        return ids, first_end - first_begin + 2

    def mask_rng(self, seed: int) -> np.random.Generator:
        """Return the random generator for this example's masks in this epoch."""
        return np.random.default_rng([_MASKS, seed, self.epoch, self.part, self.number])


@dataclass(frozen=True, slots=True)
class Examples:
    """All examples from one part of the corpus in one epoch (`Example` describes the fields).

    Attributes:
        bounds: (N, 4) bounds of the segments.
        labels: (N,) labels of the sentence task.
    """

    bounds: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of tokens in each example (N,), including special tokens."""
        segments = self.bounds[:, 1::2] - self.bounds[:, ::2]
        sizes: NDArray[np.int64] = segments.sum(1) + 2 + (segments[:, 1] > 0)
        return sizes


def build_examples(
    part: Shard, settings: ExampleSettings, *, seed: int, epoch: int, number: int = 0
) -> Examples:
    """Build the examples of one epoch from part `number`.

    This follows the original's create_pretraining_data.py. Sentences are gathered up to a target
    length, which is random for a fraction `short_rate` of the documents. The second segment begins
    at a random sentence. Excess tokens are removed from either end of the longer segment. Only one
    thing differs: with `sop`, the original adds a random segment to a chunk of one sentence. Here,
    the chunk has no label.
    """
    rng = np.random.default_rng([_EXAMPLES, seed, epoch, number])
    if settings.sentence_task == "pairs":
        return _sentence_pairs(part, rng, settings)
    if settings.sentence_task == "nsp":
        rows = list(_next_or_random(part, rng, settings))
        chunks = np.array(rows, np.int64).reshape(-1, 5)
        bounds, labels = chunks[:, :4].copy(), chunks[:, 4].copy()
    else:
        begin, cut, end = _chunk_bounds(part, rng, settings).T
        bounds = np.stack([begin, cut, cut, end], axis=1)
        labels = np.where(cut == end, IGNORED, rng.integers(0, 2, len(bounds)))
        swapped = labels == 1
        bounds[swapped] = bounds[swapped][:, [2, 3, 0, 1]]
    _truncate(bounds, rng, settings.room)
    return Examples(bounds, labels)


def _targets(part: Shard, rng: np.random.Generator, settings: ExampleSettings) -> list[int]:
    """Draw the target length of each document's chunks, in tokens."""
    is_short = rng.random(part.num_documents) < settings.short_rate
    short = rng.integers(2, settings.room + 1, part.num_documents)
    targets: list[int] = np.where(is_short, short, settings.room).tolist()
    return targets


def _documents(part: Shard) -> Iterator[list[int]]:
    """Yield the bounds of each document's sentences, as indices into the tokens."""
    documents = part.documents.tolist()
    for first, last in pairwise(documents):
        yield part.sentences[first : last + 1].tolist()


def _chunk_bounds(
    part: Shard, rng: np.random.Generator, settings: ExampleSettings
) -> NDArray[np.int64]:
    """Return (N, 3) begin, cut and end of each chunk. If it has one segment, the cut is its end."""
    cuts = iter(rng.random(len(part.sentences)).tolist())
    chunks: list[tuple[int, int, int]] = []
    for bounds, target in zip(_documents(part), _targets(part, rng, settings), strict=True):
        first, end = 0, len(bounds) - 1
        while first < end:
            last = min(bisect_left(bounds, bounds[first] + target, first + 1), end)
            cut = first + 1 + int(next(cuts) * (last - first - 1))
            if settings.sentence_task == "none":
                cut = last
            chunks.append((bounds[first], bounds[cut], bounds[last]))
            first = last
    return np.array(chunks, np.int64).reshape(-1, 3)


def _sentence_pairs(part: Shard, rng: np.random.Generator, settings: ExampleSettings) -> Examples:
    """Divide chunks of complete sentences into two segments at a random sentence, with label 0.

    A sentence is skipped if the shortest chunk that begins with it cannot be a pair.
    """
    cuts = iter(rng.random(len(part.sentences)).tolist())
    minimum, chunks = settings.min_sentences, list[tuple[int, int, int]]()
    for bounds, target in zip(_documents(part), _targets(part, rng, settings), strict=True):
        first = 0
        while (min_last := first + 2 * minimum) < len(bounds):
            last = max(bisect_right(bounds, bounds[first] + target) - 1, min_last)
            if settings.single_sentences:
                last = min_last
            if not _is_pair(bounds[first : last + 1], settings):
                first += 1
                continue
            cut = first + minimum + int(next(cuts) * (last - first - 2 * minimum + 1))
            chunks.append((bounds[first], bounds[cut], bounds[last]))
            first = last
    bounds_N4 = np.array(chunks, np.int64).reshape(-1, 3)[:, [0, 1, 1, 2]]
    return Examples(bounds_N4, np.zeros(len(chunks), np.int64))


def _is_pair(bounds: list[int], settings: ExampleSettings) -> bool:
    """Return whether the sentences with these bounds can be a pair."""
    if bounds[-1] - bounds[0] > settings.room:
        return False
    if not settings.single_sentences:
        return True
    shorter, longer = sorted(end - begin for begin, end in pairwise(bounds))
    return shorter >= _MIN_SENTENCE and longer <= _MAX_LENGTH_RATIO * shorter


def _next_or_random(
    part: Shard, rng: np.random.Generator, settings: ExampleSettings
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the bounds of both segments, and the label (0: next segment, 1: random segment).

    As in BERT, a segment that was replaced by a random segment begins the next chunk. A chunk of
    one sentence always gets a random segment. A part with only one document gives no pairs.
    """
    targets = _targets(part, rng, settings)
    for number, (bounds, target) in enumerate(zip(_documents(part), targets, strict=True)):
        first, end = 0, len(bounds) - 1
        while first < end:
            last = min(bisect_left(bounds, bounds[first] + target, first + 1), end)
            cut = first + 1 + int(rng.random() * (last - first - 1))
            if part.num_documents == 1:
                yield bounds[first], bounds[last], bounds[last], bounds[last], IGNORED
                first = last
            elif cut < last and rng.random() < 0.5:
                yield bounds[first], bounds[cut], bounds[cut], bounds[last], 0
                first = last
            else:
                num_left = max(1, target - (bounds[cut] - bounds[first]))
                yield bounds[first], bounds[cut], *_random_segment(part, rng, number, num_left), 1
                first = cut


def _random_segment(
    part: Shard, rng: np.random.Generator, excluded_document: int, target: int
) -> tuple[int, int]:
    """Return the bounds of random sentences from another document, `target` tokens if possible."""
    document = int(rng.integers(part.num_documents - 1))
    document += document >= excluded_document
    begin, end = part.documents[document : document + 2].tolist()
    sentence = int(rng.integers(begin, end))
    bounds = part.sentences[sentence : end + 1]
    last = min(int(np.searchsorted(bounds, bounds[0] + target)), len(bounds) - 1)
    return int(bounds[0]), int(bounds[last])


def _truncate(bounds: NDArray[np.int64], rng: np.random.Generator, room: int) -> None:
    """Truncate the segments in place to a total of `room` tokens.

    The original's loop has the same result: it removes one token at a time from the longer segment,
    or from the second if both are equally long.
    """
    sizes = bounds[:, 1::2] - bounds[:, ::2]
    excess = np.maximum(sizes.sum(1) - room, 0)
    gap = sizes[:, 0] - sizes[:, 1]
    from_longer = np.minimum(excess, np.abs(gap))
    both = excess - from_longer
    cuts = np.stack([both // 2, (both + 1) // 2], axis=1)
    cuts[np.arange(len(cuts)), (gap < 0).astype(int)] += from_longer
    at_front = rng.binomial(cuts, 0.5)
    bounds[:, ::2] += at_front
    bounds[:, 1::2] -= cuts - at_front
