"""The tasks of a bundle."""

from __future__ import annotations

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import Bundle, Manifest
from albert_serve.bundle.sentence_vectors import SentenceVectors
from albert_serve.tasks import TASKS, Task, TaskSetup, open_task
from albert_serve.tokenizer import AlbertTokenizer


def task_names(manifest: Manifest) -> list[str]:
    """Return the names of a bundle's tasks that have an endpoint.

    Feature extraction needs the encoder and no head, so every bundle has it and no manifest names
    it.
    """
    return [*(name for name in manifest.tasks if name in TASKS), FEATURE_EXTRACTION]


def load_setups(bundle: Bundle, tokenizer: AlbertTokenizer | None = None) -> dict[str, TaskSetup]:
    """Return the setup of each task of the bundle that has an endpoint, by name.

    Args:
        tokenizer: the bundle's, if it has been read.
    """
    tokenizer = tokenizer or AlbertTokenizer.from_file(bundle.tokenizer_file)
    entries = {str(name): entry for name, entry in bundle.manifest.tasks.items()}
    return {
        name: TaskSetup(
            tokenizer=tokenizer,
            max_positions=bundle.config.max_positions,
            hidden_size=bundle.config.hidden_size,
            entry=entries.get(name),
            sentence_vectors=bundle.manifest.sentence_vectors or SentenceVectors(),
        )
        for name in task_names(bundle.manifest)
    }


def load_tasks(bundle: Bundle, tokenizer: AlbertTokenizer | None = None) -> dict[str, Task]:
    """Return each task of the bundle that has an endpoint, by name; see `load_setups`."""
    setups = load_setups(bundle, tokenizer)
    return {name: open_task(name, setup) for name, setup in setups.items()}
