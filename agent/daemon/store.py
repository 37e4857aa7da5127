"""The on-disk shard store: chunks named by their SHA-256, written atomically, with LRU eviction at a size limit."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from hearth.errors import ChunkCorrupt, ChunkMissing, StoreFailed, StoreFull
from hearth.files import PART_SUFFIX, file_beside, write_atomically
from hearth.platform.disk import DaemonThreads
from hearth.transport.base import Buffer

log = logging.getLogger(__name__)

_RESERVE_BYTES = 64 << 20  # kept free on the disk, so that logs and other programs can still write
_SCRATCH_PREFIX = "scratch-"
# Left by agents that were killed: folders for temporary files, and engines of TensorRT, which earlier versions kept here.
_LEFTOVERS = (f"{_SCRATCH_PREFIX}*", "profile-*", "tensorrt")
_CHUNK_NAME = re.compile(r"[0-9a-f]{64}")  # a SHA-256 in hex; other names could be paths
# How long a chunk that was hashed counts as intact: a push and the load that follows hash it once. Much longer would let a
# chunk that the disk damages meanwhile be served.
_VERIFIED_SECONDS = 60.0
_READ_BYTES = 1 << 17  # read at once while hashing: system calls cost little, and the idle daemon keeps little memory
# Of one request to read ahead: of a longer one, Linux may read only the beginning, at least its usual read-ahead of 128 KiB.
_READ_AHEAD_BYTES = 1 << 17
_HASH_THREADS = 2  # that hash chunks at the same time: more compete for the disk, and each keeps an arena of memory


class _Verified(NamedTuple):
    """When a chunk was found to be intact (monotonic seconds), and the version of its file then."""

    at: float
    version: tuple[int, ...]


class Scratch(tempfile.TemporaryDirectory[str]):
    """A temporary folder for large files, and a file, in the store: the system's temporary folder may be in memory.

    Raises OSError.
    """

    def __init__(self, store: Path) -> None:
        store.mkdir(parents=True, exist_ok=True)
        super().__init__(prefix=_SCRATCH_PREFIX, dir=store, ignore_cleanup_errors=True)
        file_beside(Path(self.name)).touch()

    def cleanup(self) -> None:
        """Remove both."""
        super().cleanup()
        file_beside(Path(self.name)).unlink(missing_ok=True)


class ShardStore:
    """Chunks under `path`, in at most `max_bytes`. Thread-safe.

    Chunks are hashed before they are loaded, each time: a disk may damage them at any time. Files may be deleted while the
    daemon runs: their chunks are then reported missing, and can be stored again.
    """

    def __init__(self, path: Path, max_bytes: int, device: str) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._device = device
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # bytes by chunk, least recently used first
        self._writing_bytes = 0  # of chunks being written, which are not in `_sizes` yet
        self._pinned: dict[str, frozenset[str]] = {}  # keyed by deployment
        self._verified: dict[str, _Verified] = {}
        self._last_used_ns = 0  # the newest time that was written for a use
        with suppress(OSError):  # reading what is there needs no write access; writing raises StoreFailed
            path.mkdir(parents=True, exist_ok=True)
        self._scan()

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.values())

    def room_bytes(self) -> int:
        """The bytes of chunks that can be stored besides the pinned ones, if all others are evicted. Raises OSError.

        Waits for no other access: without the lock, the result may miss a chunk that is being stored.
        """
        sizes = self._sizes.copy()
        pinned = frozenset[str]().union(*self._pinned.copy().values())
        pinned_bytes = sum(sizes.get(chunk, 0) for chunk in pinned)
        on_disk = sum(sizes.values()) + self._disk_free() - _RESERVE_BYTES
        return max(min(self._max_bytes, on_disk) - pinned_bytes, 0)

    def num_bytes(self, hashes: Iterable[str]) -> int:
        """The bytes of those of these chunks that are stored."""
        return sum(self._sizes.get(chunk, 0) for chunk in hashes)

    def missing(self, hashes: Iterable[str]) -> tuple[str, ...]:
        """Return the chunks that are not stored. The others count as used, so that a push does not evict its own chunks."""
        with self._lock:
            absent = []
            for chunk in hashes:
                if self._has_chunk(chunk):
                    self._mark_used(chunk)
                else:
                    absent.append(chunk)
            return tuple(absent)

    def put(self, chunk: str, data: Buffer) -> None:
        """Store a chunk.

        Raises ChunkCorrupt if it does not match its hash, StoreFull if there is no room, StoreFailed if the disk fails.
        """
        if hashlib.sha256(data).hexdigest() != chunk:
            raise ChunkCorrupt(chunk=chunk[:12], where=f"the way to {self._device}")
        with self._lock:
            if self._has_chunk(chunk):
                self._mark_used(chunk)
                return
            try:
                self._make_room(len(data))
            except OSError as error:
                raise self._store_failed(error) from None
            self._writing_bytes += len(data)
        try:
            self._write(chunk, data)
        except BaseException:
            with self._lock:
                self._writing_bytes -= len(data)
            raise
        with self._lock:  # both at once: a chunk counted twice could evict another one
            self._writing_bytes -= len(data)
            self._sizes[chunk] = len(data)

    def _write(self, chunk: str, data: Buffer) -> None:
        """Write a chunk atomically. Runs without the lock, because concurrent writes are faster than sequential ones."""
        try:
            write_atomically(self._file(chunk), data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with self._lock:
                    raise self._store_full(len(data)) from None
            raise self._store_failed(error) from None

    def verify(self, hashes: Iterable[str]) -> tuple[str, ...]:
        """Hash these chunks as they are on the disk; delete and return the damaged ones. Raises ChunkMissing.

        A chunk that was hashed less than a minute ago, and whose file is unchanged, is not hashed again.
        """
        paths = {chunk: self.path_of(chunk) for chunk in hashes}
        waiting = iter(paths.items())  # shared by the threads

        def hash_waiting() -> set[str]:
            return {chunk for chunk, path in waiting if not self._is_intact(chunk, path)}

        others = [DaemonThreads().submit(hash_waiting) for _ in range(min(_HASH_THREADS, len(paths)) - 1)]
        found = hash_waiting().union(*(other.result() for other in others))
        damaged = tuple(chunk for chunk in paths if chunk in found)
        with self._lock:
            for chunk in damaged:
                log.warning("the chunk %s is damaged on the disk and was discarded", chunk[:12])
                self._forget(chunk)
                with suppress(OSError):  # read-only: the chunk is forgotten, and stored again once that is possible
                    paths[chunk].unlink(missing_ok=True)
        return damaged

    def _is_intact(self, chunk: str, path: Path) -> bool:
        try:
            status = path.stat()
            known = self._verified.get(chunk)
            now = time.monotonic()
            version = _version(status)
            if known is not None and known.version == version and now < known.at + _VERIFIED_SECONDS:
                return True
            if _file_hash(path) != chunk:
                return False
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            return False
        self._verified[chunk] = _Verified(now, version)
        return True

    def path_of(self, chunk: str) -> Path:
        """The path of a chunk's file; counts as use. Raises ChunkMissing."""
        with self._lock:
            if not self._has_chunk(chunk):
                raise ChunkMissing(chunk=chunk[:12], device=self._device)
            self._mark_used(chunk)
            return self._file(chunk)

    def read_ahead(self, hashes: Iterable[str], max_bytes: int) -> int:
        """Ask the system to read these chunks into the page cache, in order, until the next is beyond `max_bytes`.

        Returns the bytes that it was asked for; 0 where the system has no such request. Chunks that are not stored, or cannot
        be opened, are left out.
        """
        if not hasattr(os, "posix_fadvise"):  # macOS, Windows
            return 0
        asked_bytes = 0
        for chunk in hashes:
            num_bytes = self._sizes.get(chunk, 0)
            if asked_bytes + num_bytes > max_bytes:
                break
            with suppress(OSError), self._file(chunk).open("rb", buffering=0) as file:
                for offset in range(0, num_bytes, _READ_AHEAD_BYTES):
                    os.posix_fadvise(file.fileno(), offset, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                asked_bytes += num_bytes
        return asked_bytes

    def pin(self, deployment: str, hashes: Iterable[str]) -> None:
        """Protect the chunks of a deployment's plan from eviction, instead of its previous plan's. Asks no disk."""
        self._pinned[deployment] = frozenset(hashes)

    def unpin(self, deployment: str) -> None:
        """End this protection. Asks no disk, and waits for none, as the lock would."""
        self._pinned.pop(deployment, None)

    def note_use(self, hashes: Iterable[str]) -> None:
        """Record the use of chunks for the next start of the daemon, in the access times of their files.

        They never decrease, so that a clock that was set back, or that a board without a battery lost, does not make the newest
        chunks the first to be evicted.
        """
        with self._lock:
            self._last_used_ns = used_ns = max(time.time_ns(), self._last_used_ns + 1)
            used = [chunk for chunk in dict.fromkeys(hashes) if self._has_chunk(chunk)]
            for chunk in used:
                self._mark_used(chunk)
        for chunk in used:  # without the lock: others need no disk that takes writes
            with suppress(OSError):  # a wrong time only changes the order of evictions
                before = self._file(chunk).stat()
                os.utime(self._file(chunk), ns=(used_ns, before.st_mtime_ns))
                known = self._verified.get(chunk)
                if known is not None and known.version == _version(before):  # the use changes the ctime
                    self._verified[chunk] = known._replace(version=_version(self._file(chunk).stat()))

    def scratch_folder(self) -> Scratch:
        """A scratch folder. Raises StoreFailed."""
        try:
            return Scratch(self.path)
        except OSError as error:
            raise self._store_failed(error) from None

    def _file(self, chunk: str) -> Path:
        return self.path / chunk[:2] / chunk

    def _has_chunk(self, chunk: str) -> bool:
        """Whether the chunk is stored and its file still exists."""
        if chunk not in self._sizes:
            return False
        if self._file(chunk).is_file():
            return True
        log.warning("the chunk %s is gone from %s", chunk[:12], self.path)
        self._forget(chunk)
        return False

    def _forget(self, chunk: str) -> None:
        self._sizes.pop(chunk, None)
        self._verified.pop(chunk, None)

    def _mark_used(self, chunk: str) -> None:
        self._sizes[chunk] = self._sizes.pop(chunk)

    def _make_room(self, num_bytes: int) -> None:
        # On a disk that takes no writes, `mkdir` could hang with the lock held, which readers need, too.
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
        evictable = self._evictable()
        freeable = sum(self._sizes[chunk] for chunk in evictable)
        incoming_bytes = self._writing_bytes + num_bytes
        if (
            self.total_bytes - freeable + incoming_bytes > self._max_bytes
            or self._disk_free() + freeable < incoming_bytes + _RESERVE_BYTES
        ):
            raise self._store_full(num_bytes)  # raised before evicting chunks in vain
        while (
            self.total_bytes + incoming_bytes > self._max_bytes or self._disk_free() < incoming_bytes + _RESERVE_BYTES
        ):
            if not evictable:
                raise self._store_full(num_bytes)
            chunk = evictable.pop(0)
            self._file(chunk).unlink(missing_ok=True)
            self._forget(chunk)

    def _evictable(self) -> list[str]:
        pinned = frozenset[str]().union(*self._pinned.copy().values())
        return [chunk for chunk in self._sizes if chunk not in pinned]

    def _store_full(self, num_bytes: int) -> StoreFull:
        pinned_bytes = self.total_bytes - sum(self._sizes[chunk] for chunk in self._evictable())
        free = min(self._max_bytes - pinned_bytes, max(self._disk_free() - _RESERVE_BYTES, 0))
        return StoreFull(device=self._device, needed_bytes=num_bytes, free_bytes=max(free, 0))

    def _store_failed(self, error: OSError) -> StoreFailed:
        return StoreFailed(device=self._device, reason=error.strerror or str(error))

    def _disk_free(self) -> int:
        return shutil.disk_usage(self.path).free

    def _scan(self) -> None:
        """Find the chunks of earlier runs, ordered by their last deployment, and remove unfinished files."""
        for folder in chain.from_iterable(map(self.path.glob, _LEFTOVERS)):
            shutil.rmtree(folder, ignore_errors=True)
        chunks = []
        for file in (*self.path.glob(f"*{PART_SUFFIX}"), *self.path.glob("??/*")):
            if file.name.endswith(PART_SUFFIX):
                with suppress(OSError):  # read-only: the file stays until the next start
                    file.unlink(missing_ok=True)
            elif _CHUNK_NAME.fullmatch(file.name) and file == self._file(file.name) and file.is_file():
                status = file.stat()
                chunks.append((status.st_atime_ns, file.name, status.st_size))
        self._sizes = {name: size for _, name, size in sorted(chunks)}
        self._last_used_ns = max((used_ns for used_ns, _, _ in chunks), default=0)


def _version(status: os.stat_result) -> tuple[int, ...]:
    """Differs after every change of a file. The ctime cannot be set, unlike the mtime, which an SD card counts in seconds."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()
