"""Opens the files of a model, which anybody may have made: regular files in the model's folder, and nothing else.

Nothing maps them into memory: the process would be killed (SIGBUS) if another program cut a mapped file short.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.models.limits import MAX_TEXT_BYTES

opened: set[str] = set()  # the real paths of all files that this process has opened

# Read at a time from an array of which a part is needed that is not consecutive: few calls, and little memory.
_BLOCK_BYTES = 4 << 20


def open_model_file(path: Path, folder: Path | None = None, hidden: bool = False) -> BufferedReader:
    """Open a file of the model in `folder` (the file's own if None) for reading.

    Links may lead to `allowed_places` only. Nothing hidden in them is read unless `hidden`: a home directory holds keys there.
    Raises OSError, whose `strerror` says why the file is not read.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder or path.parent))
    place = next((each for each in allowed_places(root) if real.is_relative_to(each)), None)
    if place is None:
        raise OSError(errno.EPERM, f"it is a link to {real}, which is outside of the model's folder {root}")
    if not hidden and any(part.startswith(".") for part in real.relative_to(place).parts):
        raise OSError(errno.EPERM, f"it is, or leads to, the hidden file {real}")
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)  # a FIFO opens at once
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EPERM, "it is not a regular file")
        if status.st_uid not in (0, os.geteuid(), root.stat().st_uid):
            raise OSError(errno.EPERM, f"it belongs to another user (id {status.st_uid}) than its folder")
    except OSError:
        os.close(descriptor)
        raise
    opened.add(str(real))
    return os.fdopen(descriptor, "rb")


def read_model_file(path: Path, folder: Path | None = None, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a small file, as `open_model_file` opens it. Raises OSError."""
    with open_model_file(path, folder) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes >> 20} MiB")
    return data


def read_region(
    file: BufferedReader, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike, region: tuple[slice, ...]
) -> np.ndarray[Any, Any]:
    """A C-contiguous copy of a region, a slice of step 1 for each axis, of the array that begins at byte `start` of a file.

    Raises OSError, also if the file ends before the array.
    """
    ranges = [range(size)[part] for size, part in zip(shape, region, strict=True)]
    copy = np.empty([len(each) for each in ranges], dtype)
    if not copy.size:
        return copy
    row_shape, rows = shape[1:], ranges[0] if ranges else range(1)
    row_bytes = math.prod(row_shape) * copy.itemsize
    if copy.shape[1:] == row_shape:
        _fill(copy, file, start + rows.start * row_bytes)
        return copy
    block = np.empty((min(max(_BLOCK_BYTES // row_bytes, 1), len(rows)), *row_shape), dtype)
    for first in range(0, len(rows), len(block)):
        some = rows[first : first + len(block)]
        _fill(block[: len(some)], file, start + some.start * row_bytes)
        wanted = (slice(len(some)), *region[1:])
        copy[first : first + len(some)] = block[wanted]
    return copy


def _fill(array: np.ndarray[Any, Any], file: BufferedReader, start: int) -> None:
    file.seek(start)
    if file.readinto(array.reshape(-1).view(np.uint8).data) < array.nbytes:
        raise OSError(errno.EIO, "it was cut short while it was read")


def allowed_places(root: Path) -> Iterator[Path]:
    """The folder of a model without links, and the blobs of its repository in a cache of the Hugging Face hub.

    There, `models--X--Y/snapshots/REVISION/FILE` is a link to `models--X--Y/blobs/HASH`.
    """
    yield root
    for folder in (root, *root.parents):
        repository = folder.parent.parent
        if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
            yield repository / "blobs"
