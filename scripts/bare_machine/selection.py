"""Some parts of a tokenised corpus as a corpus of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.bare_machine.manifest import BareMachineError
from scripts.bare_machine.run_folder import RUN_FILE
from training.shards import (
    ARRAYS,
    SHARDS_FILE,
    Manifest,
    PartRecord,
    Shards,
    is_intact,
    part_name,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Parts of a folder that `training.prepare` wrote.

    Attributes:
        parts: their numbers there, ascending.
        manifest: of the selection, in which they are counted from 0. That of all parts is the
            folder's own, so that it is the same corpus.
    """

    folder: Path
    parts: tuple[int, ...]
    manifest: Manifest

    @classmethod
    def of(cls, folder: Path, parts: Sequence[int] | None = None) -> Selection:
        """Choose parts, by default all.

        Raises:
            ShardError: the folder is not whole, or damaged.
            BareMachineError: it has no such part.
        """
        Shards.open(folder)
        known = Manifest.read(folder / SHARDS_FILE)
        numbers = tuple(sorted(set(range(len(known.parts)) if parts is None else parts)))
        wrong = [number for number in numbers if not 0 <= number < len(known.parts)]
        if wrong or not numbers:
            raise BareMachineError(
                f"{folder} has no part {wrong[0] if wrong else 'to choose'}; "
                f"its parts are 0 to {len(known.parts) - 1}"
            )
        return cls(folder=folder, parts=numbers, manifest=_choose(known, numbers))

    @classmethod
    def within(cls, folder: Path, num_bytes: int) -> Selection:
        """As many of the first parts as have no more than these bytes together, but at least one.

        Raises:
            ShardError: the folder is not whole, or damaged.
        """
        every = cls.of(folder)
        sizes = [part.num_bytes for part in Shards.open(folder).parts]
        fitting = [count for count in range(1, len(sizes) + 1) if sum(sizes[:count]) <= num_bytes]
        count = max(fitting, default=1)
        return every if count == len(sizes) else cls.of(folder, range(count))

    @property
    def left_out(self) -> tuple[int, ...]:
        """The numbers of the folder's other parts."""
        total = len(Manifest.read(self.folder / SHARDS_FILE).parts)
        return tuple(number for number in range(total) if number not in self.parts)

    def check(self) -> None:
        """See that the files are what was written, which takes as long as reading them.

        Raises:
            BareMachineError: one is not.
        """
        for number, record in zip(self.parts, self.manifest.parts, strict=True):
            if not is_intact(self.folder, replace(record, name=part_name(number))):
                raise BareMachineError(
                    f"{self.folder / part_name(number)} is damaged; prepare the corpus again"
                )

    def files(self, scratch: Path) -> dict[str, Path]:
        """The files by their path in a parcel; `shards.json` is made in `scratch`."""
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / SHARDS_FILE).write_bytes(self.manifest.to_json())
        arrays = {
            f"shards/{record.name}/{array}.npy": self.folder / part_name(number) / f"{array}.npy"
            for number, record in zip(self.parts, self.manifest.parts, strict=True)
            for array in ARRAYS
        }
        return {**arrays, f"shards/{SHARDS_FILE}": scratch / SHARDS_FILE}

    def write(self, output: Path) -> None:
        """Make a folder of the selection, that `training.pretrain --shards` takes.

        Raises:
            BareMachineError: the folder is there already.
            OSError: it cannot be written.
        """
        if output.exists():
            raise BareMachineError(f"{output} is there already; give another --output")
        partial = output.with_name(output.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        for path, file in self.files(partial).items():
            target = partial / path.removeprefix("shards/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copyfile(file, target)
        os.replace(partial, output)

    def check_run(self, run: Path) -> None:
        """See that a run was begun on this selection.

        Raises:
            BareMachineError: it was not.
        """
        try:
            corpus = json.loads((run / RUN_FILE).read_bytes())["corpus"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BareMachineError(f"{run / RUN_FILE} cannot be read: {error!r}") from error
        if corpus != [[self.manifest.fingerprint, 0]]:
            raise BareMachineError(
                f"{run} was begun on another corpus than {describe(self)}; "
                "give the --shards and --parts that it was begun with"
            )


def describe(selection: Selection) -> str:
    """The selection in words."""
    numbers = " ".join(map(str, selection.parts))
    return f"{selection.folder}, parts {numbers}"


def _choose(known: Manifest, numbers: tuple[int, ...]) -> Manifest:
    if len(numbers) == len(known.parts):
        return known
    chosen: list[PartRecord] = [
        replace(known.parts[number], name=part_name(place)) for place, number in enumerate(numbers)
    ]
    text = f"{known.fingerprint} parts {' '.join(map(str, numbers))}"
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return Manifest(
        tokenizer_sha256=known.tokenizer_sha256, fingerprint=fingerprint, parts=tuple(chosen)
    )
