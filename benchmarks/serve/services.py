"""The services of the benchmark, and the requests that all of them get."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from albert_serve.bundle.manifest import TOKENIZER_FILE
from albert_serve.config import AlbertConfig
from benchmarks.harness.load import post_request
from benchmarks.harness.process import REPOSITORY
from benchmarks.harness.service import running_service
from benchmarks.harness.texts import draw_texts
from training.model.checkpoint import read_config
from training.model.heads import Task

# Those that both sides have: transformers 5 has no pipeline for questions any more.
TASKS: Final[tuple[Task, ...]] = ("text-classification", "fill-mask")
_PEER_PATHS: Final = {"text-classification": "/classify", "fill-mask": "/fill_mask"}
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


def make_stream(checkpoint: Path, texts: Sequence[Path], num_requests: int) -> list[StreamItem]:
    """Draw the requests, tasks by turns, lengths in random order; the same files give the same.

    Raises:
        BenchmarkError: there are no fitting texts.
        CorpusError: a file cannot be read.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
    most = AlbertConfig.from_hf(read_config(checkpoint)).max_positions
    draw = random.Random(_SEED)
    items = []
    # A mask in place of a word may be a token more.
    for index, (text, _) in enumerate(draw_texts(texts, tokenizer, num_requests, most - 2)):
        task = TASKS[index % len(TASKS)]
        if task == "fill-mask":
            words = text.split()
            words[draw.randrange(len(words))] = "[MASK]"
            text = " ".join(words)
        num_tokens = len(tokenizer.encode(text).ids)
        items.append(StreamItem(task=task, text=text, num_tokens=num_tokens))
    return items


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A service for `bentoml serve`.

    Attributes:
        target: the service, as MODULE:NAME.
        environment: its settings.
        call: the path and body that ask it for an item.
    """

    name: str
    target: str
    environment: Mapping[str, str]
    call: Callable[[StreamItem], tuple[str, dict[str, Any]]]

    def request(self, item: StreamItem) -> bytes:
        """Return the request that asks for an item."""
        return post_request(*self.call(item))

    def running(self, folder: Path) -> AbstractContextManager[int]:
        """Start it, and stop it afterwards; for `with`, which has the port when it is ready.

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
