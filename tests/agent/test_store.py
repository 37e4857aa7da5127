"""The shard store when folders are emptied, chunks do not fit, and the agent starts again."""

from __future__ import annotations

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.store import ShardStore
from hearth.errors import ChunkMissing, StoreFull


def chunk(index: int, size: int = 100) -> tuple[str, bytes]:
    data = bytes([index]) * size
    return hashlib.sha256(data).hexdigest(), data


def test_chunks_deleted_behind_its_back_are_missing_and_can_be_put_again(tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "store", 1000, "d")
    name, data = chunk(1)
    store.put(name, data)
    shutil.rmtree(store.path)
    with pytest.raises(ChunkMissing):
        store.verify(name)
    assert store.missing([name]) == (name,)
    assert store.total_bytes == 0
    store.put(name, data)
    store.verify(name)
    assert store.path_of(name).read_bytes() == data


def test_a_chunk_that_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 250, "d")
    name, data = chunk(1)
    store.put(name, data)
    with pytest.raises(StoreFull):
        store.put(*chunk(2, size=300))
    assert store.missing([name]) == ()


def test_what_was_deployed_last_outlives_a_restart(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 250, "d")
    deployed, other, new = (chunk(i) for i in range(3))
    store.put(*deployed)
    store.put(*other)
    os.utime(store.path_of(deployed[0]), (1, 1))
    os.utime(store.path_of(other[0]), (2, 2))
    store.pin([deployed[0]])
    assert store.path_of(deployed[0]).stat().st_mtime == 1, "deploying rewrites nothing"
    again = ShardStore(tmp_path, 250, "d")
    again.put(*new)
    assert again.missing([deployed[0], other[0], new[0]]) == (other[0],)


def test_only_files_named_by_a_hash_in_its_own_folder_are_chunks(tmp_path: Path) -> None:
    for name in ("zz/" + "z" * 64, "ab/" + "f" * 64, "ab/notes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 50)
    (tmp_path / "cd").mkdir()
    (tmp_path / "cd" / ("cd" * 32)).mkdir()
    store = ShardStore(tmp_path, 1000, "d")
    assert store.total_bytes == 0
    assert store.missing(["f" * 64, "cd" * 32]) == ("f" * 64, "cd" * 32)


def test_chunks_that_come_at_once_share_the_room(tmp_path: Path) -> None:
    """None takes the place that another is just being written to."""
    store = ShardStore(tmp_path, 1000, "d")
    chunks = [chunk(index, size=100) for index in range(40)]

    def put(each: tuple[str, bytes]) -> None:
        store.put(*each)
        assert store.total_bytes <= 1000

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, chunks))
    kept = [name for name, _ in chunks if not store.missing([name])]
    assert len(kept) == 10
    assert sum(file.stat().st_size for file in tmp_path.glob("??/*")) == 1000
    assert ShardStore(tmp_path, 1000, "d").missing(kept) == ()
