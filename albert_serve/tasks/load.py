"""The tasks of a bundle."""

from __future__ import annotations

from albert_serve.bundle import Bundle, TaskEntry
from albert_serve.tasks import TASKS, AnyTask, TaskSetup, open_task
from albert_serve.tokenizer import AlbertTokenizer


def load_setups(bundle: Bundle) -> dict[str, TaskSetup]:
    """What each task of the bundle that has an endpoint needs to know of the model, by name.

    Raises:
        BundleError: the bundle's tokenizer cannot be read.
    """
    tokenizer = AlbertTokenizer.from_file(bundle.tokenizer_file)
    return {
        name: TaskSetup(
            tokenizer=tokenizer,
            max_positions=bundle.config.max_positions,
            labels=_labels(entry),
            problem_type=entry.problem_type,
        )
        for name, entry in bundle.manifest.tasks.items()
        if name in TASKS
    }


def load_tasks(bundle: Bundle) -> dict[str, AnyTask]:
    """Each task of the bundle that has an endpoint, by name.

    Raises:
        BundleError: the bundle's tokenizer cannot be read.
    """
    return {name: open_task(name, setup) for name, setup in load_setups(bundle).items()}


def _labels(entry: TaskEntry) -> list[str]:
    return entry.labels or [f"LABEL_{index}" for index in range(entry.num_outputs)]
