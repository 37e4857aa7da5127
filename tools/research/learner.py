"""Doppler as published (arXiv 2505.23131): its dual policy, episodes that place operators, and training on one graph.

SEL picks an operator, PLC picks a device (section 5.2). Each policy has an encoder of its own, which passes messages. No weight
depends on the numbers of operators and devices.

B episodes run in lockstep. The clock is the paper's: operators start as soon as their device has finished what was placed
before and their inputs have arrived; transfers do not contend.

Training is imitation (stage I) and policy gradient on simulated times (stage II). The teacher of stage I is Critical Path: its
choices are all that tie. A batch shares one run of message passing and one gradient step; the paper takes one of each for every
episode. Samples come from the softmax, without uniform exploration; returns are not discounted.

Shape letters: N operators, K devices; B episodes, T steps: one for each operator; X static features, D device features, H width
of embeddings, C the width of PLC's hidden layer, V values, M width of a message; "..." are rows of any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from coordinator.plan.graph.latency.doppler.features import longest_paths
from coordinator.plan.graph.latency.doppler.gradients import advantages
from coordinator.plan.graph.latency.list_scheduling import mean_seconds, mean_transfer_seconds
from coordinator.plan.graph.latency.memory import MemoryLedger
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import schedule

# ---- networks ----------------------------------------------------------------------------------------------------------

NUM_STATIC_FEATURES, NUM_DEVICE_FEATURES = 5, 5
_SLOPE = 0.1  # of LeakyReLU
_HEAD_WIDTH = 64
_EPSILON = 1e-5  # keeps the gradient of a deviation of 0 finite


@dataclass(frozen=True)
class Shape:
    """Sizes of the networks; the defaults are the paper's."""

    width: int = 128
    num_rounds: int = 6


class GraphTensors(NamedTuple):
    """What the networks read of a graph. An edge is a flow to one of its targets, in either direction.

    Edges with one value share one message matrix. Task graphs have few values.
    """

    static_NX: Tensor  # compute, transfers in, transfers out, t-level, b-level; standardised over operators
    b_paths_NN: Tensor  # row v: 1 for the operators on v's longest path to an exit, v included
    t_paths_NN: Tensor  # the same to an entry
    values: Tensor  # the distinct mean transfer seconds of edges, standardised over edges
    edge_values: Tensor  # by edge, the index of its value
    senders: Tensor  # by edge, an operator
    receivers: Tensor


class Encoding(NamedTuple):
    """What both policies derive from the graph."""

    operator_logits_N: Tensor
    embedding_NH: Tensor  # PLC's
    operator_part_NC: Tensor  # PLC's


class Encoder(nn.Module):  # type: ignore[misc]
    """NNConv and GRU: rounds of message passing with shared weights (Gilmer et al., 2017)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self._num_rounds = shape.num_rounds
        self.embed = _linear(NUM_STATIC_FEATURES, width)
        self.edge = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width * width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.gru = nn.GRUCell(width, width)

    def forward(self, graph: GraphTensors) -> Tensor:
        """Embeddings (N, H): a message is the matrix of its edge times the sender's embedding; messages are summed."""
        hidden_NH = functional.relu(self.embed(graph.static_NX))
        width = hidden_NH.shape[1]
        matrices_VHM = self.edge(graph.values[:, None]).view(-1, width, width)
        for _ in range(self._num_rounds):
            sent_VNM = torch.einsum("nh,vhm->vnm", hidden_NH, matrices_VHM)
            messages = sent_VNM[graph.edge_values, graph.senders]
            sums = torch.zeros_like(hidden_NH).index_add(0, graph.receivers, messages)
            hidden_NH = self.gru(functional.relu(sums + self.bias), hidden_NH)
        return functional.leaky_relu(hidden_NH, _SLOPE)


class _Network(nn.Module):  # type: ignore[misc]
    """An encoder, the features of an operator and, for PLC, of devices, and a score from a hidden layer."""

    def __init__(self, shape: Shape, num_device_features: int = 0) -> None:
        super().__init__()
        self.encoder = Encoder(shape)
        if num_device_features:
            self.device = _linear(num_device_features, shape.width)
        self.own = _linear(NUM_STATIC_FEATURES, shape.width)
        self.hidden = _linear(4 * shape.width, _HEAD_WIDTH)
        self.score = _linear(_HEAD_WIDTH, 1)

    def _score(self, *parts: Tensor) -> Tensor:
        logits: Tensor = self.score(_leaky(self.hidden(torch.cat(parts, dim=-1))))
        return logits[..., 0]


class SelectNetwork(_Network):
    """SEL: a score for every operator. Softmax over the candidates gives the next operator to place."""

    def forward(self, embedding_NH: Tensor, graph: GraphTensors) -> Tensor:
        """Logits (N) from the operator, its embedding, and the sums of embeddings along its b-path and its t-path."""
        on_paths = [_normalised(paths @ embedding_NH) for paths in (graph.b_paths_NN, graph.t_paths_NN)]
        return self._score(_leaky(self.own(graph.static_NX)), embedding_NH, *on_paths)


class PlaceNetwork(_Network):
    """PLC: a score for every device, for a given operator. Softmax over the devices with room gives its device."""

    def operator_part(self, embedding_NH: Tensor, graph: GraphTensors) -> Tensor:
        """The part of the hidden layer (N, C) that does not depend on devices: the operator and its embedding."""
        own_NH, width = _leaky(self.own(graph.static_NX)), embedding_NH.shape[-1]
        weight = self.hidden.weight[:, width : 3 * width]
        return functional.linear(torch.cat([own_NH, embedding_NH], dim=-1), weight, self.hidden.bias)

    def forward(self, operator_part: Tensor, features_KD: Tensor, placed_KH: Tensor) -> Tensor:
        """Logits (..., K) from the operator's part (..., C), device features (..., K, D), and sums (..., K, H).

        The sums are of the embeddings of the operators that are already on each device.
        """
        width = placed_KH.shape[-1]
        device = functional.linear(_leaky(self.device(features_KD)), self.hidden.weight[:, :width])
        placed = functional.linear(_normalised(placed_KH), self.hidden.weight[:, 3 * width :])
        logits: Tensor = self.score(_leaky(operator_part[..., None, :] + device + placed))
        return logits[..., 0]


class DualPolicy(nn.Module):  # type: ignore[misc]
    """SEL and PLC with separate weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.select = SelectNetwork(shape)
        self.place = PlaceNetwork(shape, NUM_DEVICE_FEATURES)

    def encode(self, graph: GraphTensors) -> Encoding:
        """Run the message passing of both policies."""
        embedding_NH = self.place.encoder(graph)
        return Encoding(
            self.select(self.select.encoder(graph), graph), embedding_NH, self.place.operator_part(embedding_NH, graph)
        )


def _normalised(values: Tensor) -> Tensor:
    """Values with mean 0 and deviation 1 along the last axis but one."""
    centred = values - values.mean(-2, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-2, keepdim=True) + _EPSILON)


def _leaky(values: Tensor) -> Tensor:
    return functional.leaky_relu(values, _SLOPE)


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


# ---- the problem as arrays ---------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

_EQUAL = 1e-9  # a deviation below this share of the greatest value is rounding: all values are equal


@dataclass(frozen=True)
class Instance:
    """One problem, and what the networks read of it."""

    problem: PlacementProblem
    graph: GraphTensors
    b_levels_N: Floats  # longest path from the start of an operator to the end of the graph


def make_instance(problem: PlacementProblem) -> Instance:
    """The arrays of a problem. Costs of devices and links that differ enter the static features as means."""
    n = problem.num_operators
    compute, carried = np.array(mean_seconds(problem)), np.array(mean_transfer_seconds(problem))
    b_levels, t_levels, following, preceding = longest_paths(problem, compute, carried)
    edges = [(flow.source, target, f) for f, flow in enumerate(problem.flows) for target in flow.targets]
    sources, targets, flows = np.array(edges, np.int64).reshape(-1, 3).T
    values = carried[flows]
    received, sent = np.bincount(targets, values, n), np.bincount(sources, values, n)
    static = standardised(np.stack([compute, received, sent, t_levels, b_levels], axis=1), 0)
    edge_values, of_edge = np.unique(standardised(np.tile(values, 2), 0).astype(np.float32), return_inverse=True)
    senders, receivers = np.concatenate([sources, targets]), np.concatenate([targets, sources])
    return Instance(
        problem,
        GraphTensors(
            torch.from_numpy(static.astype(np.float32)),
            torch.from_numpy(_paths(following, reversed(range(n)))),
            torch.from_numpy(_paths(preceding, range(n))),
            torch.from_numpy(edge_values),
            *map(torch.from_numpy, (of_edge, senders, receivers)),
        ),
        np.asarray(b_levels, np.float64),
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


# ---- the clock ----------------------------------------------------------------------------------------------------------


class DeviceOptions(NamedTuple):
    """The devices for one operator of an episode."""

    features: list[list[float]]  # [D][K], not standardised
    starts: list[float]  # earliest start
    left_bytes: Sequence[int]  # after placing the operator there; negative without room
    allowed: list[bool]  # devices with room in memory


class EpisodeClock:
    """State of an episode: candidates, devices and times of placed operators, and free memory.

    Where no device has room, those with the most free bytes are allowed and the episode no longer `fits`.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        n, num_devices = problem.num_operators, problem.num_devices
        self.candidates_N = np.array([not before for before in problem.predecessors])
        self.fits = True
        self._problem, self._memory = problem, MemoryLedger(problem)
        self._waits = [len(before) for before in problem.predecessors]
        self._device, self._starts, self._ends = [0] * n, [0.0] * n, [0.0] * n
        self._load, self._free_at = [0.0] * num_devices, [0.0] * num_devices
        self._free_bytes = list(problem.budget_bytes)

    def options(self, operator: int) -> DeviceOptions:
        """Features, earliest start and room of every device for a candidate."""
        num_devices = len(self._load)
        starts, computed, last = list(self._free_at), [0.0] * num_devices, [0.0] * num_devices
        first = [inf] * num_devices
        for flow in map(self._problem.flows.__getitem__, self._problem.incoming[operator]):
            on, begun, ended = self._device[flow.source], self._starts[flow.source], self._ends[flow.source]
            computed[on] += ended - begun
            first[on], last[on] = min(first[on], begun), max(last[on], ended)
            arrivals = [ended + (a + b) for a, b in zip(flow.seconds[on], self._problem.latency[on], strict=True)]
            starts = list(map(max, starts, arrivals))
        features = [list(self._load), computed, [0.0 if each == inf else each for each in first], last, starts]
        left_bytes = self._memory.left_bytes(operator)
        has_room, most = [each >= 0 for each in left_bytes], max(self._free_bytes)
        allowed = has_room if any(has_room) else [each == most for each in self._free_bytes]
        return DeviceOptions(features, starts, left_bytes, allowed)

    def place(self, operator: int, device: int, options: DeviceOptions) -> None:
        """Place a candidate on a device, and update the candidates."""
        start, seconds = options.starts[device], self._problem.seconds[operator][device]
        self._device[operator], self._starts[operator], self._ends[operator] = device, start, start + seconds
        self._load[device] += seconds
        self._free_at[device] = start + seconds
        self._memory.place(operator, device)
        self._free_bytes[device] = options.left_bytes[device]
        self.fits &= options.left_bytes[device] >= 0
        self.candidates_N[operator] = False
        for each in self._problem.successors[operator]:
            self._waits[each] -= 1
            self.candidates_N[each] = self._waits[each] == 0


# ---- episodes of the policy ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """Which decisions are learnt; the others are Critical Path's (the paper's ablations "SEL only" and "PLC only")."""

    learns_operators: bool = True
    learns_devices: bool = True


class Placement(NamedTuple):
    """The outcome of an episode: the device of every operator, and the order in which they were placed."""

    assignment: tuple[int, ...]
    order: tuple[int, ...]


class Trace(NamedTuple):
    """B complete episodes."""

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


@torch.no_grad()  # type: ignore[untyped-decorator]
def run_episodes(
    instance: Instance, policy: DualPolicy, encoding: Encoding, rules: Rules, num_episodes: int, rng: Generator | None
) -> Trace:
    """Place all operators in each episode: samples of the softmax, or without `rng` the most probable choices."""
    problem, steps = instance.problem, []
    clocks = [EpisodeClock(problem) for _ in range(num_episodes)]
    logits_N, embedding_NH = encoding.operator_logits_N.double().numpy(), encoding.embedding_NH
    # Of the operators on each device:
    sums_BKH = embedding_NH.new_zeros(num_episodes, problem.num_devices, embedding_NH.shape[-1])
    rows = torch.arange(num_episodes)
    for _ in range(problem.num_operators):
        candidates_BN = np.stack([clock.candidates_N for clock in clocks])
        taught_BN = _greatest(instance.b_levels_N, candidates_BN)
        operators_B = _choose(logits_N, candidates_BN, rng) if rules.learns_operators else _choose(0.0, taught_BN, rng)
        options = [clock.options(each) for clock, each in zip(clocks, operators_B.tolist(), strict=True)]
        features_BDK = standardised(np.array([each.features for each in options]), 2)
        features_BKD = np.ascontiguousarray(features_BDK.transpose(0, 2, 1), np.float32)
        allowed_BK = np.array([each.allowed for each in options])
        taught_BK = _greatest(-np.array([each.starts for each in options]), allowed_BK)
        if rules.learns_devices:
            operators = torch.from_numpy(operators_B)
            parts_BC = encoding.operator_part_NC[operators]
            logits_BK = policy.place(parts_BC, torch.from_numpy(features_BKD), sums_BKH).double().numpy()
            devices_B = _choose(logits_BK, allowed_BK, rng)
            sums_BKH[rows, torch.from_numpy(devices_B)] += embedding_NH[operators]
        else:
            devices_B = _choose(0.0, taught_BK, rng)
        for clock, *chosen in zip(clocks, operators_B.tolist(), devices_B.tolist(), options, strict=True):
            clock.place(*chosen)
        steps.append((operators_B, devices_B, candidates_BN, allowed_BK, features_BKD, taught_BN, taught_BK))
    fits_B = np.array([clock.fits for clock in clocks])
    operators, devices, candidates, allowed, features, taught, taught_devices = map(np.stack, zip(*steps, strict=True))
    return Trace(operators, devices, candidates, allowed, features, taught, taught_devices, fits_B)


def _choose(logits: Floats | float, allowed: Mask, rng: Generator | None) -> Indices:
    scores = np.where(allowed, logits, -np.inf)
    if rng is not None:  # the greatest sum of logit and Gumbel noise is a sample of the softmax
        scores[allowed] -= np.log(rng.standard_exponential(np.count_nonzero(allowed)))
    chosen: Indices = scores.argmax(axis=1)
    return chosen


def _greatest(values: Floats, allowed: Mask) -> Mask:
    among = np.where(allowed, values, -np.inf)
    greatest: Mask = allowed & (among == among.max(axis=1, keepdims=True))
    return greatest


def log_probabilities(policy: DualPolicy, encoding: Encoding, trace: Trace) -> tuple[Tensor, Tensor]:
    """Log-probabilities (T, B, N) and (T, B, K) of all steps of finished episodes, with gradients.

    They are -inf for operators that are no candidates and for devices without room.
    """
    operators_TB = torch.from_numpy(trace.operators_TB)
    on_TBK = torch.from_numpy(trace.devices_TB)[..., None] == torch.arange(trace.allowed_TBK.shape[-1])
    added_TBKH = encoding.embedding_NH[operators_TB][:, :, None, :] * on_TBK[..., None]
    sums_TBKH = added_TBKH.cumsum(0) - added_TBKH  # before each step
    devices_TBK = policy.place(
        encoding.operator_part_NC[operators_TB], torch.from_numpy(trace.features_TBKD), sums_TBKH
    )
    logits_TBN = encoding.operator_logits_N.expand(trace.candidates_TBN.shape)
    return (
        logits_TBN.masked_fill(~torch.from_numpy(trace.candidates_TBN), -torch.inf).log_softmax(-1),
        devices_TBK.masked_fill(~torch.from_numpy(trace.allowed_TBK), -torch.inf).log_softmax(-1),
    )


# ---- training ----------------------------------------------------------------------------------------------------------

BATCH = 16
IMITATION_RATE = 2e-3
FIRST_RATE, LAST_RATE = 1e-3, 1e-4  # of stage II; linear
FIRST_ENTROPY = 1e-2  # weight in the loss; falls to 0, linear
_NO_ROOM_FACTOR = 2.0  # multiplies the price of a placement that exceeds a device's memory


class Trainer:
    """Trains a new policy on one problem. Two runs with the same seed and counts give the same weights.

    `seed`: of its weights and samples. Torch computes with one thread from now on.
    """

    def __init__(self, problem: PlacementProblem, seed: int, rules: Rules, shape: Shape) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.policy, self.rules = DualPolicy(shape), rules
        self.best: Placement | None = None  # of priced episodes that fit into memory
        self.num_episodes = 0
        self._instance = make_instance(problem)
        self._rng, self._best_seconds = np.random.default_rng(seed), inf
        self._optimizers = [
            torch.optim.Adam(network.parameters(), fused=True) for network in (self.policy.select, self.policy.place)
        ]

    def imitate(self, num_episodes: int) -> None:
        """Stage I: in the states that the policy reaches, raise the probability of Critical Path's choices.

        Choices that tie count as one.
        """
        for _, trace, encoding in self._batches(num_episodes):
            logs = log_probabilities(self.policy, encoding, trace)
            self._descend(imitation_loss(logs, trace, self.rules), IMITATION_RATE)

    def reinforce(self, num_episodes: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Stage II: policy gradient on makespans in Hearth's simulator. Ends early with `stop()`."""
        for left, trace, encoding in self._batches(num_episodes):
            advantages_B = advantages(self._prices(trace))
            logs = log_probabilities(self.policy, encoding, trace)
            loss = reinforcement_loss(logs, trace, advantages_B, FIRST_ENTROPY * left, self.rules)
            self._descend(loss, LAST_RATE + (FIRST_RATE - LAST_RATE) * left)
            if stop():
                return

    def greedy(self) -> Trace:
        """The episode of the most probable choices."""
        encoding = self.policy.encode(self._instance.graph)
        trace: Trace = run_episodes(self._instance, self.policy, encoding, self.rules, 1, None)
        return trace

    def sample(self, num_episodes: int) -> tuple[Trace, Encoding]:
        """Episodes of choices with the policy's probabilities."""
        encoding = self.policy.encode(self._instance.graph)
        self.num_episodes += num_episodes
        return run_episodes(self._instance, self.policy, encoding, self.rules, num_episodes, self._rng), encoding

    def _batches(self, num_episodes: int) -> Iterator[tuple[float, Trace, Encoding]]:
        """Sampled episodes, with the share of all that were left before each batch."""
        for done in range(0, num_episodes, BATCH):
            yield 1 - done / num_episodes, *self.sample(min(BATCH, num_episodes - done))

    def _prices(self, trace: Trace) -> Floats:
        placements = trace.placements()
        # The order of placing decides between ready items.
        seconds_B = np.array([schedule(self._instance.problem, *each).makespan for each in placements], np.float64)
        for placement, seconds, fits in zip(placements, seconds_B.tolist(), trace.fits_B.tolist(), strict=True):
            if fits and seconds < self._best_seconds:
                self.best, self._best_seconds = placement, seconds
        return np.where(trace.fits_B, seconds_B, _NO_ROOM_FACTOR * seconds_B)

    def _descend(self, loss: Tensor, rate: float) -> None:
        """One step of Adam for each policy."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rate
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()


def imitation_loss(logs: tuple[Tensor, Tensor], trace: Trace, rules: Rules) -> Tensor:
    """Minus the log-probability of the teacher's choices: the sum over those that tie; mean over episodes."""
    loss = torch.zeros(())
    for learns, log_TBX, taught_TBX in (
        (rules.learns_operators, logs[0], trace.taught_operators_TBN),
        (rules.learns_devices, logs[1], trace.taught_devices_TBK),
    ):
        if learns:
            loss = loss - log_TBX.masked_fill(~torch.from_numpy(taught_TBX), -torch.inf).logsumexp(-1).sum()
    return loss / len(trace.fits_B)


def reinforcement_loss(
    logs: tuple[Tensor, Tensor], trace: Trace, advantages_B: Floats, entropy_weight: float, rules: Rules
) -> Tensor:
    """REINFORCE: minus the log-probability of each episode times its advantage, minus weighted entropy; mean over episodes."""
    weights_B = torch.from_numpy(advantages_B.astype(np.float32))
    loss = torch.zeros(())
    for learns, log_TBX, chosen_TB in (
        (rules.learns_operators, logs[0], trace.operators_TB),
        (rules.learns_devices, logs[1], trace.devices_TB),
    ):
        if learns:
            chosen = torch.from_numpy(chosen_TB)[..., None]
            loss = loss - (log_TBX.gather(-1, chosen)[..., 0] * weights_B).sum()
            loss = loss - entropy_weight * entropy(log_TBX).sum()
    return loss / len(weights_B)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy along the last axis; choices with probability 0 add nothing."""
    finite = log_probabilities.masked_fill(log_probabilities.isinf(), 0.0)
    return -(log_probabilities.exp() * finite).sum(-1)
