"""Private temporary folders for the Unix sockets between a program and its child processes.

A process locks its folders until it ends, which also keeps `systemd-tmpfiles` away from them. A process that is killed leaves
them; the next one that makes a folder with the same prefix removes them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import tempfile
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

# Age of a folder that may be removed: a new one is locked within milliseconds.
_MIN_LEFTOVER_SECONDS = 60.0
_PROBE = "probe-socket"  # at least as long as the names that are used: the kernel limits the length of a path


class SocketFolder:
    """A folder at `path`, with mode 0700 and a random name, until `remove`, or until the process ends."""

    def __init__(self, prefix: str) -> None:
        """Create it in the first temporary folder that takes sockets. Raises OSError if none does.

        Sockets need no space, but an entry in their folder, for which a full disk may have no room.
        """
        failures: list[str] = []
        for parent in _parents():
            remove_leftovers(parent, prefix)
            try:
                self.path, lock = _create(parent, prefix)
            except OSError as error:
                failures.append(f"{parent}: {error.strerror or error}")
                continue
            self._finalizer = weakref.finalize(self, _remove, self.path, lock)
            if failures:
                log.warning("%s is used for sockets, because others take none (%s)", parent, "; ".join(failures))
            return
        raise OSError(f"no temporary folder takes a socket ({'; '.join(failures)})")

    def remove(self) -> None:
        """Remove the folder and its sockets. Errors are ignored: the next process removes what is left."""
        self._finalizer()


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove the folders of processes of this user that have ended. Errors are ignored."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                _remove_leftover(Path(entry.path))


def _parents() -> Iterable[Path]:
    """The temporary folders of this machine. The first one may be full, the second and third are in memory."""
    parents = [os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", "/var/tmp"]
    with suppress(OSError):  # all that it tries are full
        parents.insert(0, tempfile.gettempdir())
    return [Path(parent) for parent in dict.fromkeys(parents) if parent]


def _create(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder that takes sockets, and the descriptor that locks it. Raises OSError."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(path / _PROBE))
            (path / _PROBE).unlink()
        except OSError:
            os.close(lock)
            raise
    except OSError:
        with suppress(OSError):
            path.rmdir()
        raise
    return path, lock


def _remove_leftover(path: Path) -> None:
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(folder)
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime >= _MIN_LEFTOVER_SECONDS:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _empty(folder)
                path.rmdir()
        finally:
            os.close(folder)


def _remove(path: Path, lock: int) -> None:
    try:
        with suppress(OSError):
            _empty(lock)
            path.rmdir()
    finally:
        os.close(lock)


def _empty(folder: int) -> None:
    """Remove the sockets of an open folder. Whatever else is in it stays, and with it the folder."""
    for name in os.listdir(folder):
        if stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
