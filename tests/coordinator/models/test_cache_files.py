"""Files that cache what can be computed again, on disks that fail."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from coordinator.models import cache_files
from coordinator.models.cache_files import read_cached, remove_cached, write_cached


def test_what_cannot_be_written_is_kept_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    working = cache_files.write_atomically

    def fail(path: Path, data: bytes) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache_files, "write_atomically", fail)
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            write_cached(tmp_path / name, name.encode())
    assert len(caplog.records) == 1
    assert (read_cached(tmp_path / "a"), read_cached(tmp_path / "b")) == (b"a", b"b")
    assert list(tmp_path.iterdir()) == []
    remove_cached(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        read_cached(tmp_path / "b")
    monkeypatch.setattr(cache_files, "write_atomically", working)
    write_cached(tmp_path / "c", b"c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
    assert (tmp_path / "a").read_bytes() == b"a"
