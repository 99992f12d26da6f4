"""The model, the requests and the services of the benchmark."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from tokenizers import Tokenizer

from albert_serve.bundle.manifest import TOKENIZER_FILE
from albert_serve.config import AlbertConfig
from benchmarks.harness.process import REPOSITORY
from benchmarks.harness.service import ServiceProcess, running_service
from benchmarks.harness.texts import draw_texts
from training.model.checkpoint import read_config
from training.model.heads import Task

# The path and the body of a request.
Call: TypeAlias = tuple[str, dict[str, Any]]
# Those that both sides have: transformers 5 has no pipeline for questions any more.
TASKS: Final[tuple[Task, ...]] = ("text-classification", "fill-mask")
_PEER_PATHS: Final = {"text-classification": "/classify", "fill-mask": "/fill_mask"}
_IDLE_LENGTHS: Final = (8, 128, 512)
_MASK: Final = "[MASK]"
_SEED: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamItem:
    """A text to be classified, or with a mask to be filled.

    Attributes:
        num_tokens: of the text, special ones included.
    """

    task: str
    text: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The requests of all services.

    Attributes:
        items: tasks by turns, lengths in random order.
        idle: texts of one length each, by that length.
    """

    items: Sequence[StreamItem]
    idle: Mapping[int, Sequence[StreamItem]]


def make_stream(
    checkpoint: Path, texts: Sequence[Path], num_requests: int, num_idle: int
) -> Stream:
    """Draw the requests; the same files give the same ones.

    Args:
        num_idle: texts of each length that are sent one at a time.

    Raises:
        BenchmarkError: there are no fitting texts.
        CorpusError: a file cannot be read.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
    most = AlbertConfig.from_hf(read_config(checkpoint)).max_positions
    # A mask in place of a word may be a token more.
    chosen = [each.text for each in draw_texts(texts, tokenizer, num_requests, most - 2)]
    draw = random.Random(_SEED)
    items = [
        _item(TASKS[index % len(TASKS)], text, tokenizer, draw) for index, text in enumerate(chosen)
    ]
    words = " ".join(chosen).split()
    idle = {
        length: [_cut(words, length, tokenizer, draw) for _ in range(num_idle)]
        for length in _IDLE_LENGTHS
        if length <= min(most, len(words))
    }
    return Stream(items=items, idle=idle)


def _item(task: str, text: str, tokenizer: Tokenizer, draw: random.Random) -> StreamItem:
    if task == "fill-mask":
        words = text.split()
        words[draw.randrange(len(words))] = _MASK
        text = " ".join(words)
    return StreamItem(task=task, text=text, num_tokens=len(tokenizer.encode(text).ids))


def _cut(
    words: Sequence[str], length: int, tokenizer: Tokenizer, draw: random.Random
) -> StreamItem:
    """Return a text to classify of that many tokens from anywhere in the texts."""
    start = draw.randrange(max(1, len(words) - length))
    whole = " ".join(words[start : start + length])
    # The last token is [SEP], which is not in the text.
    text = whole[: tokenizer.encode(whole).offsets[length - 2][1]].strip()
    while (num_tokens := len(tokenizer.encode(text).ids)) > length:
        text = text[:-1]  # a word that was cut may be more tokens than it had in the whole
    return StreamItem(task=TASKS[0], text=text, num_tokens=num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A service for `bentoml serve`.

    Attributes:
        target: the service, as MODULE:NAME.
        environment: its settings.
        call: the path and body that ask it for an item.
        bundle: the served bundle, for ours.
    """

    name: str
    target: str
    environment: Mapping[str, str]
    call: Callable[[StreamItem], Call]
    bundle: Path | None = None

    def running(self, folder: Path) -> AbstractContextManager[ServiceProcess]:
        """Start it, wait until it is ready, and stop it afterwards; for `with`.

        Args:
            folder: takes its log and BentoML's files.

        Raises:
            BenchmarkError: it did not start.
        """
        kept = {name: text for name, text in os.environ.items() if not name.startswith("ALBERT_")}
        common = {
            "BENTOML_DO_NOT_TRACK": "True",
            "BENTOML_HOME": str((folder / "bentoml").absolute()),
            "PYTHONPATH": str(REPOSITORY),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        command = ["-m", "bentoml", "serve", self.target]
        return running_service(command, folder, {**kept, **common, **self.environment})


def our_service(name: str, bundle: Path, num_threads: int) -> ServedModel:
    """Return this package's, with one worker and settings as they come."""
    return ServedModel(
        name=name,
        target="albert_serve.service:AlbertServe",
        environment={
            "ALBERT_SERVE_BUNDLE": str(bundle.absolute()),
            "ALBERT_SERVE_WORKERS": "1",
            "ALBERT_SERVE_THREADS": str(num_threads),
        },
        call=lambda item: (f"/{item.task}", {"inputs": item.text}),
        bundle=bundle,
    )


def peer_service(checkpoint: Path, num_threads: int) -> ServedModel:
    """Return BentoML's batching over pipelines."""
    return ServedModel(
        name="BentoML over pipelines",
        target="benchmarks.serve.peer:Pipelines",
        environment={
            "PEER_CHECKPOINT": str(checkpoint.absolute()),
            "OMP_NUM_THREADS": str(num_threads),
        },
        call=lambda item: (_PEER_PATHS[item.task], {"texts": [item.text]}),
    )
