"""Marks tests that start processes, browsers or compilers; `make test-fast` leaves them out.

A single test that takes seconds has the mark itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

_TESTS: Final = Path(__file__).parent
_WITH_PROCESSES: Final = (
    "albert_serve/bundle/test_download.py",
    "albert_serve/bundle/test_store.py",
    "albert_serve/client",
    "albert_serve/doctor",
    "albert_serve/runtime/test_runtime.py",
    "albert_serve/scoring/distributed/test_ray.py",
    "albert_serve/scoring/distributed/test_spark.py",
    "albert_serve/scoring/test_killed.py",
    "albert_serve/server",
    "albert_serve/test_cli.py",
    "albert_serve/test_imports.py",
    "albert_serve/web",
    "benchmarks",
    "training/conversion/test_hub.py",
    "training/data/test_packed_rows.py",
    "training/distillation/test_distil.py",
    "training/distillation/test_pseudo_labels.py",
    "training/evaluation",
    "training/loop",
    "training/model/test_model_training.py",
    "training/optim/test_lamb.py",
    "training/glue/test_hub.py",
    "training/test_evaluate.py",
    "training/test_evaluate_files.py",
    "training/test_finetune.py",
    "training/test_finetune_choices.py",
    "training/test_finetune_heads.py",
    "training/test_finetune_tasks.py",
    "training/test_losses.py",
    "training/test_own_tasks.py",
    "training/test_plot.py",
    "training/test_prepare_stopped.py",
    "training/test_pretrain.py",
    "training/test_requirements.py",
    "training/test_seeds.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what `make test-fast` leaves out: its imports take longer than many tests."""
    is_left_out = "not process" in config.getoption("markexpr") and _has_processes(collection_path)
    return True if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in the files and folders above."""
    assert all((_TESTS / name).exists() for name in _WITH_PROCESSES)
    for item in items:
        if _has_processes(item.path):
            item.add_marker("process")


def _has_processes(path: Path) -> bool:
    return any(path.is_relative_to(_TESTS / name) for name in _WITH_PROCESSES)
