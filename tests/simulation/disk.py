"""A host's disk: a folder of real files that can fill up, refuse writes, rot, and lose its last writes at a power cut."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random
from typing import Any, Literal

from simulation.clock import CURRENT_PROCESS, VirtualLoop

_UNSAFE_SECONDS = 1.0  # a write that is younger than this may be lost with the power
_FREE_BYTES = 1 << 40

Fault = Literal["full", "read-only", "failing"]
_ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "failing": errno.EIO}


class Disk:
    """One disk. `fault` makes every write fail."""

    def __init__(self, loop: VirtualLoop, folder: Path) -> None:
        self.folder = folder
        self.fault: Fault | None = None
        self._loop = loop
        self._folders: set[Path] = set()  # that exist
        self._last_writes: dict[Path, tuple[float, bytes | None]] = {}  # time, and the content before
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: Any, durable: bool = False) -> None:
        if self.fault is not None:
            raise OSError(_ERRORS[self.fault], f"the simulated disk is {self.fault}", str(path))
        if path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(path.parent)
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(data.encode() if isinstance(data, str) else bytes(data))
        if not durable:
            self._last_writes[path] = (self._loop.time(), before)

    def free_bytes(self) -> int:
        return 0 if self.fault == "full" else _FREE_BYTES

    def lose_last_writes(self, random: Random) -> None:
        """Undo a random part of the writes of the last moment."""
        for path, (written, before) in self._last_writes.items():
            if self._loop.time() - written < _UNSAFE_SECONDS and random.random() < 0.5:
                if before is None:
                    path.unlink(missing_ok=True)
                else:
                    path.write_bytes(before)
        self._last_writes.clear()

    def damage(self, path: Path, random: Random) -> None:
        """Flip one bit of a file."""
        data = bytearray(path.read_bytes())
        data[random.randrange(len(data))] ^= 1
        path.write_bytes(data)


def current_disk() -> Disk:
    """The disk of the host on which the current process runs."""
    process = CURRENT_PROCESS.get()
    disk: Disk = process.host.disk
    return disk


def write_atomically(path: Path, data: Any, private: bool = False, durable: bool = False) -> None:
    """Stands for `hearth.files.write_atomically`."""
    current_disk().write(path, data, durable)
