"""A shared transmission medium, such as the air of a Wi-Fi access point or a house's power lines: when a frame arrives. Pure.

All stations of a medium take turns on it, so a frame waits until those before it are through. It takes bytes / rate of the
medium's time, then the link's delay, which varies. Frames that were damaged are sent again by the link itself, as Wi-Fi and
powerline adapters do: a station sees them later, not lost. Frames of one station and direction keep their order. Between two
stations a frame crosses the medium twice, since it goes by way of the access point.
"""

from __future__ import annotations

import math
from random import Random

from pydantic import BaseModel, ConfigDict, Field

PACKET_BYTES = 1500  # the link sends packets of this size; a frame that is handed over may hold several
# Frames that may wait for the medium, by station and direction: what an access point's queue management leaves. Beyond this,
# frames are dropped, so that TCP slows down.
QUEUE_BYTES = 256 << 10
_BURST_SECONDS = 2e-3  # time that an idle medium may catch up, because a busy machine handles frames late


class Medium(BaseModel):
    """A medium's settings. Delays are one way and per crossing; probabilities are per packet of `PACKET_BYTES`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,9}$")
    mbit: float = Field(gt=0, le=100_000)  # of all its stations together
    delay_ms: float = Field(default=0.0, ge=0, le=10_000)
    # The delay is uniform between delay - jitter and delay + jitter.
    jitter_ms: float = Field(default=0.0, ge=0, le=10_000)
    resent: float = Field(default=0.0, ge=0, lt=1)  # probability that the link sends a packet again
    resent_ms: tuple[float, float] = (5.0, 30.0)  # what that adds to the delay: uniform between these
    lost: float = Field(default=0.0, ge=0, lt=1)  # probability that a packet is lost for good
    stalls_per_minute: float = Field(default=0.0, ge=0, le=60)  # on average; nothing is sent during a stall
    stall_seconds: tuple[float, float] = (0.5, 2.0)  # uniform between these


class Air:
    """The state of a medium: hands out arrival times. Times are in seconds of any one monotonic clock."""

    def __init__(self, medium: Medium, chance: Random, now: float) -> None:
        self._medium = medium
        self._chance = chance
        self._free_at = now  # when all frames before are through
        self._next_stall = self._stall_after(now)
        self._last: dict[object, float] = {}  # by station and direction: the latest arrival

    def arrival(self, way: object, num_bytes: int, now: float) -> float | None:
        """When a frame of this size, handed over `now`, arrives; None if it is lost. `way`: its station and direction."""
        medium, chance = self._medium, self._chance
        packets = max(math.ceil(num_bytes / PACKET_BYTES), 1)
        if self._happens(medium.lost, packets):
            return None
        start = max(now - _BURST_SECONDS, self._free_at)
        while start >= self._next_stall:
            over = self._next_stall + chance.uniform(*medium.stall_seconds)
            start = max(start, over)
            self._next_stall = self._stall_after(over)
        takes = num_bytes * 8e-6 / medium.mbit
        self._free_at = start + takes
        delay = medium.delay_ms + chance.uniform(-medium.jitter_ms, medium.jitter_ms)
        if self._happens(medium.resent, packets):
            delay += chance.uniform(*medium.resent_ms)
        found = max(max(self._free_at, now + takes) + max(delay, 0.0) / 1e3, self._last.get(way, now))
        self._last[way] = found
        return found

    def _happens(self, probability: float, packets: int) -> bool:
        """Whether something of this probability happens to at least one of so many packets."""
        return probability > 0 and self._chance.random() >= (1 - probability) ** packets

    def _stall_after(self, time: float) -> float:
        rate = self._medium.stalls_per_minute / 60
        return time + self._chance.expovariate(rate) if rate else math.inf


class Queues:
    """Bytes that wait for a medium, by station and direction; a frame that does not fit is dropped."""

    def __init__(self, limit_bytes: int = QUEUE_BYTES) -> None:
        self._limit = limit_bytes
        self._waiting: dict[object, int] = {}

    def enter(self, way: object, num_bytes: int) -> bool:
        """Take a frame in; False if the queue has no room. An empty queue takes any frame."""
        waiting = self._waiting.get(way, 0)
        if waiting and waiting + num_bytes > self._limit:
            return False
        self._waiting[way] = waiting + num_bytes
        return True

    def leave(self, way: object, num_bytes: int) -> None:
        self._waiting[way] -= num_bytes
