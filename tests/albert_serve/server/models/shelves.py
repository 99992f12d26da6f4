"""Folders of bundles: replaced, damaged, and hosted in this process or by a service."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from albert_serve.server.metrics import Metrics
from albert_serve.server.models.registry import Models
from albert_serve.settings import Settings
from tests.albert_serve.support import Running

REQUEST = {"inputs": "The [MASK] run.", "parameters": {"top_k": 3}}


def put(bundle: Path, place: Path) -> None:
    """A bundle in place of another: who has the old files open keeps them."""
    staging = place.with_name(f".{place.name}-new")
    shutil.copytree(bundle, staging)
    shutil.move(place, place.with_name(f".{place.name}-{time.monotonic_ns()}"))
    staging.rename(place)


def wait_for(condition: Callable[[], object], running: Running) -> None:
    give_up_s = time.monotonic() + 30
    while not condition():
        lines = [line for line in running.log.splitlines() if " 200 " not in line]
        assert time.monotonic() < give_up_s, "\n".join(lines)
        time.sleep(0.1)


def load(settings: Settings) -> Models:
    return Models.load(settings, Metrics(CollectorRegistry()))


def settings_of(models: Path) -> Settings:
    variables = {"ALBERT_SERVE_MODELS": str(models), "ALBERT_SERVE_THREADS": "1"}
    return Settings.from_environment(variables)


def reloaded(models: Models) -> None:
    """Put on an event loop, with whatever is to be reloaded there by then."""

    async def run() -> None:
        models.start()
        await models.reload()
        await models.close()

    asyncio.run(run())


def damage(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\xff")


def truncate(folder: Path) -> None:
    os.truncate(folder / "encoder.onnx", 100)
