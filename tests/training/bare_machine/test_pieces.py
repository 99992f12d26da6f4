"""Files come back from pieces as they were, or it is told which piece is to blame."""

from __future__ import annotations

import resource
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.bare_machine.manifest import BareMachineError, Codec, FileRecord, Manifest
from scripts.bare_machine.pieces import Source, assemble, cut, find_pieces
from tests.training.bare_machine.support import content, damage, noise

EVERY = range(sys.maxsize)


def write_files(folder: Path, data: dict[str, bytes]) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    for name, content_ in data.items():
        (folder / name).write_bytes(content_)
    return {f"place/{name}": folder / name for name in data}


def parcel(
    folder: Path,
    sizes: tuple[int, ...] = (1000, 0, 2500),
    *,
    piece_bytes: int = 700,
    codec: Codec = "stored",
    wanted: range = EVERY,
) -> Manifest:
    """Two groups of files of these sizes, as pieces in `folder / "pieces"`."""
    sources = []
    for name in ("first", "second"):
        data = {f"{number}-{name}": noise(f"{number} {name}", n) for number, n in enumerate(sizes)}
        sources.append(Source(name=name, codec=codec, files=write_files(folder / name, data)))
    groups = cut(sources, folder / "pieces", piece_bytes=piece_bytes, wanted=wanted)
    return Manifest(about={"kind": "test"}, groups=groups)


def put_together(manifest: Manifest, folder: Path) -> Path:
    found = find_pieces((folder / "pieces").iterdir())
    for group in manifest.groups:
        assemble(group, found.whole, folder / "made")
    return folder / "made" / "place"


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400), max_size=5).map(tuple),
    piece_bytes=st.integers(1, 300),
    codec=st.sampled_from(["stored", "zlib"]),
)
def test_files_come_back_as_they_were(
    sizes: tuple[int, ...], piece_bytes: int, codec: Codec
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = parcel(folder, sizes, piece_bytes=piece_bytes, codec=codec)
        made = put_together(manifest, folder)
        expected = {**content(folder / "first"), **content(folder / "second")}
        assert (content(made) if made.is_dir() else {}) == expected
        files = sorted((folder / "pieces").iterdir())
        assert all(0 < file.stat().st_size <= piece_bytes for file in files)
        assert [piece.number for piece in manifest.pieces] == list(range(len(files)))


def test_the_same_files_make_the_same_pieces(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    manifests = [parcel(tmp_path / name, codec="zlib") for name in ("one", "other")]
    assert manifests[0] == manifests[1]
    assert content(tmp_path / "one") == content(tmp_path / "other")


def test_a_group_begins_with_a_piece_of_its_own(tmp_path: Path) -> None:
    """So that what changes in one leaves the pieces of the other as they are."""
    both = parcel(tmp_path)
    (tmp_path / "second" / "0-second").write_bytes(b"changed")
    files = {f"place/{file.name}": file for file in sorted((tmp_path / "first").iterdir())}
    source = Source(name="first", codec="stored", files=files)
    (alone,) = cut([source], tmp_path / "alone", piece_bytes=700, wanted=EVERY)
    assert alone == both.groups[0]


@pytest.mark.parametrize("wanted", [range(2), range(3, 6), range(9, 50), range(20, 30)])
def test_only_pieces_that_are_wanted_are_written(tmp_path: Path, wanted: range) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "some").mkdir()
    manifest = parcel(tmp_path / "all")
    assert parcel(tmp_path / "some", wanted=wanted) == manifest
    names = [piece.name for piece in manifest.pieces if piece.number in wanted]
    written = content(tmp_path / "some" / "pieces")
    assert sorted(written) == names
    assert written.items() <= content(tmp_path / "all" / "pieces").items()


def test_what_a_killed_process_left_is_not_in_a_piece(tmp_path: Path) -> None:
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "piece.partial").write_bytes(b"left")
    put_together(parcel(tmp_path), tmp_path)
    assert not list((tmp_path / "pieces").glob("*.partial"))


def test_each_damaged_piece_is_found(tmp_path: Path) -> None:
    for piece in parcel(tmp_path).pieces:
        file = tmp_path / "pieces" / piece.name
        before = file.read_bytes()
        for spoilt in (before[:-1], b"", before + b"x"):
            file.write_bytes(spoilt)
            assert find_pieces([file]).damaged == (file,)
        file.write_bytes(before)
        assert find_pieces([file]).whole == {piece.sha256: file}


def test_other_files_are_no_pieces(tmp_path: Path) -> None:
    for name in ("notes.txt", "000-abc.piece", "piece.partial", "000-0123456789ab.piece.txt"):
        (tmp_path / name).write_text("text")
    found = find_pieces(tmp_path.iterdir())
    assert (found.whole, found.damaged) == ({}, ())


@pytest.mark.parametrize("codec", ["stored", "zlib"])
def test_a_piece_that_changes_meanwhile_makes_no_file(tmp_path: Path, codec: Codec) -> None:
    manifest = parcel(tmp_path, codec=codec)
    found = find_pieces((tmp_path / "pieces").iterdir())
    damage(tmp_path / "pieces" / manifest.pieces[0].name)
    with pytest.raises(BareMachineError, match="is not what the manifest says; transfer it again"):
        assemble(manifest.groups[0], found.whole, tmp_path / "made")
    assert content(tmp_path / "made") == {}


def test_files_that_are_there_are_left_alone(tmp_path: Path) -> None:
    manifest = parcel(tmp_path)
    made = put_together(manifest, tmp_path)
    before = {file: file.stat().st_ino for file in made.iterdir()}
    assert put_together(manifest, tmp_path) == made
    assert {file: file.stat().st_ino for file in made.iterdir()} == before
    damage(made / "0-first")
    put_together(manifest, tmp_path)
    assert (made / "0-first").read_bytes() == (tmp_path / "first" / "0-first").read_bytes()


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing past it fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_whole_pieces_alone(tmp_path: Path) -> None:
    """Of two groups, of one piece each, there is room for the first."""
    sizes = (1000, 4000)
    files = [write_files(tmp_path / f"from-{n}", {"file": noise(str(n), n)}) for n in sizes]
    sources = [
        Source(name=str(n), codec="stored", files=f) for n, f in zip(sizes, files, strict=True)
    ]
    out = tmp_path / "out"
    with largest_file(2000), pytest.raises(OSError, match=f"'{out}/piece.partial'"):
        cut(sources, out, piece_bytes=5000, wanted=EVERY)
    (whole,) = find_pieces(out.iterdir()).whole.values()
    assert sorted(out.iterdir()) == [whole]
    assert whole.read_bytes() == noise("1000", 1000)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    manifest = parcel(tmp_path, (3000,))
    with (
        largest_file(2000),
        pytest.raises(OSError, match=f"'{tmp_path}/made/place/0-first.partial'"),
    ):
        put_together(manifest, tmp_path)
    assert content(tmp_path / "made") == {}
    put_together(manifest, tmp_path)


@pytest.mark.parametrize("codec", ["stored", "zlib"])
def test_little_is_in_memory(tmp_path: Path, codec: Codec) -> None:
    num_bytes = 48 << 20
    file = tmp_path / "large"
    with file.open("wb") as stream:
        stream.truncate(num_bytes)
    source = Source(name="large", codec=codec, files={"large": file})
    tracemalloc.start()
    try:
        (group,) = cut([source], tmp_path / "pieces", piece_bytes=num_bytes, wanted=EVERY)
        found = find_pieces((tmp_path / "pieces").iterdir())
        assemble(group, found.whole, tmp_path / "made")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < num_bytes / 8
    assert (tmp_path / "made" / "large").stat().st_size == num_bytes


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    manifest = parcel(tmp_path)
    (tmp_path / "manifest.json").write_bytes(manifest.to_json())
    assert Manifest.read(tmp_path / "manifest.json") == manifest
    assert manifest.group("second") == manifest.groups[1]
    with pytest.raises(BareMachineError, match="lists no 'third'"):
        manifest.group("third")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"num_bytes": 1000', b'"num_bytes": 1001'),
        (b'"test"', b'"text"'),
        (b'"format": 1', b'"format": 2'),
        (b'"groups"', b'"grapes"'),
        (b"{", b""),
        (b"{", b"[{"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    file = tmp_path / "manifest.json"
    data = parcel(tmp_path).to_json()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))
    with pytest.raises(BareMachineError, match=rf"{file} is damaged: .*; transfer it again"):
        Manifest.read(file)


def test_a_manifest_that_is_cut_short_or_missing(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    with pytest.raises(BareMachineError, match="cannot be read: No such file"):
        Manifest.read(file)
    data = parcel(tmp_path).to_json()
    for end in (0, 1, 100, len(data) - 3):
        file.write_bytes(data[:end])
        with pytest.raises(BareMachineError, match="is damaged"):
            Manifest.read(file)


@pytest.mark.parametrize("path", ["/etc/passwd", "../above", "a/../../above", ""])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(BareMachineError, match="is no path inside of a folder"):
        FileRecord(path=path, num_bytes=0, sha256="")
