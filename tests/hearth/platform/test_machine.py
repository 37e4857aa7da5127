"""The size of the last-level cache from files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hearth.platform.machine import last_level_cache_bytes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (["48K", "64K", "2048K", "491520K"], 480 << 20),
        (["32K\n", "1M\n"], 1 << 20),
        (["512"], 512),
        (["", "unknown", "256K"], 256 << 10),
        ([], 0),
    ],
)
def test_largest_cache_counts(tmp_path: Path, sizes: list[str], expected: int) -> None:
    for index, size in enumerate(sizes):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size)
    assert last_level_cache_bytes(tmp_path) == expected
