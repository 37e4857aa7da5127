"""Registry of this machine's testbeds, as files, so that any later process can remove one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hearth.errors import BadSetting
from tools.testbed.scenario import Scenario

RUN_DIR = Path("/run/hearth-testbed")
_MAX_SLOTS = 32  # testbeds at a time


class Running(BaseModel):
    """A running or orphaned testbed."""

    model_config = ConfigDict(frozen=True)

    slot: int
    scenario: Scenario
    folder: str
    owner_pid: int  # process with which the testbed ends
    owner_ticks: int | None  # start time of that process, since pids are reused

    @property
    def orphaned(self) -> bool:
        return start_ticks(self.owner_pid) != self.owner_ticks


@contextmanager
def locked() -> Iterator[None]:
    """Lock for claiming slots and removing orphans, across processes."""
    RUN_DIR.mkdir(parents=True, exist_ok=True)
    with (RUN_DIR / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def running_testbeds() -> list[Running]:
    """All running and orphaned testbeds."""
    found = []
    for path in sorted(RUN_DIR.glob("[0-9]*.json"), key=lambda path: int(path.stem)):
        try:
            found.append(Running.model_validate_json(path.read_text()))
        except (ValueError, OSError):  # written by another version, or just removed
            continue
    return found


def claim(scenario: Scenario, folder: Path) -> Running:
    """Claim a free slot while holding `locked`. Raises BadSetting if none is free."""
    slot = next((slot for slot in range(_MAX_SLOTS) if not _path(slot).exists()), None)
    if slot is None:
        raise BadSetting(setting="the testbed", reason=f"{_MAX_SLOTS} of them are up; end one first")
    owner = os.getpid()
    running = Running(slot=slot, scenario=scenario, folder=str(folder), owner_pid=owner, owner_ticks=start_ticks(owner))
    _path(running.slot).write_text(running.model_dump_json())
    return running


def release(slot: int) -> None:
    """Free a slot; it may be free already."""
    _path(slot).unlink(missing_ok=True)


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it has ended, even if not yet reaped."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])


def _path(slot: int) -> Path:
    return RUN_DIR / f"{slot}.json"
