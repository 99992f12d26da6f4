"""A folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.system.partial_folder import new_folder, partial_folder, put_folder_in_place


def test_a_folder_is_put_in_place_whole_or_removed(tmp_path: Path) -> None:
    target = tmp_path / "new" / "bundle"
    with pytest.raises(ZeroDivisionError), partial_folder(target):
        _ = 1 / 0
    assert list(target.parent.iterdir()) == []
    for content in ("1", "2"):
        with partial_folder(target) as folder:
            (folder / "file").write_text(content)
            put_folder_in_place(folder, target)
        assert list(target.parent.iterdir()) == [target]
        assert (target / "file").read_text() == content


@pytest.mark.parametrize("replaces", [False, True])
def test_all_content_is_on_disk_before_the_folder_is_renamed(
    replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash, the name stands for the whole content or for none."""
    synced: list[str] = []
    target = tmp_path / "bundle"

    def note(descriptor: int) -> None:
        assert not target.exists()
        synced.append(Path(f"/dev/fd/{descriptor}").resolve().name)

    monkeypatch.setattr("os.fsync", note)
    with (partial_folder if replaces else new_folder)(target) as folder:
        (folder / "part").mkdir()
        (folder / "part/file").write_text("1")
        if replaces:
            put_folder_in_place(folder, target)
    assert {"part", "file", folder.name} == set(synced)


def test_a_new_folder_is_put_in_place_at_the_end_or_removed(tmp_path: Path) -> None:
    """Also in the place of an empty one, and of no other."""
    target = tmp_path / "bundle"
    target.mkdir()
    with pytest.raises(ZeroDivisionError), new_folder(target):
        _ = 1 / 0
    assert [*tmp_path.rglob("*")] == [target]
    with new_folder(target) as folder:
        (folder / "file").write_text("1")
        assert list(target.iterdir()) == []
    for existing in (target, target / "file"):
        message = f"^{existing} is there already; name a new folde"
        with pytest.raises(FileExistsError, match=message), new_folder(existing):
            pytest.fail("nothing is to be written")
    assert [*tmp_path.rglob("*")] == [target, target / "file"]
