"""The shard store: deleted folders, chunks that do not fit, restarts, eviction."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from hypothesis import given
from hypothesis import strategies as st
from support.chunks import chunk
from support.waiting import wait_for

from agent.daemon import store as store_module
from agent.daemon.store import ShardStore
from hearth import errors


def test_externally_deleted_chunks_can_be_stored_again(tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "store", 1000, "d")
    name, data = chunk(1)
    store.put(name, data)
    shutil.rmtree(store.path)
    with pytest.raises(errors.ChunkMissing):
        store.verify([name])
    assert store.missing([name]) == (name,)
    assert store.total_bytes == 0
    store.put(name, data)
    assert store.verify([name]) == ()
    assert store.path_of(name).read_bytes() == data


def test_oversized_chunk_evicts_nothing(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 250, "d")
    name, data = chunk(1)
    store.put(name, data)
    with pytest.raises(errors.StoreFull):
        store.put(*chunk(2, size=300))
    assert store.missing([name]) == ()


def test_last_deployed_chunks_survive_restart_and_eviction(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 250, "d")
    deployed, other, new = (chunk(i) for i in range(3))
    store.put(*deployed)
    store.put(*other)
    os.utime(store.path_of(deployed[0]), (1, 1))
    os.utime(store.path_of(other[0]), (2, 2))
    store.note_use([deployed[0]])
    assert store.path_of(deployed[0]).stat().st_mtime == 1, "deploying rewrites nothing"
    again = ShardStore(tmp_path, 250, "d")
    again.put(*new)
    assert again.missing([deployed[0], other[0], new[0]]) == (other[0],)


@pytest.mark.parametrize("year_seconds", [365 * 86400, -365 * 86400])
def test_last_deployed_chunks_stay_the_newest_if_the_clock_jumps(
    year_seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardStore(tmp_path, 250, "d")
    before, deployed, new = (chunk(i) for i in range(3))
    store.put(*before)
    store.put(*deployed)
    store.note_use([before[0]])
    now_ns = time.time_ns() + year_seconds * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    store = ShardStore(tmp_path, 250, "d")
    store.note_use([deployed[0]])
    again = ShardStore(tmp_path, 250, "d")
    again.put(*new)
    assert again.missing([before[0], deployed[0], new[0]]) == (before[0],)


def test_only_hash_named_files_count_as_chunks(tmp_path: Path) -> None:
    for name in ("zz/" + "z" * 64, "ab/" + "f" * 64, "ab/notes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 50)
    (tmp_path / "cd").mkdir()
    (tmp_path / "cd" / ("cd" * 32)).mkdir()
    store = ShardStore(tmp_path, 1000, "d")
    assert store.total_bytes == 0
    assert store.missing(["f" * 64, "cd" * 32]) == ("f" * 64, "cd" * 32)


def test_concurrent_writes_respect_the_size_limit(tmp_path: Path) -> None:
    """Space reserved by a write in progress is not given to another."""
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


def test_restart_keeps_complete_chunks_and_removes_partial_ones(tmp_path: Path) -> None:
    name, data = chunk(1)
    store = ShardStore(tmp_path, 1000, "d")
    assert store.missing([name]) == (name,)
    store.put(name, data)
    (tmp_path / name[:2] / f"{name}.abcd.part").write_bytes(b"half")
    for folder in ("scratch-1", "profile-1", "tensorrt"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_bytes(b"left")
    again = ShardStore(tmp_path, 1000, "d")
    assert again.missing([name]) == ()
    assert again.verify([name]) == ()
    assert again.path_of(name).read_bytes() == data
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == [name]
    with pytest.raises(errors.ChunkMissing):
        again.path_of("0" * 64)


def test_chunk_that_does_not_match_its_hash_is_rejected(tmp_path: Path) -> None:
    name, data = chunk(1)
    store = ShardStore(tmp_path, 1000, "d")
    with pytest.raises(errors.ChunkCorrupt):
        store.put(name, data[:-1])
    assert store.missing([name]) == (name,)
    store.put(name, data)
    store.path_of(name).write_bytes(b"x" * len(data))
    again = ShardStore(tmp_path, 1000, "d")
    assert again.verify([name]) == (name,)
    assert again.missing([name]) == (name,)


def test_pinned_chunks_are_never_evicted(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 250, "kitchen")
    (first, one), (second, two), (third, three) = (chunk(i) for i in range(3))
    store.put(first, one)
    store.put(second, two)
    store.pin("default", [first])
    store.put(third, three)
    assert store.missing([first, second, third]) == (second,)
    store.pin("other", [third])
    with pytest.raises(errors.StoreFull) as error:
        store.put(second, two)
    assert (error.value.device, error.value.needed_bytes, error.value.free_bytes) == ("kitchen", 100, 50)
    store.unpin("other")
    store.put(second, two)


def test_deployment_ends_while_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop pins and unpins; an access that hangs holds the lock."""
    answers, store = threading.Event(), ShardStore(tmp_path, 250, "d")
    monkeypatch.setattr(store, "_disk_free", lambda: 1 << 30 if answers.wait(60) else 0)
    hung = threading.Thread(target=store.put, args=chunk(1))
    hung.start()
    try:
        wait_for("the lock", store._lock.locked)
        store.pin("default", ["0" * 64])
        store.unpin("default")
    finally:
        answers.set()
        hung.join()


def test_room_is_the_limit_without_the_chunks_of_deployed_plans(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 350, "d")
    assert store.room_bytes() == 350
    (first, one), (second, two) = chunk(1), chunk(2)
    store.put(first, one)
    store.put(second, two)
    assert store.room_bytes() == 350
    store.pin("default", [first])
    store.pin("other", [first, "0" * 64])
    assert store.room_bytes() == 250
    store.put(*chunk(3, 250))
    assert store.missing([first, second]) == (second,)


def test_room_ends_where_the_disk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShardStore(tmp_path, 1 << 40, "d")
    store.put(*chunk(1))
    monkeypatch.setattr(store, "_disk_free", lambda: (64 << 20) + 1000)
    assert store.room_bytes() == 1100
    monkeypatch.setattr(store, "_disk_free", lambda: 0)
    assert store.room_bytes() == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_raises_store_full_and_leaves_no_partial_file(disk: Path) -> None:
    store = ShardStore(disk, 1 << 40, "d")
    (first, one), (second, two) = chunk(1, 10 << 20), chunk(2, 10 << 20)
    store.put(first, one)
    store.pin("default", [first])
    with pytest.raises(errors.StoreFull):
        store.put(second, two)
    assert [path.name for path in disk.glob("*/*")] == [first]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_eviction_is_least_recently_used(operations: list[tuple[bool, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, model = ShardStore(Path(folder), 450, "d"), OrderedDict[str, None]()
        for is_put, index in operations:
            name, data = chunk(index)
            if is_put:
                store.put(name, data)
                model[name] = None
                model.move_to_end(name)
                while len(model) > 4:
                    model.popitem(last=False)
            elif name in model:
                store.path_of(name)
                model.move_to_end(name)
        names = [chunk(index)[0] for index in range(10)]
        assert set(names) - set(store.missing(names)) == set(model)
        assert store.total_bytes == 100 * len(model)


def test_chunks_that_the_disk_damages_later_are_all_found_at_once(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 10_000, "d")
    chunks = [chunk(index) for index in range(6)]
    for each in chunks:
        store.put(*each)
    names = [name for name, _ in chunks]
    assert store.verify(names) == ()
    for name in names[1:4]:
        store.path_of(name).write_bytes(b"rot")
    assert store.verify(names) == tuple(names[1:4])
    assert store.missing(names) == tuple(names[1:4])


def test_rot_that_leaves_the_file_times_alone_is_found_once_the_last_check_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardStore(tmp_path, 10_000, "d")
    name, data = chunk(1)
    store.put(name, data)
    assert store.verify([name]) == ()
    path = store.path_of(name)
    times = path.stat()
    path.write_bytes(b"x" * len(data))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert store.verify([name]) == (name,)


def test_change_that_keeps_size_and_time_is_found_and_a_use_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardStore(tmp_path, 10_000, "d")
    changed, replaced, used = (chunk(index) for index in range(3))
    names = [name for name, _ in (changed, replaced, used)]
    for each in (changed, replaced, used):
        store.put(*each)
    assert store.verify(names) == ()
    store.pin("default", names)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_file_hash", lambda path: "not read again")
        assert store.verify(names) == ()
    for name, data in (changed, replaced):
        path = store.path_of(name)
        times = path.stat()
        target = path if name == changed[0] else path.with_suffix(".new")
        target.write_bytes(b"x" * len(data))
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
        target.rename(path)
    assert set(store.verify(names)) == {changed[0], replaced[0]}


def test_chunks_are_read_ahead_in_small_requests_until_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardStore(tmp_path, 1 << 20, "d")
    names = []
    for index, size in enumerate((300_000, 100_000, 200_000)):
        name, data = chunk(index, size)
        store.put(name, data)
        names.append(name)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, offset, size, advice: asked.append((offset, size)))
    assert store.read_ahead(["0" * 64, *names], 450_000) == 400_000
    step = 128 << 10  # a longer request would be cut to the read-ahead of the disk
    assert asked == [(0, step), (step, step), (2 * step, step), (0, step)]
    (tmp_path / names[0][:2] / names[0]).unlink()
    assert store.read_ahead(names, 1 << 20) == 300_000


def test_read_only_store_is_read_and_says_why_it_takes_no_chunk(disk: Path) -> None:
    store = ShardStore(disk / "store", 10_000, "kitchen")
    store.put(*chunk(1))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    again = ShardStore(disk / "store", 10_000, "kitchen")
    for each in (store, again):
        assert each.verify([chunk(1)[0]]) == ()
        each.note_use([chunk(1)[0]])
        with pytest.raises(errors.StoreFailed, match="kitchen cannot be used: Read-only file system"):
            each.put(*chunk(2))
        with pytest.raises(errors.StoreFailed):
            each.scratch_folder()
