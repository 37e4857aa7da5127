"""Small files: written completely or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PART_SUFFIX = ".part"  # of a file that is being written, beside its place


def write_atomically(path: Path, data: str | bytes | bytearray | memoryview, private: bool = False) -> None:
    """Write a new file, flush it to the disk, and put it in the place of `path`; its folder is made. `private`: readable
    by the owner only. Raises OSError, with nothing left behind."""
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
