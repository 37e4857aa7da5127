"""A disk that hangs when a test wants it to: a file system in an image, whose writers the kernel holds while it is frozen."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BYTES = 256 << 20  # of a sparse file: an agent leaves 64 MiB of it free
_LONGEST_SECONDS = 90  # a process of its own ends the freeze then, whatever becomes of the test


class FrozenDisk:
    """The file system of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold everything that writes, until the block ends."""
        thaw = ["fsfreeze", "--unfreeze", str(self.folder)]
        watchdog = subprocess.Popen(
            ["sh", "-c", f'sleep {_LONGEST_SECONDS}; "$@"', "sh", *thaw], start_new_session=True
        )
        try:
            subprocess.run(["fsfreeze", "--freeze", str(self.folder)], check=True)
            yield
        finally:
            subprocess.run(thaw, check=False)
            os.killpg(watchdog.pid, 9)
            watchdog.wait()


@contextmanager
def frozen_disk(folder: Path, image: Path) -> Iterator[FrozenDisk]:
    """A disk mounted at `folder` until the context ends. Skips the test where that is not permitted."""
    if os.geteuid() != 0:
        pytest.skip("mounting and freezing a file system needs root")
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(_BYTES)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a disk that can be frozen cannot be made here: {error}")
    try:
        yield FrozenDisk(folder)
    finally:
        if subprocess.run(["umount", str(folder)], check=False).returncode:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
