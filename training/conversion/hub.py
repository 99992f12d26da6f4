"""Download from the Hugging Face Hub, with errors of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from albert_serve import hub
from albert_serve.errors import HubError
from albert_serve.hub import HubModel as HubModel
from albert_serve.hub import find_cached as find_cached
from training.model.checkpoint import CheckpointError


def download(model: HubModel, patterns: Sequence[str]) -> Path:
    """As `albert_serve.hub.download`, but raises a CheckpointError."""
    with _checkpoint_errors():
        return hub.download(model, patterns)


def check_reachable(model: HubModel, lacking: str) -> None:
    """As `albert_serve.hub.check_reachable`, but raises a CheckpointError."""
    with _checkpoint_errors():
        hub.check_reachable(model, lacking)


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    try:
        yield
    except HubError as error:
        raise CheckpointError(str(error)) from error
