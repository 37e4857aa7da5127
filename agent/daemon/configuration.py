"""The configuration of coordinators that this agent votes in, kept over restarts.

An agent that forgot it would let a coordinator with an old configuration count its vote. If the file cannot be read, the agent
has no vote until a coordinator stores a configuration again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hearth.errors import BadRequest, DiskHung
from hearth.files import write_atomically
from hearth.platform.disk import DiskWork
from hearth.wire.messages import Configuration

log = logging.getLogger(__name__)

_STORE_SECONDS = 5.0  # for the disk to take a configuration; a coordinator waits for 1 s, and asks again


class StoredConfiguration:
    """The latest configuration, in `configuration.json` of the agent's state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "configuration.json"
        self.current: Configuration | None = None
        self._tried: Configuration | None = None  # the last one that the disk has refused
        self._writing = DiskWork(self._path, self._write)
        try:
            self.current = Configuration.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read; this agent has no vote for now: %s", self._path, error)

    async def store(self, configuration: Configuration) -> None:
        """Store a configuration. Raises BadRequest if there is a later one, or another one with the same number.

        If it cannot be written, it holds until this agent ends, and `retry` tries again; an older file is removed, so that
        no older vote is cast. Raises DiskHung while the disk has done neither.
        """
        if configuration != self.current:
            if self.current is not None and configuration.number <= self.current.number:
                reason = f"the configuration {configuration.number} is not later than {self.current.number}"
                raise BadRequest(reason=reason)
            self.current = configuration
            self._writing.ask()
        await self.settled()
        if not self._writing.is_done and configuration != self._tried:
            raise DiskHung(path=str(self._path), seconds=_STORE_SECONDS)

    def retry(self) -> None:
        """Try again to write what could not be written."""
        self._writing.retry()

    async def settled(self) -> None:
        """Wait for the disk to take or refuse the newest configuration, for a moment."""
        await self._writing.settled(_STORE_SECONDS)

    def _write(self) -> bool:
        configuration = self.current
        assert configuration is not None
        try:
            write_atomically(self._path, configuration.model_dump_json(), private=True, durable=True)
        except OSError as error:
            if configuration == self._tried:
                return False
            log.warning("%s cannot be written; it is tried again: %s", self._path, error)
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                # A read-only disk: after a restart, an older vote counts, as that of a device that was away.
                log.warning("%s cannot be removed", self._path)
            self._tried = configuration
            return False
        if configuration == self._tried:
            log.warning("%s is written again", self._path)
        return True
