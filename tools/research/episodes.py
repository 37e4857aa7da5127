"""Episodes of Doppler's policies: a placement problem as arrays, and B episodes in lockstep that place its operators.

The clock is the paper's: operators start as soon as their device has finished what was placed before and their inputs have
arrived; transfers do not contend.

Shape letters: N operators, K devices, M directed edges (each flow to each of its targets, in both directions), F flows, P most
inputs of an operator, S most successors, G shared weights, X static features; B episodes, D device features, T steps: one for
each operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.latency.doppler.features import longest_paths
from coordinator.plan.graph.latency.list_scheduling import mean_seconds, mean_transfer_seconds
from coordinator.plan.graph.latency.problem import PlacementProblem

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

NUM_STATIC_FEATURES = 5
_EQUAL = 1e-9  # a deviation below this share of the greatest value is rounding: all values are equal


@dataclass(frozen=True)
class Instance:
    """Arrays of one problem. Padded tables of operators and flows use N and F as padding."""

    problem: PlacementProblem
    static_NX: Singles  # compute, transfers in, transfers out, t-level, b-level; standardised over operators
    edge_sources_M: Indices
    edge_targets_M: Indices
    edge_values_M: Singles  # mean transfer seconds, standardised over edges
    b_levels_N: Floats  # longest path from the start of an operator to the end of the graph
    b_paths_NN: Singles  # row v: 1 for the operators on v's longest path to an exit, v included
    t_paths_NN: Singles  # the same to an entry
    seconds_NK: Floats
    inputs_NP: Indices  # the operators that produce an operator's inputs, one for each flow
    input_flows_NP: Indices
    transfer_FKK: Floats  # seconds with latency, by sender and receiver; 0 for padding, of flows and of senders
    successors_NS: Indices
    num_predecessors_N: Indices
    memory_N: Floats  # bytes, without shared weights
    budget_K: Floats  # bytes
    shared_NG: Mask  # which shared weights an operator uses
    shared_bytes_G: Floats

    @property
    def memory_binds(self) -> bool:
        """Whether some device cannot hold the whole graph."""
        return bool(self.memory_N.sum() + self.shared_bytes_G.sum() > self.budget_K.min())


def make_instance(problem: PlacementProblem) -> Instance:
    """The arrays of a problem. Costs of devices and links that differ enter the static features as means."""
    n, num_devices, num_flows = problem.num_operators, problem.num_devices, len(problem.flows)
    compute, carried = mean_seconds(problem), mean_transfer_seconds(problem)
    b_levels, t_levels, following, preceding = longest_paths(problem, np.array(compute), np.array(carried))
    flow_of_edge = [f for f, flow in enumerate(problem.flows) for _ in flow.targets]
    sources = np.array([problem.flows[f].source for f in flow_of_edge], np.int64)
    targets = np.array([target for flow in problem.flows for target in flow.targets], np.int64)
    values = np.array([carried[f] for f in flow_of_edge], np.float64)
    received = np.bincount(targets, values, n)
    sent = np.bincount(sources, values, n)
    static = np.stack([np.array(compute), received, sent, t_levels, b_levels], axis=1)
    transfer = np.zeros((num_flows + 1, num_devices + 1, num_devices))
    for f, flow in enumerate(problem.flows):
        transfer[f, :num_devices] = np.array(flow.seconds) + np.array(problem.latency)
    shared = np.zeros((n, len(problem.shared)), np.bool_)
    for index, group in enumerate(problem.shared):
        shared[list(group.operators), index] = True
    edge_values = standardised(np.concatenate([values, values]), 0)
    return Instance(
        problem=problem,
        static_NX=standardised(static, 0).astype(np.float32),
        edge_sources_M=np.concatenate([sources, targets]),
        edge_targets_M=np.concatenate([targets, sources]),
        edge_values_M=edge_values.astype(np.float32),
        b_levels_N=np.asarray(b_levels, np.float64),
        b_paths_NN=_paths(following, reversed(range(n))),
        t_paths_NN=_paths(preceding, range(n)),
        seconds_NK=np.array(problem.seconds, np.float64),
        inputs_NP=_padded([[problem.flows[f].source for f in flows] for flows in problem.incoming], n),
        input_flows_NP=_padded(problem.incoming, num_flows),
        transfer_FKK=transfer,
        successors_NS=_padded(problem.successors, n),
        num_predecessors_N=np.array([len(each) for each in problem.predecessors], np.int64),
        memory_N=np.array(problem.memory_bytes, np.float64),
        budget_K=np.array(problem.budget_bytes, np.float64),
        shared_NG=shared,
        shared_bytes_G=np.array([group.num_bytes for group in problem.shared], np.float64),
    )


def standardised(values: Floats, axis: int) -> Floats:
    """Values with mean 0 and deviation 1 along an axis; 0 where all are equal."""
    if values.size == 0:
        return values
    centred: Floats = values - values.mean(axis, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis, keepdims=True))
    varied = deviation > _EQUAL * np.abs(values).max(axis, keepdims=True, initial=0.0)
    return np.where(varied, centred / np.where(varied, deviation, 1.0), 0.0)


def _paths(following: Sequence[int], order: Iterable[int]) -> Singles:
    """Row v marks v and all that follow; `order` lists an operator after the one that follows it, if any."""
    marks = np.eye(len(following), dtype=np.float32)
    for operator in order:
        if following[operator] < len(following):
            marks[operator] += marks[following[operator]]
    return marks


def _padded(rows: Sequence[Sequence[int]], padding: int) -> Indices:
    width = max(1, max(map(len, rows), default=0))
    return np.array([[*row, *[padding] * (width - len(row))] for row in rows], np.int64)


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
