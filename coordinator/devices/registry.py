"""The devices of the home, as seen by one coordinator. Pure: events in, a new record out; `now` is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hearth.errors import DuplicateDevice
from hearth.wire.messages import AgentState, AgentWelcome, DeviceInfo, Telemetry, WorkerStatus

# Wi-Fi routinely loses a second; three are no accident (DESIGN.md "When things go wrong").
HEARTBEAT_SECONDS = 0.5
SUSPECT_SECONDS = 1.5
DEAD_SECONDS = 3.0
_BEAT_SECONDS = 0.75  # one heartbeat's answer may take this long, so that several fit in before a device is dead
# A device whose worker died may only have run out of memory once: it is left out of plans for this long.
WORKER_PENALTY_SECONDS = 60.0

Health = Literal["alive", "suspect", "dead", "busy", "refused"]


@dataclass(frozen=True)
class Device:
    """One agent that said hello. `reason` explains a health other than alive."""

    welcome: AgentWelcome
    host: str
    port: int
    last_seen: float
    health: Health = "alive"
    reason: str = ""
    state: AgentState | None = None
    telemetry: Telemetry | None = None
    penalty_until: float = 0.0

    @property
    def device_id(self) -> str:
        return self.welcome.device_id

    @property
    def name(self) -> str:
        return self.welcome.name

    @property
    def host_id(self) -> str:
        """Of the machine, which several agents may share."""
        return self.telemetry.host_id if self.telemetry else self.device_id

    @property
    def budget_bytes(self) -> int:
        """Memory that a worker may use."""
        return self.telemetry.memory_budget_bytes if self.telemetry else 0

    def worker(self, deployment: str) -> WorkerStatus | None:
        """The worker of a deployment, as the last heartbeat said."""
        return self.state.worker(deployment) if self.state else None

    def failed_worker(self, deployment: str, epoch: int) -> WorkerStatus | None:
        """The worker of this plan, if it has failed."""
        worker = self.worker(deployment)
        return worker if worker is not None and (worker.state, worker.epoch) == ("failed", epoch) else None

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            device_id=self.device_id,
            name=self.name,
            host=f"{self.host}:{self.port}",
            state=self.health,
            reason=self.reason,
            workers=self.state.workers if self.state else (),
            telemetry=self.telemetry,
        )


def answered(device: Device, state: AgentState, now: float) -> Device:
    """A heartbeat came back."""
    return replace(device, state=state, last_seen=now, health="alive", reason="")


def silent(device: Device, now: float) -> Device:
    """A heartbeat did not come back: alive, then suspect, then dead."""
    quiet = now - device.last_seen
    if device.health in ("busy", "refused") or quiet < SUSPECT_SECONDS:
        return device
    health: Health = "dead" if quiet >= DEAD_SECONDS else "suspect"
    return replace(device, health=health, reason=f"no answer for {quiet:.1f} s")


def next_beat(device: Device, now: float) -> tuple[float, float]:
    """`(pause before the next heartbeat, how long to wait for its answer)`.

    Once one was missed the next follows at once, and none waits beyond the moment at which the device is dead.
    """
    quiet = now - device.last_seen
    pause = HEARTBEAT_SECONDS if quiet < HEARTBEAT_SECONDS else 0.05
    return pause, min(_BEAT_SECONDS, max(DEAD_SECONDS - quiet - pause, 0.05))


def refused(device: Device, health: Literal["busy", "refused"], reason: str) -> Device:
    """The agent answers, but not to us."""
    return replace(device, health=health, reason=reason)


def punished(device: Device, now: float) -> Device:
    """Its worker died: leave it out of plans for a while."""
    return replace(device, penalty_until=now + WORKER_PENALTY_SECONDS)


def check_unique(known: Device | None, welcome: AgentWelcome, host: str, port: int) -> None:
    """Raise DuplicateDevice when a second, living agent claims the id of one that we know."""
    if known is None or known.welcome.boot_id == welcome.boot_id or known.health == "dead":
        return
    if (known.host, known.port) == (host, port):
        return  # the same agent, started anew
    raise DuplicateDevice(
        device_id=welcome.device_id,
        first=f"{known.name} ({known.host}:{known.port})",
        second=f"{welcome.name} ({host}:{port})",
    )


def by_name(devices: Iterable[Device]) -> list[Device]:
    """In the order in which people and plans see them, whoever answered first."""
    return sorted(devices, key=lambda device: (device.name, device.device_id))


def usable(devices: list[Device], now: float) -> list[Device]:
    """The devices that a plan may use, by name: alive and not punished; if all are punished, all that are alive."""
    alive = [device for device in by_name(devices) if device.health in ("alive", "suspect")]
    return [device for device in alive if device.penalty_until <= now] or alive
