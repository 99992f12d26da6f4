"""The tasks of a bundle."""

from __future__ import annotations

from albert_serve.bundle.manifest import Bundle, TaskEntry
from albert_serve.tasks import TASKS, AnyTask, TaskSetup, open_task
from albert_serve.tokenizer import AlbertTokenizer


def load_setups(bundle: Bundle, tokenizer: AlbertTokenizer | None = None) -> dict[str, TaskSetup]:
    """Return the setup of each task of the bundle that has an endpoint, by name.

    Args:
        tokenizer: the bundle's, if it has been read.

    Raises:
        BundleError: the bundle's tokenizer cannot be read.
    """
    tokenizer = tokenizer or AlbertTokenizer.from_file(bundle.tokenizer_file)
    return {
        name: TaskSetup(
            tokenizer=tokenizer,
            max_positions=bundle.config.max_positions,
            labels=_labels(entry),
            problem_type=entry.problem_type,
            null_score_diff_threshold=entry.null_score_diff_threshold or 0.0,
        )
        for name, entry in bundle.manifest.tasks.items()
        if name in TASKS
    }


def load_tasks(bundle: Bundle, tokenizer: AlbertTokenizer | None = None) -> dict[str, AnyTask]:
    """Return each task of the bundle that has an endpoint, by name.

    Args:
        tokenizer: the bundle's, if it has been read.

    Raises:
        BundleError: the bundle's tokenizer cannot be read.
    """
    setups = load_setups(bundle, tokenizer)
    return {name: open_task(name, setup) for name, setup in setups.items()}


def _labels(entry: TaskEntry) -> list[str]:
    return entry.labels or [f"LABEL_{index}" for index in range(entry.num_outputs)]
