"""A folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from albert_serve.files import replace_folder

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
    """After a crash, the name stands for the whole content or for none."""
    synced: list[str] = []

    def note(descriptor: int) -> None:
        if not (tmp_path / NAME).exists():
            synced.append(Path(f"/dev/fd/{descriptor}").resolve().name)

    monkeypatch.setattr("os.fsync", note)
    with replace_folder(tmp_path / NAME) as folder:
        (folder / "part").mkdir()
        (folder / "part/file").write_text("1")
    assert {"part", "file", folder.name} == set(synced)
