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


def put(name: str, content: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).write_text(content)


def take(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a byte": (flip_a_byte, "model.safetensors has changed since it was written"),
    "truncated": (lambda path: os.truncate(path / "state.pt", 100), "state.pt has changed since"),
    "no state": (take("state.pt"), "No such file or directory"),
    "no hashes": (take("hashes.json"), "No such file or directory"),
    "half the hashes": (put("hashes.json", '{"state.pt": "12'), "Unterminated string"),
    "hashes of nothing": (put("hashes.json", "{}"), "hashes.json does not name state.pt"),
    "other hashes": (put("hashes.json", "[]"), "has no attribute 'items'"),
}
