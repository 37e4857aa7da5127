"""Episodes of Doppler's policies: place all operators, one by one, in lockstep for B episodes, and record each step.

The clock is the paper's: operators start as soon as their device has finished what was placed before and their inputs have
arrived; transfers do not contend. Shape letters as in `instance`, and B episodes, D device features, T steps: one for each
operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tools.research.instance import Floats, Indices, Instance, Mask, Singles, standardised

NUM_DEVICE_FEATURES = 5


class DeviceOptions(NamedTuple):
    """The devices for one operator of each episode."""

    features_BKD: Singles  # standardised over devices
    starts_BK: Floats  # earliest start
    allowed_BK: Mask  # devices with room in memory


class EpisodeClock:
    """State of B episodes: candidates, devices and times of placed operators, and free memory.

    Where no device has room, those with the most free bytes are allowed and the episode no longer `fits_B`.
    """

    def __init__(self, instance: Instance, num_episodes: int) -> None:
        n, num_devices = instance.seconds_NK.shape
        self._instance = instance
        self._episodes = np.arange(num_episodes)
        self.candidates_BN = np.tile(instance.num_predecessors_N == 0, (num_episodes, 1))
        self.fits_B = np.ones(num_episodes, np.bool_)
        # One more column for the padding of tables: it is on no device and takes no time.
        self._waits_BN = np.tile(np.append(instance.num_predecessors_N, 2 * n), (num_episodes, 1))
        self._device_BN = np.full((num_episodes, n + 1), num_devices, np.int64)
        self._starts_BN = np.zeros((num_episodes, n + 1))
        self._ends_BN = np.zeros((num_episodes, n + 1))
        self._load_BK = np.zeros((num_episodes, num_devices))
        self._free_at_BK = np.zeros((num_episodes, num_devices))
        self._free_bytes_BK = np.tile(instance.budget_K, (num_episodes, 1))
        self._held_BKG = np.zeros((num_episodes, num_devices, len(instance.shared_bytes_G)), np.bool_)
        # A row for each device that an input is on; the last row is for padding, which is on none.
        self._is_device = np.eye(num_devices + 1, num_devices, dtype=np.bool_)
        self._binds = instance.memory_binds

    def options(self, operators_B: Indices) -> DeviceOptions:
        """Features, earliest starts and room of every device for one candidate of each episode."""
        instance, rows_B1 = self._instance, self._episodes[:, None]
        inputs_BP = instance.inputs_NP[operators_B]
        device_BP = self._device_BN[rows_B1, inputs_BP]
        starts_BP, ends_BP = self._starts_BN[rows_B1, inputs_BP], self._ends_BN[rows_B1, inputs_BP]
        transfer_BPK = instance.transfer_FKK[instance.input_flows_NP[operators_B], device_BP]
        starts_BK = np.maximum(self._free_at_BK, (ends_BP[:, :, None] + transfer_BPK).max(axis=1))
        here_BPK = self._is_device[device_BP]
        first_BK = np.where(here_BPK, starts_BP[:, :, None], np.inf).min(axis=1)
        features_BKD = np.stack(
            [
                self._load_BK,
                np.where(here_BPK, (ends_BP - starts_BP)[:, :, None], 0.0).sum(axis=1),
                np.where(np.isinf(first_BK), 0.0, first_BK),
                np.where(here_BPK, ends_BP[:, :, None], 0.0).max(axis=1),
                starts_BK,
            ],
            axis=2,
        )
        return DeviceOptions(
            standardised(features_BKD, 1).astype(np.float32), starts_BK, self._allowed(operators_B, starts_BK)
        )

    def place(self, operators_B: Indices, devices_B: Indices, options: DeviceOptions) -> None:
        """Place one candidate of each episode on a device, and update candidates."""
        instance, rows = self._instance, self._episodes
        seconds_B = instance.seconds_NK[operators_B, devices_B]
        starts_B = options.starts_BK[rows, devices_B]
        self._device_BN[rows, operators_B] = devices_B
        self._starts_BN[rows, operators_B] = starts_B
        self._ends_BN[rows, operators_B] = starts_B + seconds_B
        self._load_BK[rows, devices_B] += seconds_B
        self._free_at_BK[rows, devices_B] = starts_B + seconds_B
        if self._binds:
            needed_BK = self._needed_bytes(operators_B)
            self.fits_B &= needed_BK[rows, devices_B] <= self._free_bytes_BK[rows, devices_B]
            self._free_bytes_BK[rows, devices_B] -= needed_BK[rows, devices_B]
            self._held_BKG[rows, devices_B] |= instance.shared_NG[operators_B]
        self.candidates_BN[rows, operators_B] = False
        successors_BS = instance.successors_NS[operators_B]
        self._waits_BN[rows[:, None], successors_BS] -= 1
        episode, slot = np.nonzero(self._waits_BN[rows[:, None], successors_BS] == 0)
        self.candidates_BN[episode, successors_BS[episode, slot]] = True

    def _allowed(self, operators_B: Indices, like_BK: Floats) -> Mask:
        if not self._binds:
            return np.ones(like_BK.shape, np.bool_)
        allowed_BK = self._needed_bytes(operators_B) <= self._free_bytes_BK
        most_BK = self._free_bytes_BK == self._free_bytes_BK.max(axis=1, keepdims=True)
        return np.where(allowed_BK.any(axis=1, keepdims=True), allowed_BK, most_BK)

    def _needed_bytes(self, operators_B: Indices) -> Floats:
        instance = self._instance
        missing_BKG = instance.shared_NG[operators_B][:, None, :] & ~self._held_BKG
        needed_BK: Floats = instance.memory_N[operators_B][:, None] + missing_BKG @ instance.shared_bytes_G
        return needed_BK


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
    fits_B: Mask

    def placements(self) -> list[Placement]:
        """The outcome of each episode."""
        assignment_BN = np.empty_like(self.operators_TB.T)
        np.put_along_axis(assignment_BN, self.operators_TB.T, self.devices_TB.T, axis=1)
        orders = self.operators_TB.T.tolist()
        return [Placement(tuple(a), tuple(o)) for a, o in zip(assignment_BN.tolist(), orders, strict=True)]


class Chooser(Protocol):
    """Decides the steps of B episodes: an operator of each, then a device for it."""

    def operators(self, clock: EpisodeClock, taught_BN: Mask) -> Indices:
        """A candidate of each episode."""

    def devices(self, operators_B: Indices, options: DeviceOptions, taught_BK: Mask) -> Indices:
        """A device for the operator of each episode."""


def run_episodes(instance: Instance, chooser: Chooser, num_episodes: int) -> Trace:
    """Place all operators in each of the episodes."""
    clock, steps = EpisodeClock(instance, num_episodes), []
    for _ in range(instance.problem.num_operators):
        candidates_BN = clock.candidates_BN.copy()
        taught_BN = _greatest(instance.b_levels_N, candidates_BN)
        operators_B = chooser.operators(clock, taught_BN)
        options = clock.options(operators_B)
        taught_BK = _greatest(-options.starts_BK, options.allowed_BK)
        devices_B = chooser.devices(operators_B, options, taught_BK)
        clock.place(operators_B, devices_B, options)
        steps.append(
            (operators_B, devices_B, candidates_BN, options.allowed_BK, options.features_BKD, taught_BN, taught_BK)
        )
    operators, devices, candidates, allowed, features, taught, taught_devices = map(np.stack, zip(*steps, strict=True))
    return Trace(operators, devices, candidates, allowed, features, taught, taught_devices, clock.fits_B)


def _greatest(values: Floats, allowed: Mask) -> Mask:
    among = np.where(allowed, values, -np.inf)
    greatest: Mask = allowed & (among == among.max(axis=1, keepdims=True))
    return greatest
