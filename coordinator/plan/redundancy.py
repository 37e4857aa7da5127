"""What the loss of each device of a plan would cost: whether the others can serve the model, and how long they pause. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from coordinator.plan.stores import Stored
from hearth.platform.units import format_bytes

MAX_EXAMINED_DEVICES = 8  # of a plan; each costs a plan of the others
# What a survivor reads of an SD card in a second; a disk or the page cache is faster.
_READ_BYTES_PER_SECOND = 40e6
# To start or change workers, connect them and run a first small request, with a plan made ahead: measured on a PC.
_START_SECONDS = 0.3


class Loss(NamedTuple):
    """The loss of one device, by name. `lacking`: the chunks that the others need then and do not hold."""

    device: str
    reason: str = ""  # why the others cannot serve the model; empty if they can
    lacking: Stored = MappingProxyType({})

    @property
    def load_bytes(self) -> int:
        """Bytes of weights that one of the others must load, at most."""
        return max((sum(chunks.values()) for chunks in self.lacking.values()), default=0)

    @property
    def spare_bytes(self) -> int:
        """Bytes of weights that all others need in addition."""
        return sum(sum(chunks.values()) for chunks in self.lacking.values())


def pause_seconds(load_bytes: float, notice_seconds: float) -> float:
    """The predicted pause at a loss, if one device reads this many bytes of weights, and the others no more."""
    return notice_seconds + load_bytes / _READ_BYTES_PER_SECOND + _START_SECONDS


def describe_refusals(reasons: Mapping[str, str]) -> str:
    """The devices that cannot be lost, by name, with the reason for each."""
    return f"cannot lose {', '.join(f'{name} ({reason})' for name, reason in reasons.items())}"


def describe_losses(losses: Sequence[Loss], notice_seconds: float) -> str:
    """Whether any one device may be lost, and the predicted pause. `notice_seconds`: until the loss of a process is noticed."""
    if refused := {loss.device: loss.reason for loss in losses if loss.reason}:
        return describe_refusals(refused)
    num_bytes = max((loss.load_bytes for loss in losses), default=0)
    read_seconds = num_bytes / _READ_BYTES_PER_SECOND
    total = pause_seconds(num_bytes, notice_seconds)
    return (
        f"yes, any one device; predicted pause about {total:.1f} s: {notice_seconds:.1f} s to notice it (1 to 4 s if the "
        f"device falls silent), {read_seconds:.1f} s to read {format_bytes(num_bytes)} of weights from an SD card, "
        f"{_START_SECONDS:.1f} s to start"
    )


def describe_spares(losses: Sequence[Loss]) -> str:
    """The bytes of weights that the others store ahead for the loss of each device that may be lost, and of all together.

    Empty if no device may be lost. A chunk that several losses need on one device counts once in the total.
    """
    possible = [loss for loss in losses if not loss.reason]
    if not possible:
        return ""
    together: dict[tuple[str, Hashable], int] = {
        (device, key): num_bytes
        for loss in possible
        for device, chunks in loss.lacking.items()
        for key, num_bytes in chunks.items()
    }
    each = ", ".join(f"{format_bytes(loss.spare_bytes)} for {loss.device}" for loss in possible)
    return f"{each}; {format_bytes(sum(together.values()))} on all disks together"
