"""Records of devices and their health, as seen by one coordinator. Pure: each event returns a new record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from coordinator.devices.quarantine import Quarantine, after_fault
from hearth.errors import DuplicateDevice, HearthError
from hearth.protocol import (
    DEAD_SECONDS,
    HEARTBEAT_SECONDS,
    HEARTBEAT_TIMEOUT_SECONDS,
    LEASE_SECONDS,
    STANDBY_LEASE_SECONDS,
    WIRE_ROUND_TRIP_SECONDS,
)
from hearth.wire.messages import AgentState, AgentWelcome, DeviceInfo, RunningWorker, Telemetry, WorkerStatus

# How long a device whose connection broke may take to accept a new one: the client tries again after 0.1 and 0.3 s.
RECONNECT_SECONDS = 0.6

# How long a device may be silent, from its longest silence of the last minutes: a wired one rarely exceeds the interval of
# heartbeats by much, and Wi-Fi or a busy computer soon show how long theirs are.
_SILENCE_WINDOW_SECONDS = 300.0  # remembered; after a quiet time of this length a device counts as a fast one
_SILENCE_FACTOR = 2.0  # times the longest silence: twice a normal interval on a wired link, which is 1 s
MIN_DEAD_SECONDS = 1.0  # two heartbeats
MAX_DEAD_SECONDS = 4.0  # shorter than the lease
# In which the limit of a new device falls from `DEAD_SECONDS` to what its silences need: the longer it is watched, the less
# probable is a longer one.
_LEARNING_SECONDS = 30.0
# A longer silence of a device that returns is the end of a loss, such as a link that was cut, and not one of those to expect
# when it is well: two seconds more than the longest that is waited for, for the new connection.
_LONGEST_STALL_SECONDS = MAX_DEAD_SECONDS + 2.0
_LEASE_FACTOR = 1.5  # times that time lasts the lease on a device, which is given up before its lease ends
# A device that others wait for must answer in this fraction of that time and these seconds: their wait of at least 0.4 s is a
# second sign of its loss. Together as long as its longest silence if it often is silent for so long, and never below 1 s.
_WITNESSED_FRACTION = 0.3
_WITNESSED_SECONDS = 0.35
# Fraction of that time in which two devices must be able to connect while a step waits, within these limits in seconds. On good
# links it takes milliseconds; with the wait of at least 0.4 s that came before, a link is lost after 1 to 1.3 s.
_CONNECT_FRACTION = 0.6
_MIN_CONNECT_SECONDS = 0.6
_MAX_CONNECT_SECONDS = 0.8
# A device is on a radio or powerline link if even the shortest round trip of its connection is longer than over any wire. Such
# links stall for up to 2 s while the link sends again or changes its rate, also after minutes without any sign of that, so such
# a device gets the longest time from the start.
_LONGEST_RADIO_STALL_SECONDS = 2.0
_SUSPECT_FRACTION = 0.6  # of that time, from which a device is suspect: longer than one interval

# Times and lengths of answers' delays, longest first: those that no later one has exceeded.
Silences: TypeAlias = tuple[tuple[float, float], ...]
Health = Literal["alive", "suspect", "dead", "busy", "refused"]


@dataclass(frozen=True)
class Device:
    """An agent that answered hello. `reason` explains a health other than "alive". Times are in monotonic seconds."""

    welcome: AgentWelcome
    host: str
    port: int
    last_seen: float
    health: Health = "alive"
    reason: str = ""
    state: AgentState | None = None
    telemetry: Telemetry | None = None
    quarantine: Quarantine | None = None  # the last one, which may have ended
    silences: Silences = ()
    watched_since: float = -math.inf
    round_trip_seconds: float | None = None  # the shortest one of its connection in the last minutes
    # The workers that ran here when this coordinator took its lease, by deployment.
    taken_over: Mapping[str, RunningWorker] = field(default_factory=dict)
    disconnected_at: float | None = None  # when its connection broke; None once it has answered again

    @property
    def device_id(self) -> str:
        return self.welcome.device_id

    @property
    def name(self) -> str:
        return self.welcome.name

    @property
    def reachable(self) -> bool:
        """Whether a request can be sent to it now."""
        return self.health != "dead" and self.disconnected_at is None

    @property
    def host_id(self) -> str:
        """Id of the machine, which several agents may share; the device id if unknown."""
        return self.telemetry.host_id if self.telemetry else self.device_id

    @property
    def is_on_radio(self) -> bool:
        """Whether its link is a radio or powerline link, by its round trip; False while that is unknown."""
        return self.round_trip_seconds is not None and self.round_trip_seconds > WIRE_ROUND_TRIP_SECONDS

    @property
    def budget_bytes(self) -> int:
        """Memory that a worker may use, in bytes; 0 if unknown."""
        return self.telemetry.memory_budget_bytes if self.telemetry else 0

    @property
    def store_room_bytes(self) -> int | None:
        """The chunks that its store can take besides those of deployed plans, in bytes; None if unknown."""
        return self.telemetry.store_room_bytes if self.telemetry else None

    def worker(self, deployment: str) -> WorkerStatus | None:
        """The worker of a deployment, as of the last heartbeat."""
        return self.state.worker(deployment) if self.state else None

    def failed_worker(self, deployment: str, epoch: int) -> WorkerStatus | None:
        """The worker of this plan, if it has failed."""
        worker = self.worker(deployment)
        return worker if worker is not None and (worker.state, worker.epoch) == ("failed", epoch) else None

    def is_quarantined(self, now: float) -> bool:
        return self.quarantine is not None and self.quarantine.is_active(now)

    def info(self, now: float) -> DeviceInfo:
        """What users see. The reason of a usable device is that of its quarantine."""
        quarantine = self.quarantine if self.is_quarantined(now) else None
        state = self.state if self.health != "dead" else None  # what it last said of its workers is no longer so
        return DeviceInfo(
            device_id=self.device_id,
            name=self.name,
            host=f"{self.host}:{self.port}",
            state=self.health,
            reason=self.reason or (quarantine.describe(now) if quarantine else ""),
            workers=state.workers if state else (),
            num_abandoned=state.num_abandoned if state else 0,
            num_hung=state.num_hung if state else 0,
            telemetry=self.telemetry,
        )


def after_lease(device: Device, running: Sequence[RunningWorker]) -> Device:
    """The record after this coordinator took the lease. `running` are the workers that it found running."""
    leased = replace(device, health="alive", reason="", taken_over={worker.deployment: worker for worker in running})
    if not running:
        return leased
    ready = tuple(WorkerStatus(deployment=each.deployment, state="ready", epoch=each.epoch) for each in running)
    return replace(leased, state=AgentState(boot_id=device.welcome.boot_id, workers=ready))


def after_heartbeat(device: Device, state: AgentState, now: float, round_trip_seconds: float | None) -> Device:
    """The record after an answered heartbeat."""
    return replace(after_answer(device, now, round_trip_seconds), state=state)


def after_report(device: Device, state: AgentState) -> Device:
    """The record after a report of the workers' states, which says nothing about how long the device was silent."""
    same_run = state.boot_id == device.welcome.boot_id
    return replace(device, state=state) if same_run and device.health in ("alive", "suspect") else device


def after_answer(device: Device, now: float, round_trip_seconds: float | None = None) -> Device:
    """The record after any answer: alive. `round_trip_seconds`: the shortest one of its connection, None if unknown."""
    return replace(
        device, last_seen=now, health="alive", reason="", disconnected_at=None,
        silences=add_silence(device.silences, now, now - device.last_seen),
        round_trip_seconds=round_trip_seconds if round_trip_seconds is not None else device.round_trip_seconds,
    )  # fmt: skip


def silences_at_return(previous: Device | None, welcome: AgentWelcome, now: float) -> Silences:
    """The silences of a device that says hello again. If it was given up although it ran, that silence counts.

    One that no limit would have covered does not: it would delay the notice of the next loss, and prevent none.
    """
    if previous is None:
        return ()
    silence_seconds = now - previous.last_seen
    if previous.welcome.boot_id != welcome.boot_id or silence_seconds > _LONGEST_STALL_SECONDS:
        return previous.silences
    return add_silence(previous.silences, now, silence_seconds)


def add_silence(silences: Silences, now: float, seconds: float) -> Silences:
    """The silences with a new one; those that are older than the window, or shorter than the new one, no longer matter."""
    kept = ((at, length) for at, length in silences if length > seconds and now - at < _SILENCE_WINDOW_SECONDS)
    return (*kept, (now, seconds))


def dead_seconds(device: Device, now: float) -> float:
    """Seconds without an answer after which the device is dead."""
    if device.is_on_radio:
        return MAX_DEAD_SECONDS
    if not device.silences:
        return DEAD_SECONDS
    learned = min((now - device.watched_since) / _LEARNING_SECONDS, 1.0)
    cautious = DEAD_SECONDS - learned * (DEAD_SECONDS - MIN_DEAD_SECONDS)
    return max(min(_SILENCE_FACTOR * _longest(device.silences, now), MAX_DEAD_SECONDS), cautious)


def _longest(silences: Silences, now: float) -> float:
    return max((length for at, length in silences if now - at < _SILENCE_WINDOW_SECONDS), default=0.0)


def lease_seconds(device: Device, shortest: float, now: float) -> float:
    """How long a lease on the device lasts if a standby waits for its end: longer if it often is silent, at most 5 s.

    `shortest`: that of a device which is never silent for long, or new.
    """
    if now - device.watched_since < _LEARNING_SECONDS and not device.is_on_radio:  # its silences are not known yet
        return shortest
    return min(max(_LEASE_FACTOR * dead_seconds(device, now), shortest), LEASE_SECONDS)


def lease_after_silences(silences: Silences, now: float) -> float:
    """How long a lease lasts that such silences do not end, at most 5 s."""
    return min(max(_LEASE_FACTOR * _SILENCE_FACTOR * _longest(silences, now), STANDBY_LEASE_SECONDS), LEASE_SECONDS)


def witnessed_seconds(device: Device, now: float, num_witnesses: int) -> float:
    """Seconds in which a device must answer that this many others wait for: longer if it is only one."""
    if device.is_on_radio:
        return _WITNESSED_SECONDS + _LONGEST_RADIO_STALL_SECONDS
    patience = _WITNESSED_FRACTION * dead_seconds(device, now)
    return _WITNESSED_SECONDS + patience * (1 if num_witnesses > 1 else 2)


def connect_seconds(one: Device, other: Device, now: float) -> float:
    """Seconds in which two devices must be able to connect, if a step waits for their link."""
    if one.is_on_radio or other.is_on_radio:
        return _MAX_CONNECT_SECONDS + _LONGEST_RADIO_STALL_SECONDS
    patience = _CONNECT_FRACTION * max(dead_seconds(one, now), dead_seconds(other, now))
    return min(max(patience, _MIN_CONNECT_SECONDS), _MAX_CONNECT_SECONDS)


def after_missed_heartbeat(device: Device, now: float) -> Device:
    """The record after a missed heartbeat: alive, then suspect, then dead."""
    silence_seconds = now - device.last_seen
    if device.health in ("busy", "refused"):
        return device
    if device.disconnected_at is not None and now - device.disconnected_at >= RECONNECT_SECONDS:
        return replace(device, health="dead", reason="its connection broke, and it accepts no new one")
    limit_seconds = dead_seconds(device, now)
    if silence_seconds < _SUSPECT_FRACTION * limit_seconds:
        return device
    health: Health = "dead" if silence_seconds >= limit_seconds else "suspect"
    return replace(device, health=health, reason=f"no answer for {silence_seconds:.1f} s")


def after_witnesses(device: Device, seconds: float) -> Device:
    """The record of a device that others wait for, and that did not answer within `seconds`: dead."""
    return replace(device, health="dead", reason=f"its peers wait for it, and it did not answer within {seconds:.1f} s")


def after_connection_lost(device: Device, now: float) -> Device:
    """The record after its connection broke: suspect, and out of plans until it answers again."""
    if device.health not in ("alive", "suspect") or device.disconnected_at is not None:
        return device
    return replace(device, health="suspect", reason="its connection broke", disconnected_at=now)


def next_heartbeat(device: Device, now: float) -> tuple[float, float]:
    """`(pause before the next heartbeat, timeout of its answer)`, in seconds.

    After a missed heartbeat, or a broken connection, the next follows almost at once. No timeout extends past the time when
    the device is dead.
    """
    silence_seconds = now - device.last_seen
    remaining = dead_seconds(device, now) - silence_seconds
    if device.disconnected_at is not None:
        remaining = min(remaining, device.disconnected_at + RECONNECT_SECONDS - now)
    at_once = device.disconnected_at is not None or silence_seconds >= HEARTBEAT_SECONDS
    pause = 0.05 if at_once else HEARTBEAT_SECONDS
    return pause, min(HEARTBEAT_TIMEOUT_SECONDS, max(remaining - pause, 0.05))


def after_refusal(device: Device, health: Literal["busy", "refused"], reason: str) -> Device:
    """The record of an agent that answers but refuses this coordinator."""
    return replace(device, health=health, reason=reason)


def after_device_fault(device: Device, error: HearthError, now: float, may_restart: bool = False) -> Device:
    """The record after a fault of this device: quarantined, if plans should avoid it for a while (see `after_fault`)."""
    return replace(device, quarantine=after_fault(device.quarantine, error, now, may_restart))


def after_pardon(device: Device, now: float) -> Device:
    """The record after its quarantine was ended, because the device is needed."""
    return replace(device, quarantine=replace(device.quarantine, until=now) if device.quarantine else None)


def check_device_id_unique(known: Device | None, welcome: AgentWelcome, host: str, port: int) -> None:
    """Raise DuplicateDevice if another agent claims the id of a known device that is not dead."""
    if known is None or known.welcome.boot_id == welcome.boot_id or known.health == "dead":
        return
    if (known.host, known.port) == (host, port):
        return  # the same agent after a restart
    first, second = f"{known.name} ({known.host}:{known.port})", f"{welcome.name} ({host}:{port})"
    raise DuplicateDevice(device_id=welcome.device_id, first=first, second=second)


def sorted_by_name(devices: Iterable[Device]) -> list[Device]:
    """Devices sorted by name, then id: a stable order for display and plans."""
    return sorted(devices, key=lambda device: (device.name, device.device_id))


def usable(devices: list[Device], now: float) -> list[Device]:
    """Devices that a plan may use, by name: connected, alive or suspect, and not quarantined.

    If all of them are quarantined: those of the lowest degree (`Quarantine.degree`).
    """
    alive = (device for device in sorted_by_name(devices) if device.health in ("alive", "suspect"))
    connected = [device for device in alive if device.disconnected_at is None]
    lowest = min((_degree(device, now) for device in connected), default=(0, 0))
    return [device for device in connected if _degree(device, now) == lowest]


def needed_despite_quarantine(devices: list[Device], now: float) -> list[Device]:
    """The quarantined devices of the lowest degree, for a model that does not fit without them."""
    known = [device for device in sorted_by_name(devices) if device.is_quarantined(now) and device.reachable]
    lowest = min((_degree(device, now) for device in known), default=(0, 0))
    return [device for device in known if _degree(device, now) == lowest]


def _degree(device: Device, now: float) -> tuple[int, int]:
    """The degree of the device's quarantine, `(0, 0)` without one."""
    if device.quarantine is None or not device.is_quarantined(now):
        return 0, 0
    return device.quarantine.degree
