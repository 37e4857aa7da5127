"""Atomic writes of small files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PART_SUFFIX = ".part"  # suffix of a file while it is being written; it lies in the same folder as the final file


def write_atomically(path: Path, data: str | bytes | bytearray | memoryview, private: bool = False) -> None:
    """Write a temporary file, flush it to the disk, and rename it to `path`. The folder is created if needed.

    With `private`, only the owner can read the file. Raises OSError, and then leaves no temporary file behind.
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
    except OSError:
        part.unlink(missing_ok=True)
        raise
