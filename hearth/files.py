"""Atomic writes of small files, and directories that one process uses."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART_SUFFIX = ".part"  # suffix of a file while it is being written; it lies in the same folder as the final file


def file_beside(folder: Path) -> Path:
    """The file of a worker that has this scratch folder: onnxruntime reads weights only below the folder of a model's file."""
    return folder.with_name(f"{folder.name}{PART_SUFFIX}")


def write_atomically(
    path: Path, data: str | bytes | bytearray | memoryview, private: bool = False, durable: bool = False
) -> None:
    """Write a temporary file, flush it to the disk, and rename it to `path`. The folder is created if needed.

    With `private`, only the owner can read the file. With `durable`, the new name is on the disk as well when this returns.
    Raises OSError, and then leaves no temporary file behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        if durable:
            _flush_folder(path.parent)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderInUse(Exception):
    """Another process, whose id is `pid`, uses the folder."""

    def __init__(self, pid: str) -> None:
        super().__init__(f"process {pid} uses the folder")
        self.pid = pid


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder if needed, close it to other users, and lock it for the block. Raises FolderInUse, OSError.

    A folder that was locked before can be locked again after its disk has become full or read-only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # of another owner, or on a read-only disk
        folder.chmod(0o700)
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        lock = os.open(folder / "lock", os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FolderInUse(os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown") from None
        with suppress(OSError):  # only the message to a second process needs the pid
            os.truncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def is_locked(folder: Path) -> bool:
    """Whether a process has locked the folder. Writes nothing, for which a disk that hangs would not answer. Raises OSError."""
    lock = os.open(folder / "lock", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
