"""Memory and processor time of a device that other deployments use and a new plan cannot. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from coordinator.devices.registry import Device


class Taken(NamedTuple):
    """What other deployments take of one device."""

    num_bytes: int = 0  # of memory, besides what is no longer part of its budget
    load: float = 0.0  # share of the processor time of its compute threads

    @property
    def slowdown(self) -> float:
        """The factor on the seconds of a computation."""
        return 1.0 / (1.0 - self.load)


def nothing_taken(device: Device) -> Taken:
    """There are no other deployments."""
    return Taken()


def left_bytes(device: Device, taken: Callable[[Device], Taken]) -> int:
    """The memory of a device that a plan may use."""
    return max(device.budget_bytes - taken(device).num_bytes, 0)
