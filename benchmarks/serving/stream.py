"""The model and the requests of all services."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE
from albert_serve.bundle.weights import read_header
from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.default_bundle import shipped_bundle
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.engines.inputs import Selection, choose
from benchmarks.harness.errors import BenchmarkError
from training.model.checkpoint import find_tasks, read_config, save_checkpoint
from training.model.heads import AlbertForTasks
from training.vocab import build_tokenizer

# Those that both sides have: transformers 5 has no pipeline for questions any more.
TASKS: Final = ("text-classification", "fill-mask")
IDLE_LENGTHS: Final = (8, 128, 512)
_MASK: Final = "[MASK]"
_SPIECE_FILE: Final = "spiece.model"
_SEED: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A text to be classified, or with a mask to be filled.

    Attributes:
        num_tokens: of the text, special ones included.
    """

    task: str
    text: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One request's inputs.

    Attributes:
        items: tasks by turns, lengths in random order.
        idle: texts of one length each, by that length.
    """

    items: Sequence[Item]
    idle: Mapping[int, Sequence[Item]]


def make_checkpoint(preset: str, folder: Path) -> Path:
    """A Hugging Face directory with a head for each task and random weights.

    A standard deviation of H^-0.5 keeps the size of what goes through a matrix, so that the answers
    depend on the text; with the 0.02 of training's start they hardly do.
    """
    tokenizer = shipped_bundle()
    num_pieces = AlbertTokenizer.from_file(tokenizer / TOKENIZER_FILE).vocab_size
    sizes = PRESETS[preset]
    config = replace(sizes, vocab_size=num_pieces, initializer_range=sizes.hidden_size**-0.5)
    torch.manual_seed(_SEED)
    model = AlbertForTasks(config, {"fill-mask": num_pieces, "text-classification": 2})
    save_checkpoint(model, folder, tokenizer_from=tokenizer)
    return folder


def make_stream(
    checkpoint: Path, texts: Sequence[Path], num_requests: int, num_idle: int
) -> Stream:
    """Draw the requests; the same files give the same ones.

    Args:
        num_idle: texts of each length that are sent one at a time.

    Raises:
        BenchmarkError: there are no fitting texts, or the checkpoint has no head for any task.
        CheckpointError, CorpusError, BundleError: something cannot be read.
    """
    tokenizer = _tokenizer(checkpoint)
    most = AlbertConfig.from_hf(read_config(checkpoint)).max_positions
    tasks = _tasks(checkpoint)
    # A mask in place of a word may be a token more.
    selection = Selection(
        texts=texts, questions=[], num_texts=num_requests, num_questions=0, max_tokens=most - 2
    )
    chosen = choose(selection, tokenizer).texts
    draw = random.Random(_SEED)
    items = [
        _item(tasks[index % len(tasks)], text, tokenizer, draw) for index, text in enumerate(chosen)
    ]
    words = " ".join(chosen).split()
    idle = {
        length: [_cut(words, length, tokenizer, draw, tasks[0]) for _ in range(num_idle)]
        for length in IDLE_LENGTHS
        if length <= min(most, len(words))
    }
    return Stream(items=items, idle=idle)


def _tokenizer(checkpoint: Path) -> Tokenizer:
    file, pieces = checkpoint / TOKENIZER_FILE, checkpoint / _SPIECE_FILE
    if pieces.is_file() and not file.is_file():
        return build_tokenizer(pieces)
    AlbertTokenizer.from_file(file)  # it says what is wrong with the file
    return Tokenizer.from_file(str(file))


def _tasks(checkpoint: Path) -> Sequence[str]:
    shapes = {name: each.shape for name, each in read_header(checkpoint / WEIGHTS_FILE).items()}
    known_tasks = find_tasks(shapes, read_config(checkpoint).get("architectures") or ())
    tasks = [task for task in TASKS if task in known_tasks]
    if not tasks:
        raise BenchmarkError(f"{checkpoint} has no head for {' or '.join(TASKS)}")
    return tasks


def _item(task: str, text: str, tokenizer: Tokenizer, draw: random.Random) -> Item:
    if task == "fill-mask":
        words = text.split()
        words[draw.randrange(len(words))] = _MASK
        text = " ".join(words)
    return Item(task=task, text=text, num_tokens=len(tokenizer.encode(text).ids))


def _cut(
    words: Sequence[str], length: int, tokenizer: Tokenizer, draw: random.Random, task: str
) -> Item:
    """That many tokens from anywhere in the texts."""
    start = draw.randrange(max(1, len(words) - length))
    whole = " ".join(words[start : start + length])
    # The last token is [SEP], which is not in the text.
    text = whole[: tokenizer.encode(whole).offsets[length - 2][1]].strip()
    while (num_tokens := len(tokenizer.encode(text).ids)) > length:
        text = text[:-1]  # a word that was cut may be more tokens than it had in the whole
    return Item(task=task, text=text, num_tokens=num_tokens)
