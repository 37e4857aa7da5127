"""Files that cache what can be computed again. A failing disk stops nobody: what cannot be written stays in memory."""

from __future__ import annotations

import logging
from pathlib import Path

from hearth.files import write_atomically

log = logging.getLogger(__name__)

# Contents that the disk did not take, by path; None: a file that could not be removed. Some KB for each model and device.
_unwritten: dict[Path, bytes | None] = {}


def read_cached(path: Path) -> bytes:
    """The newest content. Raises OSError if there is none."""
    if path not in _unwritten:
        return path.read_bytes()
    data = _unwritten[path]
    if data is None:
        raise FileNotFoundError(path)
    return data


def write_cached(path: Path, data: bytes) -> None:
    """Write a file, and those that could not be written before. The first failure is logged; the next write tries again."""
    _unwritten[path] = data
    _flush()


def remove_cached(path: Path) -> None:
    """Remove a file, if there is one."""
    _unwritten[path] = None
    _flush()


def _flush() -> None:
    newest = next(reversed(_unwritten))
    for path, data in list(_unwritten.items()):
        try:
            if data is not None:
                write_atomically(path, data)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            if len(_unwritten) == 1:
                log.warning("%s cannot be written; it is kept in memory and tried again: %s", newest, error)
            return
        if _unwritten.get(path) is data:
            del _unwritten[path]
