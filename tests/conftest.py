"""Marks whole files and folders of tests; a single test has the mark itself.

`process`: they start processes, browsers or compilers, train, or take longest of the others;
`make test-fast` has no such.
`gpu`: they run on CUDA as well, by `make test-gpu`; without a GPU they are skipped.
`extended`: `make test` has the main case of the same, or it is rarely changed; CI runs both.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import pytest

from tests.devices import skip_without_gpu

_TESTS: Final = Path(__file__).parent
_WITH_PROCESSES: Final = (
    "albert_serve/bundle/test_download.py",
    "albert_serve/bundle/test_store.py",
    "albert_serve/client",
    "albert_serve/doctor",
    "albert_serve/runtime/test_prepacking.py",
    "albert_serve/scoring/distributed",
    "albert_serve/scoring/test_job.py",
    "albert_serve/scoring/test_killed.py",
    "albert_serve/scoring/test_remote.py",
    "albert_serve/server",
    "albert_serve/test_cli.py",
    "albert_serve/test_imports.py",
    "albert_serve/web",
    "benchmarks",
    "export/test_classifiers.py",
    "export/test_encoder.py",
    "export/test_layers.py",
    "export/test_precision.py",
    "export/test_quality.py",
    "export/test_verify.py",
    "export/test_bundle.py",
    "test_shipped_model.py",
    "training/conversion/test_commands.py",
    "training/conversion/test_hub.py",
    "training/data/test_mask_rate.py",
    "training/data/test_masking.py",
    "training/data/test_packed_rows.py",
    "training/distillation",
    "training/evaluation",
    "training/finetuning",
    "training/glue/test_hub.py",
    "training/loop",
    "training/model/test_checkpoint.py",
    "training/model/test_model_training.py",
    "training/optim/test_lamb.py",
    "training/test_evaluate.py",
    "training/test_losses.py",
    "training/test_plot.py",
    "training/test_prepare.py",
    "training/test_prepare_stopped.py",
    "training/test_pretrain.py",
    "recipes",
    "training/test_requirements.py",
    "training/test_vocab.py",
)
_EXTENDED: Final = (
    "albert_serve/scoring/distributed/test_ray.py",
    "albert_serve/scoring/distributed/test_spark.py",
    "benchmarks",
)
_MARKED: Final = {"process": _WITH_PROCESSES, "extended": _EXTENDED}


def pytest_configure() -> None:
    """Take interrupts, which tests send: programs that a shell starts in the background do not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what is left out: its imports take longer than many tests."""
    expression = config.getoption("markexpr")
    is_left_out = any(f"not {mark}" in expression for mark in _marks(collection_path))
    return True if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in the files and folders above."""
    assert all((_TESTS / name).exists() for names in _MARKED.values() for name in names)
    for item in items:
        for mark in _marks(item.path):
            item.add_marker(mark)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    skip_without_gpu(item)


def _marks(path: Path) -> list[str]:
    return [
        mark
        for mark, names in _MARKED.items()
        if any(path.is_relative_to(_TESTS / name) for name in names)
    ]
