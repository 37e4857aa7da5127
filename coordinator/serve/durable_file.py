"""A small file that must survive power cuts and failing disks: it has a second copy, and its content stays in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from hearth.files import write_atomically

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # interval of attempts to write what could not be written: a full disk is emptied within minutes

_T = TypeVar("_T")


class DurableFile(Generic[_T]):
    """`path` and its second copy `path.bak`. `parse` reads the content; it raises ValueError if that is damaged.

    A write that fails is reported once and tried again by the next `write` or `retry`; callers go on with the content in
    memory.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], _T]) -> None:
        self.path = path
        self._copy = path.with_name(f"{path.name}.bak")
        self._parse = parse
        self._unsaved: str | None = None  # content that could not be written

    @property
    def is_saved(self) -> bool:
        """Whether both copies hold the newest content."""
        return self._unsaved is None

    def read(self) -> _T | None:
        """The content of the first copy that can be read; None if there is none. A damaged copy is renamed and replaced."""
        for path in (self.path, self._copy):
            try:
                data = path.read_bytes()
                content = self._parse(data)
            except FileNotFoundError:
                continue
            except (ValueError, OSError) as error:
                self._set_aside(path, error)
                continue
            if path is self._copy:
                log.warning("%s is used instead of %s", path, self.path)
                self.write(data.decode())
            return content
        return None

    def write(self, content: str) -> None:
        """Write both copies, one after the other, so that a power cut leaves one intact."""
        was_saved = self.is_saved
        try:
            for path in (self.path, self._copy):
                write_atomically(path, content, durable=True)
        except OSError as error:
            self._unsaved = content
            if was_saved:
                log.warning("%s cannot be written; it is kept in memory and tried again: %s", self.path, error)
            return
        self._unsaved = None
        if not was_saved:
            log.warning("%s is written again", self.path)

    def retry(self) -> None:
        """Try again to write what could not be written."""
        if self._unsaved is not None:
            self.write(self._unsaved)

    def _set_aside(self, path: Path, error: Exception) -> None:
        kept = path.with_suffix(".unreadable" if path is self.path else ".bak.unreadable")
        log.warning("%s cannot be read and is renamed to %s: %s", path, kept.name, error)
        try:
            path.replace(kept)
        except OSError as failure:  # for instance a read-only disk
            log.warning("%s cannot be renamed: %s", path, failure)
