"""Pieces that a machine sent back as a run's folder, or as a checkpoint alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.bare_machine.manifest import BareMachineError, Group, Manifest, Piece
from scripts.bare_machine.options import describe_range
from scripts.bare_machine.pieces import Found, assemble, find_pieces
from scripts.bare_machine.run_folder import (
    CHECKPOINTS,
    HASHES,
    LINK,
    RUN_FILE,
    RUN_FILES,
    is_same_run,
    newest_checkpoint,
    step_name,
    step_of,
)

_MODEL: Final = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Return:
    """A checkpoint that came back, and the pieces there are.

    Attributes:
        foreign: files of pieces that are of other checkpoints.
    """

    manifest: Manifest
    found: Found
    foreign: tuple[Path, ...]

    @property
    def step(self) -> int:
        """Steps of the run that were done."""
        step: int = self.manifest.about["step"]
        return step

    @classmethod
    def find(cls, paths: Sequence[Path], step: int | None = None) -> Return:
        """Look for pieces and their manifest in files and folders.

        Args:
            step: which checkpoint; the newest by default.

        Raises:
            BareMachineError: there is no manifest, it is damaged, or there are two different ones.
            OSError: a file cannot be read.
        """
        files = sorted(file for path in paths for file in _files(path))
        manifests = [Manifest.read(file) for file in files if _is_manifest(file)]
        steps = sorted({manifest.about["step"] for manifest in manifests})
        if not steps or (step is not None and step not in steps):
            there = ", ".join(f"{step_name(each)}.json" for each in steps) or "no step-*.json"
            raise BareMachineError(f"the manifest is missing: there is {there}; fetch it, too")
        chosen = steps[-1] if step is None else step
        same = {m.sha256: m for m in manifests if m.about["step"] == chosen}
        if len(same) > 1:
            raise BareMachineError(
                f"there are two different manifests of step {chosen:,}; join each one's pieces "
                "for itself"
            )
        (manifest,) = same.values()
        found = find_pieces(files)
        ours = {piece.sha256 for piece in manifest.pieces}
        foreign = tuple(file for sha256, file in found.whole.items() if sha256 not in ours)
        return cls(manifest=manifest, found=found, foreign=foreign)

    def check(self, groups: Sequence[Group]) -> None:
        """See that all pieces of the groups are here.

        Raises:
            BareMachineError: some are not, or are damaged; it says which, and how to get them.
        """
        pieces = [piece for group in groups for piece in group.pieces]
        absent = [piece for piece in pieces if piece.sha256 not in self.found.whole]
        if not absent:
            return
        damaged = {file.name for file in self.found.damaged}
        words = [
            f"{each.name} ({'damaged' if each.name in damaged else 'missing'})" for each in absent
        ]
        again = " and ".join(describe_range(numbers) for numbers in _ranges(absent))
        raise BareMachineError(
            f"step {self.step:,} is not whole: of {len(pieces)} pieces {len(absent)} are not here: "
            f"{', '.join(words)}. On the machine: python3 run.py send {again} --step {self.step}"
        )


def join_run(returned: Return, output: Path) -> Path:
    """Make a run's folder, or bring one up to date; returns its checkpoint's folder.

    Raises:
        BareMachineError: pieces are missing or damaged, or the folder holds another run, or a
            later checkpoint.
        OSError: it cannot be written; what it holds stays as it is.
    """
    returned.check(returned.manifest.groups)
    with _put_together(returned.manifest.groups, returned.found, output) as made:
        if (output / RUN_FILE).is_file() and not is_same_run(output, made):
            raise BareMachineError(f"{output} holds another run; give another --output")
        ours = newest_checkpoint(output)
        if ours is not None and step_of(ours) > returned.step:
            raise BareMachineError(
                f"{output} is at step {step_of(ours):,} already, which is after {returned.step:,}; "
                "give another --output"
            )
        return _put_in_place(made, output, step_name(returned.step))


def join_model(returned: Return, output: Path) -> None:
    """Make a checkpoint's folder of the weights alone; training cannot go on from it exactly.

    Raises:
        BareMachineError: pieces are missing or damaged, or the folder is there already.
        OSError: it cannot be written.
    """
    if output.exists():
        raise BareMachineError(f"{output} is there already; give another --output")
    group = returned.manifest.group(_MODEL)
    returned.check([group])
    with _put_together([group], returned.found, output) as made:
        checkpoint = made / CHECKPOINTS / step_name(returned.step)
        (checkpoint / HASHES).unlink()  # they are of the state, too
        _sync(checkpoint)
        os.replace(checkpoint, output)


@contextmanager
def _put_together(groups: Sequence[Group], found: Found, output: Path) -> Iterator[Path]:
    """Inside `with`, a folder beside the output that has all files."""
    output.parent.mkdir(parents=True, exist_ok=True)
    made = output.with_name(output.name + ".partial")
    shutil.rmtree(made, ignore_errors=True)
    try:
        for group in groups:
            assemble(group, found.whole, made)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put_in_place(made: Path, output: Path, step: str) -> Path:
    final = output / CHECKPOINTS / step
    final.parent.mkdir(parents=True, exist_ok=True)
    _sync(made / CHECKPOINTS / step)
    for name in RUN_FILES:
        if (made / name).is_file():
            os.replace(made / name, output / name)
    if final.is_dir():
        # `training.saving` removes what is left of it.
        os.replace(final, final.with_name(f"{step}.old.partial"))
    os.replace(made / CHECKPOINTS / step, final)
    shutil.rmtree(final.with_name(f"{step}.old.partial"), ignore_errors=True)
    fresh = output / f"{LINK}.partial"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(Path(CHECKPOINTS, step), target_is_directory=True)
    os.replace(fresh, output / LINK)
    return final


def _files(path: Path) -> Iterator[Path]:
    """A file, or all in a folder.

    Raises:
        BareMachineError: there is no such path.
    """
    if path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file())
    elif path.is_file():
        yield path
    else:
        raise BareMachineError(f"{path} is not there")


def _is_manifest(file: Path) -> bool:
    return file.suffix == ".json" and file.name.startswith("step-")


def _ranges(pieces: Sequence[Piece]) -> list[range]:
    """The numbers of pieces as ranges."""
    ranges: list[range] = []
    for piece in pieces:
        if ranges and ranges[-1].stop == piece.number:
            ranges[-1] = range(ranges[-1].start, piece.number + 1)
        else:
            ranges.append(range(piece.number, piece.number + 1))
    return ranges


def _sync(folder: Path) -> None:
    """Put the files of a folder on the disk."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
