"""A chain of blocks, cut into stages on a chain of devices: what the throughput planners solve. Pure.

N blocks follow each other, K devices may take them. A pipeline gives each of some devices one run of blocks, all blocks in
order. Requests follow each other through it, so it is as fast as its slowest part (the paper's equation 1):

    beta = max( seconds of each stage on its device,  bytes across each cut / rate of the link that it crosses )

A link's latency keeps neither the link nor a device busy, so it delays a request but not the next one: it is not in beta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.throughput.points import Chain, candidate_chain
from hearth.plan.graph_spec import GraphSpec

Matrix = Sequence[Sequence[float]]


class Stage(NamedTuple):
    """Blocks `first` to `last`, both included, on one device."""

    first: int
    last: int
    device: int


Stages = tuple[Stage, ...]


@dataclass(frozen=True, eq=False)
class PipelineProblem:
    """N blocks of operators in order, K devices. Raises ValueError where shapes disagree or a number makes no sense."""

    name: str
    blocks: tuple[tuple[int, ...], ...]  # [N], operators of each
    boundary_bytes: tuple[float, ...]  # [N - 1], across the cut after each block, compressed
    seconds: NDArray[np.float64]  # [N, K]; all 0: compute is left out, as in the paper
    stage_bytes: NDArray[np.int64]  # [N, N], that blocks i to j together hold; 0 below the diagonal
    memory_bytes: tuple[int, ...]  # [K], what each device may hold
    rate: NDArray[np.float64]  # [K, K] bytes per second from row to column, infinite on the diagonal

    def __post_init__(self) -> None:
        n, k = self.num_blocks, self.num_devices
        if n == 0 or k == 0:
            raise ValueError("a pipeline needs a block and a device")
        if len(self.boundary_bytes) != n - 1 or self.stage_bytes.shape != (n, n):
            raise ValueError(f"{n} blocks have {n - 1} cuts and {n} x {n} stages")
        if self.seconds.shape != (n, k) or self.rate.shape != (k, k):
            raise ValueError(f"{k} devices need {n} x {k} times and {k} x {k} rates")
        if not np.isfinite(self.seconds).all() or (self.seconds < 0).any():
            raise ValueError("a time is negative or not finite")
        if not (self.rate > 0).all():
            raise ValueError("a rate is not above 0")
        if any(not (math.isfinite(size) and size >= 0) for size in self.boundary_bytes):
            raise ValueError("a boundary's size is negative or not finite")

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_devices(self) -> int:
        return len(self.memory_bytes)

    @property
    def num_operators(self) -> int:
        return sum(map(len, self.blocks))

    @cached_property
    def elapsed(self) -> NDArray[np.float64]:
        """[N + 1, K]: seconds of all blocks before each; a stage takes the difference of two."""
        zeros = np.zeros((1, self.num_devices))
        elapsed: NDArray[np.float64] = np.concatenate([zeros, np.cumsum(self.seconds, axis=0)])
        return elapsed

    @cached_property
    def link_rates(self) -> NDArray[np.float64]:
        """[K, K] as `rate`, but 0 on the diagonal: a stage never follows another on the same device."""
        rates: NDArray[np.float64] = self.rate.copy()
        np.fill_diagonal(rates, 0.0)
        return rates

    def last_block(self, first: int, budget_bytes: int) -> int:
        """The last block of the longest stage from `first` that fits into so many bytes; `first - 1` where none does."""
        fits = np.searchsorted(self.stage_bytes[first, first:], budget_bytes, side="right")
        return first - 1 + int(fits)

    def stage_seconds(self, stage: Stage) -> float:
        return float(self.elapsed[stage.last + 1, stage.device] - self.elapsed[stage.first, stage.device])

    def transfer_seconds(self, cut: int, sender: int, receiver: int) -> float:
        """Across the cut after block `cut`."""
        return self.boundary_bytes[cut] / float(self.rate[sender, receiver])

    def bottleneck_seconds(self, stages: Sequence[Stage]) -> float:
        """Beta, equation (1)."""
        compute = [self.stage_seconds(stage) for stage in stages]
        pairs = zip(stages, stages[1:], strict=False)
        return max([*compute, *(self.transfer_seconds(a.last, a.device, b.device) for a, b in pairs)])

    def assignment(self, stages: Sequence[Stage]) -> tuple[int, ...]:
        """By operator, the device that runs it."""
        found = [0] * self.num_operators
        for stage in stages:
            for block in self.blocks[stage.first : stage.last + 1]:
                for operator in block:
                    found[operator] = stage.device
        return tuple(found)

    def check(self, stages: Sequence[Stage]) -> None:
        """Raises ValueError unless the stages are a pipeline: each block once, in order, each device once, within memory."""
        if [stage.first for stage in stages] != [0, *(stage.last + 1 for stage in stages[:-1])]:
            raise ValueError("the stages leave out blocks or run them twice")
        if not stages or stages[-1].last != self.num_blocks - 1:
            raise ValueError("the last block is in no stage")
        if any(stage.last < stage.first for stage in stages):
            raise ValueError("a stage is empty")
        if len({stage.device for stage in stages}) != len(stages):
            raise ValueError("a device has two stages")
        for stage in stages:
            if self.stage_bytes[stage.first, stage.last] > self.memory_bytes[stage.device]:
                raise ValueError(f"blocks {stage.first} to {stage.last} do not fit on device {stage.device}")

    def missing_bytes(self, budgets: Sequence[int]) -> int:
        """Of the blocks that are left when devices of these budgets are filled one after the other, largest first."""
        first = 0
        for budget in sorted(budgets, reverse=True):
            first = self.last_block(first, budget) + 1
            if first == self.num_blocks:
                return 0
        return int(self.stage_bytes[first, -1])


def pipeline_problem(
    spec: GraphSpec,
    seconds: Matrix,
    memory_bytes: Sequence[int],
    rate: Matrix,
    compression: float = 1.0,
    *,
    chain: Chain | None = None,
    resident_bytes: Sequence[int] | None = None,
) -> PipelineProblem:
    """A graph on K devices: seconds [n][K] of each operator, bytes that each device may hold, bytes per second [K][K].

    A stage holds the weights of its operators, shared ones once, and `resident_bytes` [n] where given (activations that
    stay). `compression` (the paper's lambda) divides what crosses a cut. Raises ValueError for shapes that disagree.
    """
    if compression <= 0 or not math.isfinite(compression):
        raise ValueError(f"a compression of {compression} is none")
    chain = chain or candidate_chain(spec)
    times = np.asarray(seconds, dtype=np.float64).reshape(spec.num_operators, len(memory_bytes))
    rates = np.array(rate, dtype=np.float64).reshape(len(memory_bytes), len(memory_bytes))
    np.fill_diagonal(rates, np.inf)
    return PipelineProblem(
        name=spec.name,
        blocks=chain.blocks,
        boundary_bytes=tuple(num_bytes / compression for num_bytes in chain.boundary_bytes(spec)),
        seconds=np.array([times[list(block)].sum(axis=0) for block in chain.blocks]),
        stage_bytes=_stage_bytes(spec, chain, resident_bytes),
        memory_bytes=tuple(memory_bytes),
        rate=rates,
    )


def _stage_bytes(spec: GraphSpec, chain: Chain, resident_bytes: Sequence[int] | None) -> NDArray[np.int64]:
    """[N, N]: all that blocks i to j use, less what is counted twice since two of them share it."""
    n = len(chain.blocks)
    users: dict[int, list[int]] = {}
    for index, block in enumerate(chain.blocks):
        for parameter in {each for operator in block for each in spec.operators[operator].parameters}:
            users.setdefault(parameter, []).append(index)
    alone, twice = np.zeros(n, dtype=np.int64), np.zeros((n, n), dtype=np.int64)
    for parameter, found in users.items():
        num_bytes = spec.parameters[parameter].num_bytes
        alone[found] += num_bytes
        for first, second in zip(found, found[1:], strict=False):
            twice[first, second] += num_bytes
    if resident_bytes is not None:
        alone += [sum(resident_bytes[operator] for operator in block) for block in chain.blocks]
    # Pairs (a, b) with i <= a and b <= j.
    shared = np.cumsum(np.cumsum(twice[::-1], axis=0)[::-1], axis=1)
    ends = np.concatenate([[0], np.cumsum(alone)])
    return np.triu(ends[None, 1:] - ends[:-1, None] - shared)
