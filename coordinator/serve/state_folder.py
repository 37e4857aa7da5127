"""The coordinator's state directory as a mark of the coordinator that runs: a lock, and the address of its client port."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from coordinator.serve.config import CoordinatorSettings
from hearth.errors import BadSetting
from hearth.files import FolderInUse, locked_folder, write_atomically
from hearth.platform.network import local_address

log = logging.getLogger(__name__)

_ADDRESS = "address"  # the file


@contextmanager
def locked_state(state_dir: Path) -> Iterator[None]:
    """Lock the state directory, so that two coordinators do not hold the same leases. Raises BadSetting."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(state_dir))
        except FolderInUse as other:
            reason = f"another coordinator (pid {other.pid}) uses {state_dir}"
            raise BadSetting(setting="--state-dir", reason=reason) from None
        except OSError as error:  # a full or read-only disk does not end the service
            log.warning("%s cannot be locked against a second coordinator: %s", state_dir, error)
        yield


def note_address(settings: CoordinatorSettings, port: int) -> None:
    """Write down where this coordinator listens, for `address_of_running`."""
    try:
        write_atomically(settings.state_dir / _ADDRESS, f"{local_address(settings.bind_host, port)}\n")
    except OSError as error:  # as above
        log.warning("the address of this coordinator cannot be written down: %s", error)


def address_of_running(state_dir: Path) -> str | None:
    """The address of the coordinator that uses this directory now; None if none does, or if it has not written it down."""
    if not state_dir.exists():
        return None
    try:
        with locked_folder(state_dir):
            return None
    except FolderInUse:
        with suppress(OSError):
            return (state_dir / _ADDRESS).read_text().strip() or None
    except OSError:  # not readable for this user: whoever serves there says so
        pass
    return None
