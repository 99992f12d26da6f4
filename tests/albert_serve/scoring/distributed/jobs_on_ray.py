"""Commands that score on a Ray cluster, and the cluster's environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from albert_serve.settings import CACHE_VARIABLE
from tests.albert_serve.support import ROOT


def set_environment(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Set what a cluster that is started by this process has its actors run in."""
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_worker_niceness", "0")  # else what runs beside it has all of the CPU
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv(CACHE_VARIABLE, str(cache))


def start_job(
    address: str, bundle_dir: Path, source: Path, output: Path, *options: str
) -> subprocess.Popen[str]:
    """Start a job of text classification on two actors, in parts of 16 rows."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "albert_serve", "score", "--task", "text-classification"),
            *("--engine", "ray", "--workers", "2", "--threads", "1", "--part-rows", "16"),
            *("--bundle", str(bundle_dir), *options, str(source), str(output)),
        ],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_parts(job: subprocess.Popen[str], output: Path) -> None:
    """Wait until a job has written some of its parts, or has ended."""
    log = output.with_name(f"{output.name}.parts") / "_parts.jsonl"
    while job.poll() is None and not (log.exists() and log.stat().st_size > 2000):
        time.sleep(0.01)
