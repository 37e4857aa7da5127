"""Files that cache what can be computed again. A failing disk stops nobody: what cannot be written stays in memory."""

from __future__ import annotations

from pathlib import Path

from hearth.files import write_atomically
from hearth.platform.disk import DiskWork

# Contents that the disk did not take, by path; None: a file that could not be removed. Some KB for each model and device.
_unwritten: dict[Path, bytes | None] = {}
_FLUSH_SECONDS = 5.0  # for the disk to take a file, before a program ends that has measured


def read_cached(path: Path) -> bytes:
    """The newest content. Raises OSError if there is none."""
    if path not in _unwritten:
        return path.read_bytes()
    data = _unwritten[path]
    if data is None:
        raise FileNotFoundError(path)
    return data


def write_cached(path: Path, data: bytes) -> None:
    """Write a file, and those that could not be written before; on an event loop, a thread writes (`flushed`).

    The first failure is logged; the next write tries again.
    """
    _unwritten[path] = data
    _flushing.ask()


def remove_cached(path: Path) -> None:
    """Remove a file, if there is one."""
    _unwritten[path] = None
    _flushing.ask()


async def flushed() -> None:
    """Wait for a moment until the thread has written."""
    await _flushing.settled(_FLUSH_SECONDS)


def _flush() -> None:
    for path, data in list(_unwritten.items()):
        if data is not None:
            write_atomically(path, data)
        else:
            path.unlink(missing_ok=True)
        if _unwritten.get(path) is data:
            del _unwritten[path]


_flushing = DiskWork(Path("the cached files"), _flush)
