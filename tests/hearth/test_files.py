"""Atomic replacement of files, and folders that one process uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from hearth.files import locked_folder, write_atomically


def test_atomic_write_replaces_the_file_and_sets_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state.json"
    write_atomically(path, "old")
    write_atomically(path, memoryview(b"new"), private=True)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_failed_write_keeps_the_old_file_only(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(OSError, match="state"):
        write_atomically(tmp_path / "state", "a folder is in its place")
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]


def test_locked_folder_is_closed_to_other_users(tmp_path: Path) -> None:
    (tmp_path / "known").mkdir(mode=0o755)
    for folder in (tmp_path / "new" / "state", tmp_path / "known"):
        with locked_folder(folder):
            assert folder.stat().st_mode & 0o777 == 0o700
