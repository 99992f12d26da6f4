"""A text as token ids, to be carried to a device, and batches that are cut and masked there."""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from training.data.batch import MicroBatch, PretrainBatch
from training.data.collate import Slicing
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.errors import RunError
from training.model.albert import ModelInputs
from training.model.checkpoint import write_weights
from training.model.heads import Task

# Blocks are compressed separately, so that as many as fit are written.
_TOKENS_A_BLOCK: Final = 1 << 21
_HEADER_BYTES: Final = 1024
# The mean of n words in a span with p(n) ~ 1/n, n <= 3, is 18 / 11.
_SPAN_BEGINS: Final = 11 / 18


def write_text(shards: Shards, vocab_size: int, file: Path, room: int) -> int:
    """Write as many tokens as fit into `room` bytes, and return their number.

    Raises:
        RunError: the vocabulary is too large for two bytes a token.
    """
    if vocab_size > 1 << 16:
        raise RunError(f"a vocabulary of {vocab_size:,} tokens; two bytes a token hold 65,536")
    xz, num_tokens = bytearray(), 0
    for tokens in _blocks(shards):
        block = lzma.compress(tokens.tobytes())
        if len(xz) + len(block) + _HEADER_BYTES > room:
            break
        xz += block
        num_tokens += len(tokens)
    sizes = {"num_tokens": torch.tensor(num_tokens), "vocab_size": torch.tensor(vocab_size)}
    write_weights({"xz": torch.tensor(xz, dtype=torch.uint8), **sizes}, file)
    return num_tokens


def _blocks(shards: Shards) -> Iterator[NDArray[np.uint16]]:
    for part in shards.parts:
        for begin in range(0, part.num_tokens, _TOKENS_A_BLOCK):
            yield part.tokens[begin : begin + _TOKENS_A_BLOCK].astype("<u2")


def read_text(file: Path, vocab_size: int) -> Tensor:
    """Return the token ids (T,), int32.

    Raises:
        RunError: the file is damaged, or of another vocabulary.
    """
    try:
        packed = load_file(file)
        ids = np.frombuffer(lzma.decompress(packed["xz"].numpy().tobytes()), "<u2")
        if len(ids) != packed["num_tokens"]:
            raise ValueError(f"{len(ids):,} tokens of {packed['num_tokens']:,}")
        its_size = int(packed["vocab_size"])
    except (OSError, ValueError, KeyError, lzma.LZMAError, safetensors.SafetensorError) as error:
        raise RunError(
            f"{file} cannot be read: {error}; copy it again, or pack it again"
        ) from error
    if its_size != vocab_size:
        raise RunError(
            f"{file} is text in a vocabulary of {its_size:,} tokens, and the checkpoint has "
            f"{vocab_size:,}; pack the text for this checkpoint"
        )
    return torch.from_numpy(ids.astype(np.int32))


@dataclass(kw_only=True)
class MaskedText:
    """Task stream over a text on a device, which is cut into rows and masked there.

    A row is [CLS], consecutive tokens and [SEP]; each epoch cuts elsewhere. Whole words are masked
    as by `NgramMasking`, except: the numbers of words in a span are geometric, with the same mean,
    and the last span of a row is cut, so that all rows have the same number of masks.

    Attributes:
        tokens: (T,) int32, without special tokens.
        masking: the masking of the vocabulary, with the mask rate.
        length: tokens of a row.
    """

    tokens: Tensor
    masking: NgramMasking
    length: int
    slicing: Slicing
    seed: int = 0
    name: str = "pretraining"
    tasks: tuple[Task, ...] = ("fill-mask",)
    losses: tuple[str, ...] = ("fill-mask",)
    _num_taken: int = 0

    def __post_init__(self) -> None:
        """Put the tables of the vocabulary on the device.

        Raises:
            RunError: the text is shorter than a step.
        """
        self._room, device = self.length - 2, self.tokens.device
        self._num_rows = len(self.tokens) // self._room - 1
        if self._num_rows < self.slicing.num_rows:
            raise RunError(
                f"--batch-size {self.slicing.num_rows}: the text has only {self._num_rows} rows"
            )
        self._is_special = torch.from_numpy(self.masking.is_special).to(device)
        self._ordinary = (~self._is_special).nonzero()[:, 0]
        self._begins_word = torch.from_numpy(self.masking.word_starts).to(device)

    def step(self) -> Sequence[MicroBatch]:
        """Return the micro-batches of the next step."""
        size = self.slicing.num_rows
        epoch, place = divmod(self._num_taken, self._num_rows // size)
        random = self._random(0, epoch)
        offset = random.initial_seed() % self._room
        rows = self.tokens[offset:][: self._num_rows * self._room].view(-1, self._room)
        order = torch.randperm(len(rows), generator=random, device=rows.device)
        random = self._random(1, self._num_taken)
        self._num_taken += 1
        parts = order[place * size : (place + 1) * size].view(-1, self.slicing.rows_a_batch)
        return [self._batch(rows[part].long(), random) for part in parts]

    def state(self) -> list[int]:
        """Return the number of steps taken so far."""
        return [self._num_taken]

    def restore(self, state: Sequence[int]) -> None:
        """Move to the step after so many."""
        (self._num_taken,) = state

    def take_smaller_batches(self) -> bool:
        """Refuse it: another shape would be compiled while the clock runs."""
        return False

    def _random(self, *purpose: int) -> torch.Generator:
        (state,) = np.random.SeedSequence([self.seed, *purpose]).generate_state(1)
        return torch.Generator(self.tokens.device).manual_seed(int(state))

    def _batch(self, text: Tensor, random: torch.Generator) -> PretrainBatch:
        masked, chosen, targets = self._mask(text, random)
        ids = F.pad(masked, (1, 1), value=self.masking.special.sep)
        ids[:, 0] = self.masking.special.cls
        firsts = torch.arange(0, ids.numel(), self.length, device=ids.device)
        return PretrainBatch(
            tokens=ModelInputs(ids=ids, types=torch.zeros_like(ids)),
            rows=(firsts[:, None] + 1 + chosen).flatten(),
            targets=targets.flatten(),
            firsts=firsts,
            labels=ids.new_zeros(len(ids)),
            num_tokens=ids.numel(),
            counts={"fill-mask": targets.numel()},
        )

    def _mask(self, text: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows with masks, the masked positions of each, and the original ids there."""

        def uniform(like: Tensor) -> Tensor:
            return torch.rand(like.shape, generator=random, device=like.device)

        begins = self._begins_word[text] & (uniform(text) < _SPAN_BEGINS)
        begins[:, 0] = True
        # Spans are masked in random order until the row has all its masks.
        ranks = uniform(text).gather(1, begins.long().cumsum(1) - 1)
        ranks = ranks.masked_fill(self._is_special[text], 2.0)
        num_masks = max(1, round(self.masking.rate * self._room))
        chosen = ranks.argsort(stable=True)[:, :num_masks]
        original, fate = text.gather(1, chosen), uniform(chosen)
        others = self._ordinary[(uniform(chosen) * len(self._ordinary)).long()]
        shown = torch.where(fate < 0.9, others, original)
        shown = torch.where(fate < 0.8, self.masking.special.mask, shown)
        return text.scatter(1, chosen, shown), chosen, original
