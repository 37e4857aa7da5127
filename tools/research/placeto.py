"""Placeto (arXiv 1906.08879): a policy learns to improve a placement, one operator after the other, with torch.

A baseline for learned planners: the original formulation, with standardised features. An episode starts from the best
placement of the list schedulers and decides once for each operator, in topological order, on which device it runs; the
reward of a step is the improvement. REINFORCE with a baseline per step.

Not in the original: an untrained policy prefers to keep each operator where it is. A uniform one loses the good first
placement within a few steps, and learns from far worse ones.

Shape letters: N operators, S steps of an episode, F features, W width, K devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from coordinator.plan.graph.latency.list_scheduling import mean_seconds, mean_transfer_seconds
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule, schedule
from coordinator.plan.solution import Stop
from tools.research.learner import Floats, Singles, standardised

MAX_EPISODES = 4000  # the number that Doppler's comparison gives each method on its smaller graphs
_NUM_ROUNDS = 8  # of message passing, as published
_FIRST_RATE, _LAST_RATE = 1e-3, 1e-4  # learning rate; it falls linearly over MAX_EPISODES
_FIRST_ENTROPY_WEIGHT = 1e-2  # falls linearly to 0
_MAX_GRADIENT_NORM = 1.25
_BASELINE_EPISODES = 10
_PENALTY_PER_BYTE = 2e-9  # 2 per GB beyond the budgets, where a makespan as long as the first one counts 1
_MAX_ROWS = 50_000  # operators times steps in one backward pass; bounds its memory
_KEEP_LOGIT = 2.0  # added to the logit of an operator's present device
_NUM_STATIC = 2  # features: seconds of the operator and of its output's transfer


class PlacetoNetwork(nn.Module):  # type: ignore[misc]
    """Message passing down and up the edges, pooling around one operator, logits over devices (section 3.3).

    All rounds share their weights. Pools are of ancestors, descendants and parallel operators of the current one.
    """

    def __init__(self, problem: PlacementProblem, num_features: int) -> None:
        super().__init__()
        width = num_features
        self.embed, self.node = nn.Linear(num_features, width), nn.Linear(width, width)
        self.send, self.receive = (nn.ModuleList(nn.Linear(width, width) for _ in range(2)) for _ in range(2))
        self.member, self.group = (nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(3)) for _ in range(2))
        self.hidden, self.output = nn.Linear(8 * width, 8 * width), nn.Linear(8 * width, problem.num_devices)
        for each in self.modules():
            if isinstance(each, nn.Linear):
                # All devices start nearly equal.
                nn.init.xavier_uniform_(each.weight, gain=0.1 if each is self.output else 1.0)
                nn.init.zeros_(each.bias)
        n = problem.num_operators
        ancestors = torch.eye(n, dtype=torch.bool)
        for operator, before in enumerate(problem.predecessors):
            for each in before:
                ancestors[operator] |= ancestors[each]
        ancestors &= ~torch.eye(n, dtype=torch.bool)
        pools = torch.stack(
            [ancestors, ancestors.T, ~(ancestors | ancestors.T | torch.eye(n, dtype=torch.bool))]
        ).float()
        edges = [(a, b) for b, before in enumerate(problem.predecessors) for a in before]
        down = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T
        self._ways = (down, down.flip(0))  # by direction, [senders, receivers]
        counts = torch.stack([torch.bincount(receivers, minlength=n) for _, receivers in self._ways])[..., None]
        self._shares, self._receives = 1 / counts.clamp(min=1), counts > 0  # [2, N, 1]
        self._pools = pools / pools.sum(2, keepdim=True).clamp(min=1)  # [3, current operator, member]

    def forward(self, features_SNF: Tensor, current_S: Tensor) -> Tensor:
        """The logits [S, K] for the current operator of each state."""
        nodes = self.node(self.embed(features_SNF).relu())
        ways = []
        for direction in range(2):
            states, (senders, receivers) = nodes, self._ways[direction]
            for _ in range(_NUM_ROUNDS):
                messages = self.send[direction](states).relu()[:, senders]
                means = torch.zeros_like(nodes).index_add(1, receivers, messages) * self._shares[direction]
                states = nodes + self.receive[direction](means).relu() * self._receives[direction]
            ways.append(states)
        both = torch.cat(ways, dim=-1)
        pooled = [
            self.group[g](torch.einsum("sn,snv->sv", self._pools[g, current_S], self.member[g](both).relu())).relu()
            for g in range(3)
        ]
        own = both[torch.arange(len(current_S)), current_S]
        logits: Tensor = self.output(self.hidden(torch.cat([*pooled, own], dim=-1)).relu())
        return logits


class PlacetoResult(NamedTuple):
    """The best placement found, and that of the final policy's most likely devices."""

    best: Schedule
    greedy: Schedule | None  # None: it does not fit
    num_episodes: int


class _Episode(NamedTuple):
    features: Singles  # [S, N, F]: the state of each step
    devices: tuple[int, ...]  # chosen for each operator
    returns: Floats  # by step, the sum of all rewards from it on


class Placeto:
    """Trains a policy from scratch, from a placement that fits; keeps the best placement of all episodes."""

    def __init__(self, problem: PlacementProblem, start: Schedule, generator: Generator) -> None:
        self._problem, self._start, self._best = problem, start.assignment, start
        self._generator = generator
        self._unit = start.makespan or 1.0
        self._order = start.operator_order
        self._static_NF = _static_features(problem)
        torch.manual_seed(int(generator.integers(1 << 32)))
        torch.set_num_threads(1)
        self._network = PlacetoNetwork(problem, _NUM_STATIC + problem.num_devices + 2)
        self._adam = torch.optim.Adam(self._network.parameters())
        self._returns: deque[Floats] = deque(maxlen=_BASELINE_EPISODES)

    def run(self, num_episodes: int, stop: Stop = lambda: False) -> PlacetoResult:
        """Train, then place greedily. No episode of training begins after `stop()`."""
        done = 0
        while done < num_episodes and not stop():
            self._learn(self._run_episode(), done / MAX_EPISODES)
            done += 1
        final, greedy = self._run_episode(greedy=True), None
        if self._problem.overflow_bytes(final.devices) == 0:
            greedy = best_schedule(self._problem, final.devices, self._order)
            self._keep(greedy)
        self._keep(best_schedule(self._problem, self._best.assignment, self._order))
        return PlacetoResult(self._best, greedy, done)

    def _keep(self, found: Schedule) -> None:
        if found.makespan < self._best.makespan:
            self._best = found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _run_episode(self, greedy: bool = False) -> _Episode:
        """Place each operator once, with sampled or with the most likely devices."""
        n, num_devices = self._problem.num_operators, self._problem.num_devices
        devices = list(self._start)
        placed, is_current, is_done = _NUM_STATIC, _NUM_STATIC + num_devices, _NUM_STATIC + num_devices + 1
        state = np.zeros((n, is_done + 1), np.float32)
        state[:, :_NUM_STATIC] = self._static_NF
        state[np.arange(n), placed + np.array(devices)] = 1.0
        seen, values = np.zeros((n, *state.shape), np.float32), np.zeros(n + 1)
        values[0] = self._value(devices)
        for operator in range(n):
            state[operator, is_current] = 1.0
            seen[operator] = state
            logits = self._logits(seen[operator : operator + 1], np.array([operator]))[0]
            chances = logits.double().softmax(-1).numpy()
            device = int(logits.argmax() if greedy else self._generator.choice(num_devices, p=chances))
            values[operator + 1] = values[operator]
            if device != devices[operator]:
                state[operator, [placed + devices[operator], placed + device]] = 0.0, 1.0
                devices[operator] = device
                values[operator + 1] = self._value(devices)
            state[operator, [is_current, is_done]] = 0.0, 1.0
        return _Episode(seen, tuple(devices), values[:-1] - values[-1])

    def _logits(self, features_SNF: Singles, current_S: NDArray[np.int64]) -> Tensor:
        """The logits [S, K]; the present device of each step's operator is ahead of the others."""
        devices = slice(_NUM_STATIC, _NUM_STATIC + self._problem.num_devices)
        kept = torch.from_numpy(_KEEP_LOGIT * features_SNF[np.arange(len(current_S)), current_S, devices])
        found: Tensor = self._network(torch.from_numpy(features_SNF), torch.from_numpy(current_S)) + kept
        return found

    def _value(self, devices: Sequence[int]) -> float:
        """The makespan over the first one, plus the penalty for memory. Keeps the best schedule that fits."""
        found = schedule(self._problem, devices, self._order)
        excess_bytes = self._problem.overflow_bytes(devices)
        if excess_bytes == 0:
            self._keep(found)
        return found.makespan / self._unit + _PENALTY_PER_BYTE * excess_bytes

    def _learn(self, episode: _Episode, progress: float) -> None:
        """One step of REINFORCE with an entropy bonus; advantages are divided by their deviation over all steps."""
        self._returns.append(episode.returns)
        known = np.array(self._returns)
        deviation = float((known - known.mean(axis=0)).std())
        advantages = torch.from_numpy(((episode.returns - known.mean(axis=0)) / (deviation or 1.0)).astype(np.float32))
        n, entropy_weight = len(advantages), (1 - progress) * _FIRST_ENTROPY_WEIGHT
        self._adam.zero_grad()
        self._adam.param_groups[0]["lr"] = _FIRST_RATE + progress * (_LAST_RATE - _FIRST_RATE)
        for steps in torch.arange(n).split(max(1, _MAX_ROWS // n)):
            logs = functional.log_softmax(self._logits(episode.features[steps.numpy()], steps.numpy()), dim=-1)
            chosen = logs[torch.arange(len(steps)), torch.tensor(episode.devices)[steps]]
            entropies = -(logs.exp() * logs).sum(-1)
            (-(advantages[steps] * chosen + entropy_weight * entropies).sum() / n).backward()
        nn.utils.clip_grad_norm_(self._network.parameters(), _MAX_GRADIENT_NORM)
        self._adam.step()


def _static_features(problem: PlacementProblem) -> Singles:
    """[N, 2]: mean seconds of each operator and of the transfers of its outputs, each with mean 0 and deviation 1."""
    carried = mean_transfer_seconds(problem)
    outputs = [sum(carried[flow] for flow in flows) for flows in problem.outgoing]
    features: Singles = standardised(np.array([mean_seconds(problem), outputs]).T, 0).astype(np.float32)
    return features
