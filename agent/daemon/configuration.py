"""The configuration of coordinators that this agent votes in, kept over restarts.

An agent that forgot it would let a coordinator with an old configuration count its vote. If the file cannot be read, the agent
has no vote until a coordinator stores a configuration again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from hearth.errors import BadRequest, DiskHung
from hearth.files import write_atomically
from hearth.platform.disk import DiskWork
from hearth.wire.messages import Configuration

log = logging.getLogger(__name__)

STORE_SECONDS = 5.0  # for the disk to take a configuration; a coordinator waits for 1 s, and asks again


class StoredConfiguration:
    """The latest configuration, in `configuration.json` of the agent's state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "configuration.json"
        self.current: Configuration | None = None
        self._refused: Configuration | None = None  # by the disk
        self.writing = DiskWork(self._path, self._write)
        try:
            self.current = Configuration.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read; this agent has no vote for now: %s", self._path, error)

    async def store(self, configuration: Configuration) -> None:
        """Store a configuration. Raises BadRequest if there is a later one, or another one with the same number.

        If it cannot be written, it holds until this agent ends, and `writing.retry` tries again; an older file is removed, so
        that no older vote is cast. Raises DiskHung while the disk has done neither.
        """
        if configuration != self.current:
            if self.current is not None and configuration.number <= self.current.number:
                reason = f"the configuration {configuration.number} is not later than {self.current.number}"
                raise BadRequest(reason=reason)
            self.current = configuration
            self.writing.ask()
        await self.writing.settled(STORE_SECONDS)
        if not self.writing.is_done and configuration != self._refused:
            raise DiskHung(path=str(self._path), seconds=STORE_SECONDS)

    def _write(self) -> None:
        configuration = self.current
        assert configuration is not None
        try:
            write_atomically(self._path, configuration.model_dump_json(), private=True, durable=True)
        except OSError:
            # If that fails, too, on a read-only disk, an older vote counts after a restart, as that of a device that was away.
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._refused = configuration
            raise
