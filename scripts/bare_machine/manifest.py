"""What a parcel holds: files in groups, and the pieces that they travel as."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

# `stored` for what hardly gets smaller, such as weights.
Codec = Literal["stored", "zlib"]
_FORMAT: Final = 1
_DIGITS_OF_NAME: Final = 12


class BareMachineError(ValueError):
    """A job or its result that cannot be packed, run or joined.

    It stands outside the tree of `training.errors`, which is not there where this is raised.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file of a parcel.

    Attributes:
        path: below the folder that the parcel is put together in, with `/` between its parts.

    Raises:
        BareMachineError: the path leads out of that folder.
    """

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise BareMachineError(f"{self.path!r} is no path inside of a folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive bytes of a group.

    Attributes:
        number: counted from 0 over the whole parcel.
    """

    number: int
    num_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The name of its file, which says the content, too: no other piece can be taken for it."""
        return f"{self.number:03}-{self.sha256[:_DIGITS_OF_NAME]}.piece"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Files that travel one after the other, as one stream that is cut.

    A group begins with a piece of its own, so that each can be sent, and used, without the others.
    """

    name: str
    codec: Codec
    files: tuple[FileRecord, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The list of a parcel.

    Attributes:
        about: what the parcel is for; JSON.
    """

    about: dict[str, Any]
    groups: tuple[Group, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of all groups, by their number."""
        return tuple(piece for group in self.groups for piece in group.pieces)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Those of all groups."""
        return tuple(record for group in self.groups for record in group.files)

    @property
    def sha256(self) -> str:
        """Hash of all that the list says."""
        return _seal(asdict(self))

    def group(self, name: str) -> Group:
        """The group of that name.

        Raises:
            BareMachineError: there is none.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise BareMachineError(f"the manifest lists no {name!r}")

    def to_json(self) -> bytes:
        """The content of its file, with a hash of itself."""
        body = {"format": _FORMAT, "sha256": self.sha256, **asdict(self)}
        return (json.dumps(body, indent=1) + "\n").encode()

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """Read what `to_json` made.

        Raises:
            BareMachineError: the file is missing, damaged, or of another format.
        """
        try:
            body = json.loads(file.read_bytes())
            if body.pop("format") != _FORMAT:
                raise BareMachineError("it is of another version of this program")
            sha256 = body.pop("sha256")
            if sha256 != _seal(body):
                raise BareMachineError("its content is not what its hash says")
            return cls(about=body["about"], groups=tuple(_group(**each) for each in body["groups"]))
        except OSError as error:
            raise BareMachineError(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = error if isinstance(error, BareMachineError) else f"{error!r}"
            raise BareMachineError(f"{file} is damaged: {reason}; transfer it again") from error


def _group(*, name: str, codec: Codec, files: list[Any], pieces: list[Any]) -> Group:
    return Group(
        name=name,
        codec=codec,
        files=tuple(FileRecord(**each) for each in files),
        pieces=tuple(Piece(**each) for each in pieces),
    )


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
