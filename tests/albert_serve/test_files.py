"""Names of files; a folder appears complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from albert_serve.files import local_path, read_small_file, replace_folder

NAME = "bundle"


def test_a_folder_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    target = tmp_path / "new" / NAME
    with pytest.raises(FileNotFoundError), replace_folder(target) as folder:
        (folder / "none").rename(folder / "file")
    assert list(target.parent.iterdir()) == []
    for content in ("1", "2"):
        with replace_folder(target) as folder:
            (folder / "file").write_text(content)
        assert list(target.parent.iterdir()) == [target]
        assert (target / "file").read_text() == content


def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME / "old").mkdir(parents=True)
    rename = Path.rename

    def fail(source: Path, path: Path) -> Path:
        return rename(source, path / "none" if source.suffix == ".partial" else path)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(FileNotFoundError), replace_folder(tmp_path / NAME):
        pass
    assert [*tmp_path.rglob("*")] == [tmp_path / NAME, tmp_path / NAME / "old"]


def test_all_content_is_on_disk_before_the_folder_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash, the folder has all of its content, or does not exist."""
    synced: list[str] = []

    def note(descriptor: int) -> None:
        if not (tmp_path / NAME).exists():
            synced.append(Path(f"/dev/fd/{descriptor}").resolve().name)

    monkeypatch.setattr("os.fsync", note)
    with replace_folder(tmp_path / NAME) as folder:
        (folder / "part").mkdir()
        (folder / "part/file").write_text("1")
    assert {"part", "file", folder.name} == set(synced)


@pytest.mark.parametrize(
    ("name", "is_path"),
    [
        *(("./us/whole", True), ("../whole", True), ("/whole", True), ("~/whole", True)),
        *(("us/whole/", True), ("here/whole", True), ("link", True), ("best", True)),
        *(("us/checkpoint", True), (Path("us/whole"), True), ("us/whole", False), ("whole", False)),
    ],
)
def test_a_name_is_a_path_or_a_name_on_the_hub(
    name: str | Path, is_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("nothing")
    assert local_path(name) == (Path(name).expanduser() if is_path else None)


def test_a_small_file_has_at_most_so_many_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("123")
    assert read_small_file(tmp_path / "file", 3) == b"123"
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_small_file(tmp_path / "file", 2)
