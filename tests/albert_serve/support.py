"""Helpers: service processes, and an engine in torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.local import LocalTransport
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import EncoderInput, Logits, Prepared
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "albert_serve.service:AlbertServe"
SERVE_COMMAND = ("bentoml", "serve", SERVICE)
WORKER = "_bentoml_impl.worker.service"
MAX_BODY_BYTES = 60_000
MAX_ITEMS = 32
START_TIMEOUT_S = 90.0
NUM_CALLERS = 4
# An item that each task can answer.
ITEMS: Final[dict[str, Any]] = {
    "fill-mask": "a [MASK]",
    "text-classification": "a",
    "question-answering": {"question": "Who?", "context": "a b c"},
    "sentence-order": {"sentences": ["a", "b", "c"]},
    "token-classification": "a",
    "feature-extraction": "a",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningService:
    """A service process and its URL."""

    process: subprocess.Popen[bytes]
    url: str
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


def run_module(*arguments: str, cwd: Path, environment: dict[str, str]) -> str:
    """Run a module with arguments, and return its output."""
    process = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def service_environment(bundle_dir: Path, home: Path) -> dict[str, str]:
    """Return the environment variables of a service with one bundle."""
    return {
        **os.environ,
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "ALBERT_SERVE_BUNDLE": str(bundle_dir),
        "ALBERT_SERVE_THREADS": "1",
        "ALBERT_SERVE_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
        "ALBERT_SERVE_MAX_ITEMS": str(MAX_ITEMS),
    }


@contextlib.contextmanager
def local_client(bundle_dir: Path) -> Iterator[httpx.Client]:
    """Open an HTTP client of the service's routes in this process."""
    transport = LocalTransport(bundle_dir, RuntimeOptions(device="cpu", num_threads=1))
    with httpx.Client(transport=transport, base_url="http://local") as client:
        yield client


@contextlib.contextmanager
def running_service(
    environment: dict[str, str],
    folder: Path,
    command: tuple[str, ...] = SERVE_COMMAND,
    python: str | Path = sys.executable,
) -> Iterator[RunningService]:
    """Start `python -m COMMAND` in `folder`, wait until it is ready, and end it afterwards."""
    port = free_port()
    log_file = folder / "log.txt"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", *command, "--port", str(port), "--host", "127.0.0.1"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    running = RunningService(process=process, url=f"http://127.0.0.1:{port}", log_file=log_file)
    try:
        wait_until_ready(running)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@contextlib.contextmanager
def served(
    bundle_dir: Path,
    folder: Path,
    command: tuple[str, ...] = SERVE_COMMAND,
    **settings: str,
) -> Iterator[RunningService]:
    """Serve a bundle from a folder. The names of settings omit `ALBERT_SERVE_`."""
    variables = {f"ALBERT_SERVE_{name}": value for name, value in settings.items()}
    environment = service_environment(bundle_dir, folder / "home") | variables
    with running_service(environment, folder, command) as running:
        yield running


def wait_until(
    is_true: Callable[[], bool], running: RunningService, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Wait until a function returns true. After the timeout, fail with the log."""
    give_up_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < give_up_s, f"timeout after {timeout_s} s:\n{running.log}"
        time.sleep(0.05)


def wait_until_ready(running: RunningService) -> None:
    """Wait until the service is ready, or fail if it ends."""

    def is_ready() -> bool:
        code = running.process.poll()
        assert code is None, f"the service ended with {code}:\n{running.log}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{running.url}/readyz").status_code == 200
        return False

    wait_until(is_ready, running)


def wait_until_started(service: RunningService, num_workers: int) -> None:
    """Wait until all workers have started. The service is ready when the first has started."""
    wait_until(lambda: service.log.count("Completed async startup hook") >= num_workers, service)


def wait_until_logged(running: RunningService, text: str) -> None:
    """Wait for a text in the log. The service logs a request after it has sent the reply."""
    wait_until(lambda: text in running.log, running, timeout_s=20)


@contextlib.contextmanager
def constant_load(running: RunningService) -> Iterator[Counter[object]]:
    """Send requests from several threads. Yields the number of replies by status or error."""
    counts: Counter[object] = Counter()
    is_over = threading.Event()
    body = {"inputs": "The [MASK] run."}

    def send() -> None:
        with httpx.Client(base_url=running.url, timeout=30) as client:
            while not is_over.is_set():
                try:
                    counts[client.post("/fill-mask", json=body).status_code] += 1
                except httpx.TransportError as error:
                    counts[type(error)] += 1

    callers = [threading.Thread(target=send) for _ in range(NUM_CALLERS)]
    for caller in callers:
        caller.start()
    try:
        yield counts
    finally:
        is_over.set()
        for caller in callers:
            caller.join()


def worker_pids(running: RunningService) -> list[int]:
    """Read the process ids of the workers from /proc."""
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    return [
        int(pid)
        for pid in children.read_text().split()
        if WORKER in Path(f"/proc/{pid}/cmdline").read_text()
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class TorchEngine:
    """The reference for other engines. It runs each input separately and without padding."""

    def __init__(self, model: AlbertForTasks, max_batch_tokens: int = 512) -> None:
        self.model = model.eval()
        self.max_batch_tokens = max_batch_tokens

    @torch.inference_mode()
    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        return [self._run_one(item) for item in inputs]

    def _run_one(self, item: EncoderInput) -> Logits:
        batch = ModelInputs(ids=torch.tensor([item.ids]), types=torch.tensor([item.types]))
        hidden = self.model(batch)[0]
        rows = hidden if item.rows is None else hidden[item.rows]
        if item.task != FEATURE_EXTRACTION:
            rows = self.model.heads[item.task](rows)
        if item.reduction == "mean":
            rows = rows.mean(0, keepdim=True)
        if item.reduction == "max":
            rows = rows.amax(0, keepdim=True)
        logits: Logits = rows.numpy().astype(np.float32)
        return logits


Answerer = Callable[[Prepared[Any]], Any]
