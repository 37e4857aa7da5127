"""What the loss of each device of a plan would cost: whether the others can serve the model, and how long they pause. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hearth.platform.units import format_bytes

MAX_EXAMINED_DEVICES = 8  # of a plan; each costs a plan of the others
# What a survivor reads of an SD card in a second; a disk or the page cache is faster.
_READ_BYTES_PER_SECOND = 40e6
# To start or change workers, connect them and run a first small request, with a plan made ahead: measured on a PC.
_START_SECONDS = 0.3


class Loss(NamedTuple):
    """The loss of one device, by name. `load_bytes`: of weights, that one of the others must load then, at most."""

    device: str
    reason: str = ""  # why the others cannot serve the model; empty if they can
    load_bytes: int = 0


def describe_refusals(reasons: Mapping[str, str]) -> str:
    """The devices that cannot be lost, by name, with the reason for each."""
    return f"cannot lose {', '.join(f'{name} ({reason})' for name, reason in reasons.items())}"


def describe_losses(losses: Sequence[Loss], notice_seconds: float) -> str:
    """Whether any one device may be lost, and the predicted pause. `notice_seconds`: until the loss of a process is noticed."""
    if refused := {loss.device: loss.reason for loss in losses if loss.reason}:
        return describe_refusals(refused)
    num_bytes = max((loss.load_bytes for loss in losses), default=0)
    read_seconds = num_bytes / _READ_BYTES_PER_SECOND
    total = notice_seconds + read_seconds + _START_SECONDS
    return (
        f"yes, any one device; predicted pause about {total:.1f} s: {notice_seconds:.1f} s to notice it (1 to 4 s if the "
        f"device falls silent), {read_seconds:.1f} s to read {format_bytes(num_bytes)} of weights from an SD card, "
        f"{_START_SECONDS:.1f} s to start"
    )
