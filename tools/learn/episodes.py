"""Episodes: place all operators, one by one, in lockstep for B episodes, and record all that training needs.

Shape letters as in `instance` and `clock`, and T steps: one for each operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tools.learn.clock import DeviceOptions, EpisodeClock
from tools.learn.instance import Floats, Indices, Instance, Mask, Singles


class Placement(NamedTuple):
    """The outcome of an episode: the device of every operator, and the order in which they were placed."""

    assignment: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """B complete episodes. The teacher is Critical Path: its choices are all that tie."""

    operators_TB: Indices
    devices_TB: Indices
    candidates_TBN: Mask
    allowed_TBK: Mask
    features_TBKD: Singles
    taught_operators_TBN: Mask  # candidates with the greatest b-level
    taught_devices_TBK: Mask  # devices with room on which the chosen operator starts first
    partial_TBNX: Singles | None  # features of the partial assignment, for message passing per step
    fits_B: Mask

    def placements(self) -> list[Placement]:
        """The outcome of each episode."""
        assignment_BN = np.empty_like(self.operators_TB.T)
        np.put_along_axis(assignment_BN, self.operators_TB.T, self.devices_TB.T, axis=1)
        orders = self.operators_TB.T.tolist()
        return [Placement(tuple(a), tuple(o)) for a, o in zip(assignment_BN.tolist(), orders, strict=True)]


class Chooser(Protocol):
    """Decides the steps of B episodes: an operator of each, then a device for it."""

    def operators(self, clock: EpisodeClock, taught_BN: Mask, partial_BNX: Singles | None) -> Indices:
        """A candidate of each episode."""

    def devices(self, operators_B: Indices, options: DeviceOptions, taught_BK: Mask) -> Indices:
        """A device for the operator of each episode."""


def run_episodes(instance: Instance, chooser: Chooser, num_episodes: int, per_step: bool = False) -> Trace:
    """Place all operators in each of the episodes; `per_step` adds features of the partial assignment."""
    clock = EpisodeClock(instance, num_episodes)
    steps, partial_steps = [], []
    for _ in range(instance.problem.num_operators):
        partial_BNX = clock.partial_assignment() if per_step else None
        candidates_BN = clock.candidates_BN.copy()
        taught_BN = _greatest(instance.b_levels_N, candidates_BN)
        operators_B = chooser.operators(clock, taught_BN, partial_BNX)
        options = clock.options(operators_B)
        taught_BK = _greatest(-options.starts_BK, options.allowed_BK)
        devices_B = chooser.devices(operators_B, options, taught_BK)
        clock.place(operators_B, devices_B, options)
        steps.append(
            (operators_B, devices_B, candidates_BN, options.allowed_BK, options.features_BKD, taught_BN, taught_BK)
        )
        if partial_BNX is not None:
            partial_steps.append(partial_BNX)
    operators, devices, candidates, allowed, features, taught, taught_devices = map(np.stack, zip(*steps, strict=True))
    partial = np.stack(partial_steps) if per_step else None
    return Trace(operators, devices, candidates, allowed, features, taught, taught_devices, partial, clock.fits_B)


class Repeat:
    """Repeats known placements, so that measured ones can be learnt from."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._orders_BT = np.array([placement.order for placement in placements], np.int64)
        self._assignment_BN = np.array([placement.assignment for placement in placements], np.int64)
        self._step = 0

    def operators(self, clock: EpisodeClock, taught_BN: Mask, partial_BNX: Singles | None) -> Indices:
        """The next operator of each order. Raises ValueError if it precedes one of its inputs."""
        operators_B = self._orders_BT[:, self._step]
        if not np.take_along_axis(clock.candidates_BN, operators_B[:, None], axis=1).all():
            raise ValueError("an order lists every operator once, after the operators that it depends on")
        self._step += 1
        return operators_B

    def devices(self, operators_B: Indices, options: DeviceOptions, taught_BK: Mask) -> Indices:
        return np.take_along_axis(self._assignment_BN, operators_B[:, None], axis=1)[:, 0]


def _greatest(values: Floats, allowed: Mask) -> Mask:
    among = np.where(allowed, values, -np.inf)
    greatest: Mask = allowed & (among == among.max(axis=1, keepdims=True))
    return greatest
