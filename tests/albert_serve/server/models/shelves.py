"""Folders of bundles: damaged, and hosted in this process or by a service."""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import CollectorRegistry

from albert_serve.server.metrics import Metrics
from albert_serve.server.models.registry import Models
from albert_serve.settings import Settings

REQUEST = {"inputs": "The [MASK] run.", "parameters": {"top_k": 3}}


def load(settings: Settings) -> Models:
    return Models.load(settings, Metrics(CollectorRegistry()))


def settings_of(models: Path) -> Settings:
    variables = {"ALBERT_SERVE_MODELS": str(models), "ALBERT_SERVE_THREADS": "1"}
    return Settings.from_environment(variables)


def damage(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\xff")


def truncate(folder: Path) -> None:
    os.truncate(folder / "encoder.onnx", 100)
