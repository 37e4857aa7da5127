"""The problem of the throughput planners: cut a chain of blocks into stages, and assign each stage to a device. Pure.

There are N consecutive blocks and K devices. A pipeline gives some of the devices one run of consecutive blocks each, and
covers all blocks in order. Requests follow one another through it, so its throughput is that of its slowest part
(equation 1 of Parthasarathy and Krishnamachari):

    beta = max( seconds of each stage on its device,  bytes across each cut / rate of the link that it crosses )

A shared medium carries one transfer at a time, and every request crosses it with each cut whose link is on it. So where there
are media, the seconds of all transfers that cross one are added up, as one more part of the maximum.

A link's latency occupies neither the link nor a device: it delays a request but not the next one, so it is not in beta.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.throughput.points import Chain, candidate_chain
from hearth.plan.graph_spec import GraphSpec

FloatTableLike = Sequence[Sequence[float]]
MediaCrossed = tuple[tuple[tuple[int, ...], ...], ...]


class Stage(NamedTuple):
    """Blocks `first` to `last`, both included, on one device."""

    first: int
    last: int
    device: int


Stages = tuple[Stage, ...]


def stages_from(last: Sequence[int], devices: Sequence[int]) -> Stages:
    """Stages from the last block of each and the device of each."""
    return tuple(map(Stage, [0, *(each + 1 for each in last[:-1])], last, devices))


@dataclass(frozen=True, eq=False)
class PipelineProblem:
    """N blocks of operators in order, K devices."""

    name: str
    blocks: tuple[tuple[int, ...], ...]  # [N], operators of each
    boundary_bytes: tuple[float, ...]  # [N - 1], across the cut after each block
    seconds: NDArray[np.float64]  # [N, K]; all 0 ignores compute, as in the paper
    stage_bytes: NDArray[np.int64]  # [N, N], weights of blocks i to j together; 0 below the diagonal
    memory_bytes: tuple[int, ...]  # [K], for weights on each device
    rate: NDArray[np.float64]  # [K, K] bytes per second from row to column, infinite on the diagonal
    # [K][K]: the numbers of the shared media that a transfer crosses, on the diagonal those of the device; empty: none.
    media: MediaCrossed = ()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_devices(self) -> int:
        return len(self.memory_bytes)

    @cached_property
    def cumulative_seconds(self) -> NDArray[np.float64]:
        """[N + 1, K]: total seconds of the blocks before each one; a stage takes the difference of two entries."""
        zeros = np.zeros((1, self.num_devices))
        elapsed: NDArray[np.float64] = np.concatenate([zeros, np.cumsum(self.seconds, axis=0)])
        return elapsed

    @cached_property
    def link_rates(self) -> NDArray[np.float64]:
        """[K, K] like `rate`, but 0 on the diagonal: two stages are never on the same device."""
        rates: NDArray[np.float64] = self.rate.copy()
        np.fill_diagonal(rates, 0.0)
        return rates

    def last_block(self, first: int, budget_bytes: int) -> int:
        """The last block of the longest stage from `first` that fits into `budget_bytes`; `first - 1` if none fits."""
        fits = np.searchsorted(self.stage_bytes[first, first:], budget_bytes, side="right")
        return first - 1 + int(fits)

    def stage_seconds(self, stage: Stage) -> float:
        return float(
            self.cumulative_seconds[stage.last + 1, stage.device] - self.cumulative_seconds[stage.first, stage.device]
        )

    def transfer_seconds(self, cut: int, sender: int, receiver: int) -> float:
        """Seconds of the transfer across the cut after block `cut`."""
        return self.boundary_bytes[cut] / float(self.rate[sender, receiver])

    def bottleneck_seconds(self, stages: Sequence[Stage]) -> float:
        """Beta, equation (1), with a term for each shared medium."""
        parts, on_medium = [self.stage_seconds(stage) for stage in stages], defaultdict[int, float](float)
        for a, b in zip(stages, stages[1:], strict=False):
            seconds = self.transfer_seconds(a.last, a.device, b.device)
            parts.append(seconds)
            for number in self.media[a.device][b.device] if self.media else ():
                on_medium[number] += seconds
        return max([*parts, *on_medium.values()])

    def assignment(self, stages: Sequence[Stage]) -> tuple[int, ...]:
        """The device of each operator."""
        devices = [0] * sum(map(len, self.blocks))
        for stage in stages:
            for block in self.blocks[stage.first : stage.last + 1]:
                for operator in block:
                    devices[operator] = stage.device
        return tuple(devices)

    def on_devices(self, devices: Sequence[int]) -> PipelineProblem:
        """The problem on some of the devices, numbered in this order, without media."""
        return replace(
            self,
            seconds=self.seconds[:, devices],
            memory_bytes=tuple(self.memory_bytes[device] for device in devices),
            rate=self.rate[np.ix_(devices, devices)],
            media=(),
        )

    def missing_bytes(self, budgets: Sequence[int]) -> int:
        """Bytes of the blocks left over when devices with these budgets are filled in turn, largest first."""
        first = 0
        for budget in sorted(budgets, reverse=True):
            first = self.last_block(first, budget) + 1
            if first == self.num_blocks:
                return 0
        return int(self.stage_bytes[first, -1])


def pipeline_problem(
    spec: GraphSpec,
    seconds: FloatTableLike,
    memory_bytes: Sequence[int],
    rate: FloatTableLike,
    chain: Chain | None = None,
    media: MediaCrossed = (),
) -> PipelineProblem:
    """The problem of a graph on K devices: operator seconds [n][K], weight bytes per device, bytes per second [K][K].

    A stage holds the weights of its operators, shared ones once. Without a `chain`, cuts are at candidate points. Raises
    ValueError if the shapes disagree.
    """
    chain = chain or candidate_chain(spec)
    times = np.asarray(seconds, dtype=np.float64).reshape(spec.num_operators, len(memory_bytes))
    rates = np.array(rate, dtype=np.float64).reshape(len(memory_bytes), len(memory_bytes))
    np.fill_diagonal(rates, np.inf)
    return PipelineProblem(
        name=spec.name,
        blocks=chain.blocks,
        boundary_bytes=tuple(map(float, chain.boundary_bytes(spec))),
        seconds=np.array([times[list(block)].sum(axis=0) for block in chain.blocks]),
        stage_bytes=_stage_bytes(spec, chain),
        memory_bytes=tuple(memory_bytes),
        rate=rates,
        media=media,
    )


def _stage_bytes(spec: GraphSpec, chain: Chain) -> NDArray[np.int64]:
    """[N, N]: weight bytes of blocks i to j, where weights shared by several blocks count once."""
    n = len(chain.blocks)
    users: dict[int, list[int]] = {}
    for index, block in enumerate(chain.blocks):
        for parameter in {each for operator in block for each in spec.operators[operator].parameters}:
            users.setdefault(parameter, []).append(index)
    alone, twice = np.zeros(n, dtype=np.int64), np.zeros((n, n), dtype=np.int64)
    for parameter, user_blocks in users.items():
        num_bytes = spec.parameters[parameter].num_bytes
        alone[user_blocks] += num_bytes
        for first, second in zip(user_blocks, user_blocks[1:], strict=False):
            twice[first, second] += num_bytes
    # Pairs (a, b) with i <= a and b <= j.
    shared = np.cumsum(np.cumsum(twice[::-1], axis=0)[::-1], axis=1)
    ends = np.concatenate([[0], np.cumsum(alone)])
    return np.triu(ends[None, 1:] - ends[:-1, None] - shared)
