"""Damages of a checkpoint, and what is found of a run's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from training.loop.checkpointing import find_damage, step_of

Damage = Callable[[Path], object]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def linked_step(folder: Path) -> int:
    """The step of the checkpoint that the link is to, which is whole."""
    link = folder / "checkpoint"
    assert link.is_symlink()
    assert find_damage(link) is None
    return step_of(link.resolve())


def flip_a_byte(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a byte": (flip_a_byte, "model.safetensors has changed since it was written"),
    "truncated": (lambda path: os.truncate(path / "state.pt", 100), "state.pt has changed since"),
    "no state": (lambda path: (path / "state.pt").unlink(), "No such file or directory"),
    "no hashes": (lambda path: (path / "hashes.json").unlink(), "No such file or directory"),
    "no hash of the state": (
        lambda path: (path / "hashes.json").write_text("{}"),
        "hashes.json does not name state.pt",
    ),
}
