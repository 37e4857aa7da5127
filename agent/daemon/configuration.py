"""The configuration of coordinators that this agent votes in, kept over restarts.

An agent that forgot it would let a coordinator with an old configuration count its vote. If the file cannot be read, the agent
has no vote until a coordinator stores a configuration again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from hearth.errors import BadRequest
from hearth.files import write_atomically
from hearth.wire.messages import Configuration

log = logging.getLogger(__name__)


class StoredConfiguration:
    """The latest configuration, in `configuration.json` of the agent's state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "configuration.json"
        self.current: Configuration | None = None
        self._is_written = True  # whether the file holds it
        try:
            self.current = Configuration.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read; this agent has no vote for now: %s", self._path, error)

    def store(self, configuration: Configuration) -> None:
        """Store a configuration. Raises BadRequest if there is a later one, or another one with the same number.

        If it cannot be written, it holds until this agent ends, and `retry` tries again; an older file is removed, so that
        no older vote is cast.
        """
        if configuration == self.current:
            return
        if self.current is not None and configuration.number <= self.current.number:
            raise BadRequest(reason=f"the configuration {configuration.number} is not later than {self.current.number}")
        self.current = configuration
        try:
            self._write(configuration)
        except OSError as error:
            log.warning("%s cannot be written; it is tried again: %s", self._path, error)
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                # A read-only disk: after a restart, an older vote counts, as that of a device that was away.
                log.warning("%s cannot be removed", self._path)

    def retry(self) -> None:
        """Try again to write what could not be written."""
        if not self._is_written and self.current is not None:
            with suppress(OSError):
                self._write(self.current)
                log.warning("%s is written again", self._path)

    def _write(self, configuration: Configuration) -> None:
        self._is_written = False
        write_atomically(self._path, configuration.model_dump_json(), private=True, durable=True)
        self._is_written = True
