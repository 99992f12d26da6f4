"""A training job as folders that are sent to a machine without a network."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from scripts.bare_machine import TRAVELLING
from scripts.bare_machine.code import Code, find_code
from scripts.bare_machine.manifest import BareMachineError, Group, Manifest, Piece
from scripts.bare_machine.pieces import Source, cut
from scripts.bare_machine.run_folder import newest_checkpoint, sources
from scripts.bare_machine.selection import Selection
from scripts.bare_machine.stage import LAUNCHER, MANIFEST, PIECES

CHECKOUT: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = "training.pretrain"
_HERE: Final = Path(__file__).parent
# Those whose version decides the last digits of sums.
_VERSIONS: Final = ("torch", "numpy")
# What the list of loads adds to a manifest that was measured without it.
_ROOM_BYTES: Final = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a machine is to train.

    Attributes:
        selection: the tokenised corpus, or parts of it.
        tokenizer: folder that `training.vocab` wrote.
        options: of `training.pretrain`, less those that name a folder.
        validation: folder of held-out text's shards.
        initialize_from: a checkpoint's folder.
        resume: a run's folder.
        wheels: modules that the machine lacks.
    """

    selection: Selection
    tokenizer: Path
    options: Sequence[str]
    validation: Path | None = None
    initialize_from: Path | None = None
    resume: Path | None = None
    wheels: Sequence[Path] = ()

    def sources(self, code: Code, scratch: Path) -> Iterator[Source]:
        """The groups of files that travel.

        Args:
            scratch: a folder for what has to be made first.

        Raises:
            BareMachineError: a file or a checkpoint is not there.
        """
        files = {f"code/{file.relative_to(CHECKOUT).as_posix()}": file for file in code.files}
        files |= _files_in(self.tokenizer, "tokenizer", ("tokenizer.json", "spiece.model"))
        files |= _unzipped(self.wheels, scratch / "modules")
        yield Source(name="code", codec="zlib", files=files)
        yield Source(name="shards", codec="zlib", files=self.selection.files(scratch))
        if self.validation is not None:
            known = Selection.of(self.validation).files(scratch / "validation")
            files = {f"validation/{path.removeprefix('shards/')}": f for path, f in known.items()}
            yield Source(name="validation", codec="zlib", files=files)
        if self.initialize_from is not None:
            names = ("config.json", "model.safetensors", "training.json")
            files = _files_in(self.initialize_from, "initialize-from", names)
            yield Source(name="initialize-from", codec="stored", files=files)
        if self.resume is not None:
            yield from self._run()

    def _run(self) -> tuple[Source, Source]:
        assert self.resume is not None
        checkpoint = newest_checkpoint(self.resume)
        if checkpoint is None:
            raise BareMachineError(f"{self.resume} holds no checkpoint that is whole")
        self.selection.check_run(self.resume)
        return sources(self.resume, checkpoint, "run/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a call carries.

    Attributes:
        load_bytes: the most that a load has, all files together.
        piece_bytes: the most that a piece of it has.
    """

    load_bytes: int
    piece_bytes: int


def pack(job: Job, output: Path, limits: Limits) -> Manifest:
    """Write `load-1/`, `load-2/` and on, each for a call of its own.

    Args:
        output: a folder that is not there yet.

    Raises:
        BareMachineError: the folder is there, a file is not, or the limits contradict each other.
        OSError: a file cannot be read or written.
    """
    if output.exists():
        raise BareMachineError(f"{output} is there already; give another --output, or delete it")
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    code = find_code(CHECKOUT, PROGRAM)
    try:
        with TemporaryDirectory() as scratch:
            groups = cut(
                list(job.sources(code, Path(scratch))),
                partial / PIECES,
                piece_bytes=limits.piece_bytes,
                wanted=range(sys.maxsize),
            )
        manifest = _with_loads(_about(job, code), groups, limits)
        _share_out(manifest, partial)
        os.replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def loads(manifest: Manifest) -> list[tuple[Piece, ...]]:
    """The pieces of each load."""
    return [manifest.pieces[begin:end] for begin, end in manifest.about["loads"]]


def _about(job: Job, code: Code) -> dict[str, Any]:
    return {
        "kind": "job",
        "options": list(job.options),
        "modules": list(code.needed),
        "versions": {name: metadata.version(name) for name in _VERSIONS},
    }


def _with_loads(about: Mapping[str, Any], groups: tuple[Group, ...], limits: Limits) -> Manifest:
    manifest = Manifest(about={**about, "loads": []}, groups=groups)
    program = sum(file.stat().st_size for file in _program().values())
    room = limits.load_bytes - program - len(manifest.to_json()) - _ROOM_BYTES
    if room < limits.piece_bytes:
        least = limits.load_bytes - room + limits.piece_bytes
        raise BareMachineError(
            f"a load of {limits.load_bytes:,} bytes has no room for a piece of "
            f"{limits.piece_bytes:,}; give --max-load of {least / (1 << 20):.1f}MiB or more"
        )
    begin, used = 0, 0
    bounds: list[list[int]] = []
    for piece in manifest.pieces:
        if used + piece.num_bytes > room:
            bounds.append([begin, piece.number])
            begin, used = piece.number, 0
        used += piece.num_bytes
    bounds.append([begin, len(manifest.pieces)])
    return replace(manifest, about={**about, "loads": bounds})


def _share_out(manifest: Manifest, folder: Path) -> None:
    """Make the loads of the pieces."""
    for place, pieces in enumerate(loads(manifest), start=1):
        load = folder / f"load-{place}"
        (load / PIECES).mkdir(parents=True)
        for piece in pieces:
            os.replace(folder / PIECES / piece.name, load / PIECES / piece.name)
        for name, file in _program().items():
            (load / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, load / name)
        (load / MANIFEST).write_bytes(manifest.to_json())
    (folder / PIECES).rmdir()


def _program() -> dict[str, Path]:
    """What runs on the machine, by its place in a load."""
    package = _HERE.relative_to(CHECKOUT).as_posix()
    modules = {f"{package}/{name}.py": _HERE / f"{name}.py" for name in TRAVELLING}
    top = {"scripts/__init__.py": CHECKOUT / "scripts" / "__init__.py"}
    return {LAUNCHER: _HERE / "launcher.py", **top, **modules}


def _files_in(folder: Path, place: str, names: Sequence[str]) -> dict[str, Path]:
    """Those of the names that are in the folder; the first has to be.

    Raises:
        BareMachineError: it is not.
    """
    if not (folder / names[0]).is_file():
        raise BareMachineError(f"{folder} holds no {names[0]}")
    return {f"{place}/{name}": folder / name for name in names if (folder / name).is_file()}


def _unzipped(wheels: Sequence[Path], folder: Path) -> dict[str, Path]:
    """The files of Python packages.

    Raises:
        BareMachineError: one is no wheel.
    """
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        except (zipfile.BadZipFile, OSError) as error:
            raise BareMachineError(f"{wheel} is no wheel: {error}") from error
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    return {f"modules/{file.relative_to(folder).as_posix()}": file for file in found}
