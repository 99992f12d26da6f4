"""The services of the benchmark, and the requests that all of them get."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from albert_serve.bundle.manifest import TOKENIZER_FILE
from albert_serve.config import AlbertConfig
from benchmarks.harness.process import REPOSITORY, BenchmarkError, last_line
from benchmarks.harness.texts import draw_texts
from benchmarks.serve.load import HOST, post_request
from training.model.checkpoint import read_config
from training.model.heads import Task

# Tasks that both sides serve: transformers 5 has no pipeline for question answering.
TASKS: Final[tuple[Task, ...]] = ("text-classification", "fill-mask")
_PEER_PATHS: Final = {"text-classification": "/classify", "fill-mask": "/fill_mask"}
_SEED: Final = 0
_START_S: Final = 180.0
_END_S: Final = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamItem:
    """Texts to classify, or texts with a mask to fill.

    Attributes:
        num_tokens: number of tokens in the texts, including special tokens.
    """

    task: str
    texts: Sequence[str]
    num_tokens: int


def make_stream(
    checkpoint: Path, files: Sequence[Path], num_requests: int, num_texts: int
) -> list[StreamItem]:
    """Draw requests of `num_texts` texts each: the tasks alternate, the lengths are random."""
    tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
    max_tokens = AlbertConfig.from_hf(read_config(checkpoint)).max_positions
    draw = random.Random(_SEED)
    # Two tokens are left free, because a mask may have more tokens than the word it replaces.
    drawn = draw_texts(files, tokenizer, num_requests * num_texts, max_tokens - 2)
    items = []
    for index, start in enumerate(range(0, len(drawn), num_texts)):
        task = TASKS[index % len(TASKS)]
        texts = [text for text, _ in drawn[start : start + num_texts]]
        if task == "fill-mask":
            texts = [_with_mask(text, draw) for text in texts]
        num_tokens = sum(len(tokenizer.encode(text).ids) for text in texts)
        items.append(StreamItem(task=task, texts=texts, num_tokens=num_tokens))
    return items


def _with_mask(text: str, draw: random.Random) -> str:
    words = text.split()
    words[draw.randrange(len(words))] = "[MASK]"
    return " ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A service that `bentoml serve` runs.

    Attributes:
        target: import path of the service, as MODULE:NAME.
        environment: environment variables with its settings.
        call: function that returns the path and the body of an item's request.
    """

    name: str
    target: str
    environment: Mapping[str, str]
    call: Callable[[StreamItem], tuple[str, dict[str, Any]]]

    def request(self, item: StreamItem) -> bytes:
        """Return the HTTP request for an item."""
        return post_request(*self.call(item))

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[int]:
        """Start the service, wait until it is ready, and stop it at the end of `with`.

        Args:
            folder: folder for the log and BentoML's files.

        Yields:
            Port of the service.
        """
        folder.mkdir(parents=True, exist_ok=True)
        port, log_file = _free_port(), folder / "service.log"
        command = ["-m", "bentoml", "serve", self.target, "--host", HOST, "--port", str(port)]
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("ALBERT_")
        }
        common = {
            "BENTOML_DO_NOT_TRACK": "True",
            "BENTOML_HOME": str((folder / "bentoml").absolute()),
            "PYTHONPATH": str(REPOSITORY),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env={**inherited, **common, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_until_ready(process, port, log_file)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    give_up_s = time.monotonic() + _START_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{HOST}:{port}/readyz", timeout=10) as reply,
        ):
            if reply.status == 200:
                return
        time.sleep(0.1)
    raise BenchmarkError(f"The service did not start: {last_line(log_file)}. See {log_file}.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def our_service(name: str, bundle: Path, num_threads: int) -> ServedModel:
    """Return the service of this package with one worker and default settings."""
    return ServedModel(
        name=name,
        target="albert_serve.service:AlbertServe",
        environment={
            "ALBERT_SERVE_BUNDLE": str(bundle.absolute()),
            "ALBERT_SERVE_WORKERS": "1",
            "ALBERT_SERVE_THREADS": str(num_threads),
        },
        call=lambda item: (f"/{item.task}", {"inputs": item.texts}),
    )


def peer_service(checkpoint: Path, num_threads: int) -> ServedModel:
    """Return the BentoML service of `peer.py`, which batches requests to its pipelines."""
    return ServedModel(
        name="BentoML over pipelines",
        target="benchmarks.serve.peer:Pipelines",
        environment={
            "PEER_CHECKPOINT": str(checkpoint.absolute()),
            "OMP_NUM_THREADS": str(num_threads),
        },
        call=lambda item: (_PEER_PATHS[item.task], {"texts": item.texts}),
    )
