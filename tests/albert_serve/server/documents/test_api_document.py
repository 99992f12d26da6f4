"""The API document is true: schemathesis asks what it allows and what it forbids.

It checks statuses, content types and bodies against the document, that what the document forbids is
refused, that methods which it lacks are 405, and that keys are asked for where it says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.albert_serve.support import Running, running_service, service_environment

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
KEY = "a-key-for-schemathesis"
SEED = "1"


@pytest.fixture(scope="module")
def guarded(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("guarded")
    environment = {
        **service_environment(bundle_dir, home),
        "ALBERT_SERVE_API_KEYS": KEY,
        "ALBERT_SERVE_GUARD": "api,metrics",
    }
    with running_service(environment, home) as started:
        yield started


@pytest.mark.extended
def test_the_document_is_true(guarded: Running, tmp_path: Path) -> None:
    header = f"Authorization: Bearer {KEY}"
    options = ["--phases", "examples,fuzzing", "--max-examples", "15", "--header", header]
    examine(guarded, tmp_path, *options)


@pytest.mark.slow
def test_the_document_is_true_where_no_key_is_needed(service: Running, tmp_path: Path) -> None:
    examine(service, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200")


def examine(running: Running, folder: Path, *options: str) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION)),
            *("run", f"{running.url}/docs.json", "--checks", "all", "--seed", SEED),
            *("--continue-on-failure", "--no-color", *options),
        ],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, shortened(ended.stdout + ended.stderr)
    assert "Traceback" not in running.log


def shortened(output: str) -> str:
    """The output with its lines cut: a request in it may have a million characters."""
    return "\n".join(line[:300] for line in output.splitlines())
