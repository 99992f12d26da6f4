"""A stage: what was sent to a machine so far, and what came of it there.

It has the layout of a load, `run.py`, `scripts/`, `manifest.json` and `pieces/`, so that a load
can be its own stage; the pieces of all loads gather in it. Beside them are `jobs/` with the files
that the pieces make, `run/`, which is the run's folder, and `returns/` with the checkpoints that
were sent back, as they were then.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from scripts.bare_machine.manifest import BareMachineError, Manifest, Piece
from scripts.bare_machine.pieces import (
    PIECE_BYTES,
    Found,
    assemble,
    cut,
    find_pieces,
    naming,
)
from scripts.bare_machine.run_folder import (
    CHECKPOINTS,
    RUN_FILE,
    is_same_run,
    newest_checkpoint,
    sources,
    step_name,
    step_of,
)

MANIFEST: Final = "manifest.json"
PIECES: Final = "pieces"
LAUNCHER: Final = "run.py"
_PROGRAM: Final = "scripts"
_ABOUT: Final = "return.json"
_NUM_RETURNS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The folder of a stage."""

    folder: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def take_in(self, load: Path) -> None:
        """Keep what a load brings.

        Raises:
            BareMachineError: its manifest or a piece is damaged; pieces that are not are kept.
            OSError: the stage cannot be written.
        """
        if load.resolve() == self.folder.resolve():
            return
        Manifest.read(load / MANIFEST)
        known, brought = _pieces_in(self.folder), _pieces_in(load)
        for sha256, file in brought.whole.items():
            if sha256 not in known.whole:
                _copy(file, self.folder / PIECES / file.name)
        for file in (load / LAUNCHER, *sorted((load / _PROGRAM).rglob("*.py")), load / MANIFEST):
            _copy(file, self.folder / file.relative_to(load))
        if brought.damaged:
            names = ", ".join(file.name for file in brought.damaged)
            raise BareMachineError(f"damaged on the way: {names}; send {load.name} again")

    def manifest(self) -> Manifest:
        """That of the job that came last.

        Raises:
            BareMachineError: there is none, or it is damaged.
        """
        if not (self.folder / MANIFEST).is_file():
            raise BareMachineError(f"{self.folder} holds no job; send its loads, with --stage")
        return Manifest.read(self.folder / MANIFEST)

    @property
    def job(self) -> Path:
        """The folder of the files of the job that came last."""
        return self.folder / "jobs" / self.manifest().sha256[:12]

    def unpack(self) -> list[Piece]:
        """Put together the groups of files whose pieces are all here.

        Returns the pieces that are not here, or not whole.

        Raises:
            BareMachineError: there is no job, or a file is not what its manifest says.
            OSError: the stage cannot be written.
        """
        found = _pieces_in(self.folder)
        missing: list[Piece] = []
        for group in self.manifest().groups:
            lacking = [piece for piece in group.pieces if piece.sha256 not in found.whole]
            missing += lacking
            if not lacking:
                assemble(group, found.whole, self.job)
        return missing

    def begin_from(self, brought: Path) -> None:
        """Make the run that a job brings this stage's, unless this stage's is as far.

        Raises:
            BareMachineError: the stage holds another run.
        """
        theirs, ours = newest_checkpoint(brought), newest_checkpoint(self.run)
        if theirs is None:
            return
        if (self.run / RUN_FILE).is_file() and not is_same_run(self.run, brought):
            raise BareMachineError(f"{self.run} holds another run; give another --stage")
        if ours is not None and step_of(ours) >= step_of(theirs):
            return
        for source in sources(brought, theirs):
            for path, file in source.files.items():
                # Until the last file is there, the hashes say that it is not whole.
                _copy(file, self.run / path)

    @contextmanager
    def lock(self) -> Iterator[IO[str]]:
        """Inside `with`, no other training in this stage; whoever holds the file open has it.

        Raises:
            BareMachineError: another one goes on.
        """
        with (self.folder / "lock").open("a+") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                stream.seek(0)
                raise BareMachineError(
                    f"process {stream.read().strip()} still trains in {self.folder}; "
                    "wait for it, or end it with kill"
                ) from error
            stream.truncate(0)
            yield stream

    def freeze(self, about: Mapping[str, Any], *, piece_bytes: int) -> Path | None:
        """Keep the newest checkpoint and the run's figures as they are, to be sent in pieces.

        Args:
            about: what else their manifest says.
            piece_bytes: the most that a piece will have.

        Returns their folder; None where there is no checkpoint.
        """
        checkpoint = newest_checkpoint(self.run)
        if checkpoint is None:
            return None
        final = self._returns / checkpoint.name
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        for source in sources(self.run, checkpoint):
            for path, file in source.files.items():
                _keep(file, partial / path)
        step = step_of(checkpoint)
        facts = {"kind": "return", "step": step, "piece_bytes": piece_bytes, **about}
        (partial / _ABOUT).write_text(json.dumps(facts))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in self._kept()[_NUM_RETURNS:]:
            shutil.rmtree(old)
        return final

    def catch_up(self) -> None:
        """Freeze the newest checkpoint, if a call that was killed left one that is not.

        Raises:
            BareMachineError: training goes on.
        """
        newest, kept = newest_checkpoint(self.run), self._kept()
        if newest is None or (kept and step_of(kept[0]) >= step_of(newest)):
            return
        known = json.loads((kept[0] / _ABOUT).read_bytes()) if kept else {}
        with self.lock():
            self.freeze({"is_done": False}, piece_bytes=known.get("piece_bytes", PIECE_BYTES))

    def send(self, out: Path, numbers: Container[int], *, step: int | None = None) -> Manifest:
        """Write pieces of a checkpoint that was frozen, and the manifest of all.

        Args:
            out: the folder for them.
            numbers: of the pieces that are written.
            step: which checkpoint; the newest by default.

        Raises:
            BareMachineError: there is no such checkpoint.
            OSError: a file cannot be written; pieces that have their names are whole.
        """
        kept = self._kept()
        chosen = kept[:1] if step is None else [f for f in kept if f.name == step_name(step)]
        if not chosen:
            there = ", ".join(folder.name for folder in kept) or "none"
            raise BareMachineError(f"{self._returns} has no such checkpoint; there is {there}")
        (folder,) = chosen
        about = json.loads((folder / _ABOUT).read_bytes())
        parts = sources(folder, folder / CHECKPOINTS / folder.name)
        groups = cut(parts, out, piece_bytes=about["piece_bytes"], wanted=numbers)
        manifest = Manifest(about=about, groups=groups)
        write_whole(out / f"{folder.name}.json", manifest.to_json())
        return manifest

    @property
    def _returns(self) -> Path:
        return self.folder / "returns"

    def _kept(self) -> list[Path]:
        """Checkpoints that were frozen, the newest first."""
        found = [path for path in self._returns.glob("step-*") if (path / _ABOUT).is_file()]
        return sorted((p for p in found if p.suffix != ".partial"), key=step_of, reverse=True)


def describe_missing(manifest: Manifest, missing: Sequence[Piece]) -> str:
    """Which loads of a job are still to be sent."""
    numbers = {piece.number for piece in missing}
    loads = [
        f"load-{place}"
        for place, (begin, end) in enumerate(manifest.about["loads"], start=1)
        if numbers & set(range(begin, end))
    ]
    return (
        f"{len(missing)} of {len(manifest.pieces)} pieces are not here or damaged; "
        f"send {', '.join(loads)}"
    )


def _pieces_in(folder: Path) -> Found:
    return find_pieces(sorted((folder / PIECES).glob("*.piece")))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    try:
        with naming(partial):
            shutil.copyfile(source, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _keep(file: Path, target: Path) -> None:
    """A second name for a file of a checkpoint, which is never changed; a copy of any other."""
    if file.parent.parent.name == CHECKPOINTS:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Some file systems have no second names.
        with suppress(OSError):
            os.link(file, target)
            return
    _copy(file, target)


def write_whole(file: Path, content: bytes) -> None:
    """Write a small file so that a reader sees it whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    with naming(partial):
        partial.write_bytes(content)
    os.replace(partial, file)
