"""The services that are measured, and processes of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks.harness.service import REPOSITORY, ServiceProcess, start
from benchmarks.serving.stream import Item

Call: TypeAlias = tuple[str, dict[str, Any]]
_PEER_PATHS: Final = {"text-classification": "/classify", "fill-mask": "/fill_mask"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A service for `bentoml serve`.

    Attributes:
        target: the service, as MODULE:NAME.
        environment: its settings.
        call: the path and body that ask it for an item.
        bundle: the served bundle, for ours.
        num_workers: its processes.
    """

    name: str
    target: str
    environment: Mapping[str, str]
    call: Callable[[Item], Call]
    bundle: Path | None = None
    num_workers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSettings:
    """The settings of the pipelines' service.

    Attributes:
        max_batch_size: the most requests that BentoML gives a pipeline at once.
        pipeline_batch_size: number of those that it pads and runs together; 1 is its default.
        num_workers: processes, among which the threads are divided.
    """

    max_batch_size: int
    pipeline_batch_size: int
    num_workers: int = 1

    def __str__(self) -> str:
        workers = f", {self.num_workers} workers" if self.num_workers > 1 else ""
        return (
            f"max_batch_size {self.max_batch_size}, "
            f"pipeline batch_size {self.pipeline_batch_size}{workers}"
        )


def our_call(item: Item) -> Call:
    """Return path and body in the format of Hugging Face's clients."""
    return f"/{item.task}", {"inputs": item.text}


def our_service(name: str, bundle: Path, num_threads: int) -> Service:
    """This package's, with one worker and settings as they come."""
    settings = {"ALBERT_SERVE_BUNDLE": str(bundle.absolute()), "ALBERT_SERVE_WORKERS": "1"}
    return Service(
        name=name,
        target="albert_serve.service:AlbertServe",
        environment={**settings, "ALBERT_SERVE_THREADS": str(num_threads)},
        call=our_call,
        bundle=bundle,
    )


def peer_service(
    checkpoint: Path, tasks: Sequence[str], settings: PeerSettings, num_threads: int
) -> Service:
    """BentoML's batching over pipelines."""
    return Service(
        name="BentoML over pipelines",
        target="benchmarks.serving.peer:Pipelines",
        environment={
            "PEER_CHECKPOINT": str(checkpoint.absolute()),
            "PEER_TASKS": ",".join(tasks),
            "PEER_MAX_BATCH_SIZE": str(settings.max_batch_size),
            "PEER_PIPELINE_BATCH_SIZE": str(settings.pipeline_batch_size),
            "PEER_WORKERS": str(settings.num_workers),
            "OMP_NUM_THREADS": str(max(1, num_threads // settings.num_workers)),
        },
        call=lambda item: (_PEER_PATHS[item.task], {"texts": [item.text]}),
        num_workers=settings.num_workers,
    )


def running(service: Service, folder: Path) -> AbstractContextManager[ServiceProcess]:
    """A process of the service, ready; it is stopped afterwards.

    Args:
        folder: takes its log and BentoML's files.

    Raises:
        BenchmarkError: it did not start.
    """
    command = ["-m", "bentoml", "serve", service.target]
    return start(command, folder, _environment(service, folder))


def _environment(service: Service, folder: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ALBERT_SERVE_")}
    common = {
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOME": str((folder / "bentoml").absolute()),
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return {**kept, **common, **service.environment}
