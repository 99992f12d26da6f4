"""The texts, questions and ids of all contestants, as padded batches of like lengths.

Shape legend: B sequences, S positions, K labels.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.engines.jobs import TEXTS, Shape
from benchmarks.harness.errors import BenchmarkError
from training.data.corpus import find_files, read_documents
from training.data.questions import read_squad

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Encode: TypeAlias = Callable[[list[str]], list[list[int]]]
_LEAST_TOKENS: Final = 8
_NUM_CALIBRATION: Final = 64
_NUM_FEW: Final = 16
# Of the texts that are looked at, so that a stream is not the file's beginning.
_CANDIDATES: Final = 8
_SEED: Final = 0
_CLS_ID: Final = 2
_SEP_ID: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences padded on the right; all (B, S).

    Attributes:
        mask: 1 at real tokens.
    """

    ids: Ints
    types: Ints
    mask: Ints

    def feed(self) -> dict[str, Ints]:
        """Return the arrays under the names of `transformers`."""
        return {
            "input_ids": self.ids,
            "attention_mask": self.mask,
            "token_type_ids": self.types,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Tokens of a pass: real ones, and those computed, padding included."""

    num_real: int
    num_computed: int

    @classmethod
    def of(cls, lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> Tokens:
        """Those of sequences in groups, each padded to its longest."""
        computed = sum(len(members) * max(lengths[i] for i in members) for members in groups)
        return cls(num_real=sum(lengths), num_computed=computed)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """The result of a pass over a stream.

    Attributes:
        outputs: of each item, in order: probabilities, or the text of an answer.
        count: counts its tokens; called when the time has been taken.
    """

    outputs: list[Any]
    count: Callable[[], Tokens]


class RunBatches(Protocol):
    """Logits (B, K) of each batch."""

    def __call__(self, batches: Sequence[Batch]) -> list[Floats]:
        """Run them, in whatever way is fastest."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedClassifier:
    """Classifies texts in batches of like lengths, each padded to its longest."""

    encode: Encode
    run: RunBatches

    def logits(self, batch: Batch) -> Floats:
        """Logits (B, K) of a batch."""
        return self.run([batch])[0]

    def process(self, items: Sequence[str], batch_size: int) -> LoadResult:
        """Probabilities of each text, tokenisation included."""
        sequences = self.encode(list(items))
        lengths = [len(ids) for ids in sequences]
        groups = group(lengths, batch_size)
        logits = self.run([pad([sequences[i] for i in members]) for members in groups])
        outputs: list[Any] = [None] * len(items)
        for members, logits_BK in zip(groups, logits, strict=True):
            for index, row in zip(members, probabilities(logits_BK), strict=True):
                outputs[index] = row
        return LoadResult(outputs=outputs, count=lambda: Tokens.of(lengths, groups))


def group(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of like lengths, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def in_order(num_items: int, batch_size: int) -> list[list[int]]:
    """Indices in batches, in their own order."""
    order = list(range(num_items))
    return [order[start : start + batch_size] for start in range(0, num_items, batch_size)]


def pad(sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] = ()) -> Batch:
    """A batch of these ids; without `types` all are of the first segment."""
    shape = (len(sequences), max(len(ids) for ids in sequences))
    ids_BS, types_BS, mask_BS = (np.zeros(shape, np.int64) for _ in range(3))
    for row, ids in enumerate(sequences):
        ids_BS[row, : len(ids)] = ids
        mask_BS[row, : len(ids)] = 1
        if types:
            types_BS[row, : len(ids)] = types[row]
    return Batch(ids=ids_BS, types=types_BS, mask=mask_BS)


def probabilities(logits_BK: Floats) -> list[list[float]]:
    """Softmax over the labels; the logistic function of a single one."""
    wide = logits_BK.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    chosen = shares if wide.shape[1] > 1 else 1 / (1 + np.exp(-wide))
    return [[float(share) for share in row] for row in chosen]


def plain_encoder(tokenizer_file: Path, max_tokens: int) -> Encode:
    """Ids of texts, cut to `max_tokens`, by the `tokenizers` library alone."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(max_length=max_tokens)
    tokenizer.no_padding()
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The inputs of the measurement.

    Attributes:
        texts: of the stream, in random order.
        text_lengths: their tokens, special ones included.
        calibration: further texts, for those who quantise by example.
        questions: pairs of question and context, in random order.
        question_lengths: tokens of the contexts.
        pool: ids of real text, of which the fixed shapes are cut.
    """

    texts: list[str]
    text_lengths: list[int]
    calibration: list[str]
    questions: list[dict[str, str]]
    question_lengths: list[int]
    pool: list[int]

    @classmethod
    def read(cls, file: Path) -> Inputs:
        """Read the inputs that `write` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def write(self, file: Path) -> None:
        """Write the inputs as one JSON file."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def part(self, case: str, part: str) -> list[Any]:
        """Items of the stream that the case names: "all", every "third" by length, or a "few"."""
        return [self._items(case)[index] for index in self.indices(case, part)]

    def indices(self, case: str, part: str) -> list[int]:
        """Return the indices of a part, whose lengths are distributed as those of all items."""
        lengths = self._lengths(case)
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        step = {"all": 1, "third": 3, "few": max(1, len(order) // _NUM_FEW)}[part]
        return sorted(order[min(step // 2, len(order) - 1) :: step])

    def batch(self, shape: Shape) -> Batch:
        """Real text of this shape: each row begins elsewhere in the pool."""
        num_inner = shape.length - 2
        rows = []
        for row in range(shape.num_rows):
            start = row * shape.length
            inner = [self.pool[(start + i) % len(self.pool)] for i in range(num_inner)]
            rows.append([_CLS_ID, *inner, _SEP_ID])
        return pad(rows)

    def _items(self, case: str) -> Sequence[Any]:
        return self.texts if case == TEXTS else self.questions

    def _lengths(self, case: str) -> Sequence[int]:
        return self.text_lengths if case == TEXTS else self.question_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The number and the sources of inputs.

    Attributes:
        texts: files or folders of texts.
        questions: files in SQuAD's format.
        max_tokens: of a text, special ones included.
    """

    texts: Sequence[Path]
    questions: Sequence[Path]
    num_texts: int
    num_questions: int
    max_tokens: int


def choose(selection: Selection, tokenizer: Tokenizer) -> Inputs:
    """Draw texts of 8 tokens to as many as the model has positions, and questions.

    A text that is longer is taken by its paragraphs; the same files give the same inputs.

    Raises:
        CorpusError: a file cannot be read.
        BenchmarkError: there is no text of such a length.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    num_texts = selection.num_texts + _NUM_CALIBRATION
    fitting = _fitting(read_documents(find_files(selection.texts)), tokenizer, selection.max_tokens)
    candidates = list(islice(fitting, _CANDIDATES * num_texts))
    if not candidates:
        raise BenchmarkError(
            f"no text of {_LEAST_TOKENS} to {selection.max_tokens} tokens in "
            f"{', '.join(map(str, selection.texts))}; name other files with --texts"
        )
    drawn = random.Random(_SEED).sample(candidates, min(num_texts, len(candidates)))
    chosen, rest = drawn[: selection.num_texts], drawn[selection.num_texts :]
    questions = _questions(selection)
    return Inputs(
        texts=[text for text, _ in chosen],
        text_lengths=[len(ids) for _, ids in chosen],
        calibration=[text for text, _ in rest or chosen],
        questions=questions,
        question_lengths=[len(tokenizer.encode(each["context"]).ids) for each in questions],
        pool=[token for _, ids in chosen for token in ids[1:-1]],
    )


def _fitting(
    documents: Iterable[str], tokenizer: Tokenizer, max_tokens: int
) -> Iterator[tuple[str, list[int]]]:
    for document in documents:
        whole = tokenizer.encode(document).ids
        parts = [document] if len(whole) <= max_tokens else document.split("\n")
        for part in parts:
            ids = whole if part is document else tokenizer.encode(part).ids
            if _LEAST_TOKENS <= len(ids) <= max_tokens:
                yield part, ids


def _questions(selection: Selection) -> list[dict[str, str]]:
    if not selection.num_questions:
        return []
    questions = read_squad(selection.questions)
    drawn = random.Random(_SEED).sample(questions, min(selection.num_questions, len(questions)))
    return [{"question": one.question, "context": one.context} for one in drawn]
