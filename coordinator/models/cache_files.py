"""Files that cache what can be computed again. A failing disk stops nobody: what cannot be written stays in memory."""

from __future__ import annotations

from pathlib import Path

from hearth.files import write_atomically
from hearth.platform.disk import DiskWork

# Contents that the disk did not take, by path; None: a file that could not be removed. Some KB for each model and device.
_unwritten: dict[Path, bytes | None] = {}
FLUSH_SECONDS = 5.0  # for the disk to take a file, before a program ends that has measured


def read_cached(path: Path) -> bytes:
    """The newest content. Raises OSError if there is none."""
    try:
        data = _unwritten[path]
    except KeyError:
        return path.read_bytes()
    if data is None:
        raise FileNotFoundError(path)
    return data


def write_cached(path: Path, data: bytes) -> None:
    """Write a file, and those that could not be written before; on an event loop, a thread writes (`flushing`).

    The first failure is logged; the next write tries again.
    """
    _unwritten[path] = data
    flushing.ask()


def remove_cached(path: Path) -> None:
    """Remove a file, if there is one."""
    _unwritten[path] = None
    flushing.ask()


def _flush() -> None:
    for path, data in list(_unwritten.items()):
        if data is not None:
            write_atomically(path, data)
        else:
            path.unlink(missing_ok=True)
        if _unwritten.get(path) is data:
            del _unwritten[path]


flushing = DiskWork(Path("the cached files"), _flush)
