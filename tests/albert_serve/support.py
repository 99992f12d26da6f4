"""Helpers: a service process, bundles with a fault, and an engine in torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import file_entry
from albert_serve.local import LocalTransport
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import EncoderInput, Logits, Prepared
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "albert_serve.service:AlbertServe"
WORKER = "_bentoml_impl.worker.service"
MAX_BODY_BYTES = 60_000
MAX_ITEMS = 32
START_TIMEOUT_S = 90.0
NUM_CALLERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A service process and its URL."""

    process: subprocess.Popen[bytes]
    url: str
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


def run_module(*arguments: str, cwd: Path, environment: dict[str, str]) -> str:
    """Run a module with arguments, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def service_environment(bundle_dir: Path, home: Path) -> dict[str, str]:
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


def before_each_program(folder: Path, code: str) -> dict[str, str]:
    """Variables that make Python run code before a program and its child processes."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@contextlib.contextmanager
def local_http(bundle_dir: Path) -> Iterator[httpx.Client]:
    """A client of the service's routes over a bundle, in this process."""
    transport = LocalTransport(bundle_dir, RuntimeOptions(device="cpu", num_threads=1))
    with httpx.Client(transport=transport, base_url="http://local") as client:
        yield client


@contextlib.contextmanager
def running_service(
    environment: dict[str, str],
    folder: Path,
    command: tuple[str, ...] = ("bentoml", "serve", SERVICE),
    python: str | Path = sys.executable,
) -> Iterator[Running]:
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
    running = Running(process=process, url=f"http://127.0.0.1:{port}", log_file=log_file)
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
    command: tuple[str, ...] = ("bentoml", "serve", SERVICE),
    **settings: str,
) -> Iterator[Running]:
    """Serve a bundle from a folder; settings have their names without `ALBERT_SERVE_`."""
    variables = {f"ALBERT_SERVE_{name}": value for name, value in settings.items()}
    environment = service_environment(bundle_dir, folder / "home") | variables
    with running_service(environment, folder, command) as running:
        yield running


def wait_until_ready(running: Running) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_s:
        if running.process.poll() is not None:
            pytest.fail(f"the service ended with {running.process.returncode}:\n{running.log}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{running.url}/readyz").status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail(f"the service was not ready within {START_TIMEOUT_S} s:\n{running.log}")


def wait_until_started(service: Running, num_workers: int) -> None:
    """The first that is ready answers for all."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while service.log.count("Completed async startup hook") < num_workers:
        assert time.monotonic() < give_up_s, service.log
        time.sleep(0.1)


def wait_until_logged(running: Running, text: str) -> None:
    """A request's line is written when its reply has been sent."""
    give_up_s = time.monotonic() + 20
    while text not in running.log:
        assert time.monotonic() < give_up_s, f"{text} is not in the log"
        time.sleep(0.01)


@contextlib.contextmanager
def under_load(running: Running) -> Iterator[Counter[object]]:
    """Keep four callers busy; yields the counts of their replies by status or error."""
    seen: Counter[object] = Counter()
    is_over = threading.Event()
    body = {"inputs": "The [MASK] run."}

    def ask() -> None:
        with httpx.Client(base_url=running.url, timeout=30) as client:
            while not is_over.is_set():
                try:
                    seen[client.post("/fill-mask", json=body).status_code] += 1
                except httpx.TransportError as error:
                    seen[type(error)] += 1

    callers = [threading.Thread(target=ask) for _ in range(NUM_CALLERS)]
    for caller in callers:
        caller.start()
    try:
        yield seen
    finally:
        is_over.set()
        for caller in callers:
            caller.join()


def workers_of(running: Running) -> list[int]:
    """The processes that answer, from Linux' /proc."""
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    return [
        int(pid)
        for pid in children.read_text().split()
        if WORKER in Path(f"/proc/{pid}/cmdline").read_text()
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def copy_with(bundle_dir: Path, folder: Path, name: str, content: bytes) -> Path:
    """A copy of a bundle with one file replaced, and the manifest's hash made to fit."""
    shutil.copytree(bundle_dir, folder)
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = file_entry(folder / name).model_dump()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


class TorchEngine:
    """Runs inputs separately and unpadded, as the reference of other engines."""

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
