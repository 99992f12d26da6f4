"""Serving imports no training stack, and the client nothing but httpx and pydantic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import albert_serve

pytestmark = pytest.mark.process

PACKAGE = Path(albert_serve.__file__).parent
MODULES = sorted(
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    for file in PACKAGE.rglob("*.py")
    if file.name not in ("__init__.py", "__main__.py")
)
TRAINING_STACK = {
    "torch",
    "onnx",
    "transformers",
    "sentencepiece",
    "safetensors",
    "training",
    "export",
}
SERVING_STACK = {"numpy", "tokenizers", "onnxruntime", "bentoml"}


def imported_by(*modules: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after importing these modules."""
    code = (
        f"import sys, json; import {', '.join(modules)}; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_no_module_imports_the_training_stack() -> None:
    assert {"albert_serve.bundle.manifest", "albert_serve.config"} <= set(MODULES)
    assert not imported_by(*MODULES) & TRAINING_STACK


@pytest.mark.parametrize("module", ["client", "errors", "config", "api.schemas", "bundle.manifest"])
def test_the_sdk_needs_no_serving_stack(module: str) -> None:
    assert not imported_by(f"albert_serve.{module}") & (SERVING_STACK | TRAINING_STACK)


def test_serving_and_the_command_line_need_no_pyarrow() -> None:
    assert "pyarrow" not in imported_by("albert_serve.cli", "albert_serve.server.handlers")
