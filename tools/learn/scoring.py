"""Probabilities of the dual policy: for one step of an episode, and for all steps of finished episodes with gradients.

Shape letters as in `networks` and `episodes`, and C the width of PLC's hidden layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tools.learn.clock import DeviceOptions, EpisodeClock
from tools.learn.episodes import Trace
from tools.learn.instance import Floats, Indices, Mask, Singles
from tools.learn.networks import DualPolicy, GraphTensors

_STEPS_AT_ONCE = 8  # with message passing per step: bounds the memory of gradients


@dataclass(frozen=True)
class Rules:
    """Which decisions are learnt; the others are Critical Path's (the paper's ablations "SEL only" and "PLC only")."""

    learns_operators: bool = True
    learns_devices: bool = True


class Encoding(NamedTuple):
    """What both policies derive from the graph, once for all R rows or for each of them."""

    operator_logits_RN: Tensor
    embedding_RNH: Tensor  # PLC's
    operator_part_RNC: Tensor  # PLC's

    def detach(self) -> Encoding:
        return Encoding(*(tensor.detach() for tensor in self))


def encode(policy: DualPolicy, graph: GraphTensors, partial_RNX: Singles | None = None) -> Encoding:
    """Run the message passing of both policies; with features of partial assignments, once for each of them."""
    features_RNX = graph.static_NX[None]
    if partial_RNX is not None:
        partial = torch.from_numpy(partial_RNX)
        features_RNX = torch.cat([features_RNX.expand(len(partial), -1, -1), partial], dim=-1)
    embedding_RNH = policy.place.encoder(features_RNX, graph)
    return Encoding(
        policy.select(policy.select.encoder(features_RNX, graph), graph),
        embedding_RNH,
        policy.place.operator_part(embedding_RNH, graph),
    )


class PolicyChooser:
    """The policy's choices: samples from the softmax, or without `rng` the most probable operator and device.

    `encoding` is that of the graph; without it, messages are passed at every step.
    """

    def __init__(
        self, policy: DualPolicy, graph: GraphTensors, encoding: Encoding | None, rng: np.random.Generator | None,
        rules: Rules,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._graph = graph
        self._encoding = encoding
        self._rng = rng
        self._rules = rules
        self._placed: list[tuple[Indices, Indices]] = []  # operators and devices of the steps so far
        self._sums_BKH: Tensor | None = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def operators(self, clock: EpisodeClock, taught_BN: Mask, partial_BNX: Singles | None) -> Indices:
        if partial_BNX is not None:
            self._encoding = encode(self._policy, self._graph, partial_BNX)
            self._sums_BKH = None
        if not self._rules.learns_operators or self._encoding is None:
            return self._choose(np.zeros(taught_BN.shape), taught_BN)
        return self._choose(self._encoding.operator_logits_RN.double().numpy(), clock.candidates_BN)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def devices(self, operators_B: Indices, options: DeviceOptions, taught_BK: Mask) -> Indices:
        if not self._rules.learns_devices or self._encoding is None:
            return self._choose(np.zeros(taught_BK.shape), taught_BK)
        rows, operators = torch.arange(len(operators_B)), torch.from_numpy(operators_B)
        embedding_BNH = self._encoding.embedding_RNH.expand(len(rows), -1, -1)
        if self._sums_BKH is None:
            self._sums_BKH = embedding_BNH.new_zeros(*taught_BK.shape, embedding_BNH.shape[-1])
            for earlier_operators, devices in self._placed:
                self._sums_BKH[rows, devices] += embedding_BNH[rows, earlier_operators]
        parts_BC = self._encoding.operator_part_RNC.expand(len(rows), -1, -1)[rows, operators]
        logits_BK = self._policy.place(parts_BC, torch.from_numpy(options.features_BKD), self._sums_BKH)
        devices_B = self._choose(logits_BK.double().numpy(), options.allowed_BK)
        self._sums_BKH[rows, torch.from_numpy(devices_B)] += embedding_BNH[rows, operators]
        self._placed.append((operators_B, devices_B))
        return devices_B

    def _choose(self, logits: Floats, allowed: Mask) -> Indices:
        scores = np.where(allowed, logits, -np.inf)
        if self._rng is not None:  # the greatest sum of logit and Gumbel noise is a sample of the softmax
            scores[allowed] -= np.log(self._rng.standard_exponential(np.count_nonzero(allowed)))
        chosen: Indices = scores.argmax(axis=1)
        return chosen


class StepProbabilities(NamedTuple):
    """Log-probabilities of some steps: -inf for operators that are no candidates and for devices without room."""

    steps: slice
    operators_TBN: Tensor
    devices_TBK: Tensor


def log_probabilities(
    policy: DualPolicy, graph: GraphTensors, encoding: Encoding | None, trace: Trace
) -> Iterator[StepProbabilities]:
    """The probabilities of all steps of finished episodes, with gradients.

    All steps share `encoding`. Without it, messages are passed for every step, and steps come in parts.
    """
    num_steps, num_episodes, n = trace.candidates_TBN.shape
    if encoding is not None:
        sums_TBKH = _sums_before(encoding.embedding_RNH[0], trace)
        parts_TBC = encoding.operator_part_RNC[0][torch.from_numpy(trace.operators_TB)]
        devices = policy.place(parts_TBC, torch.from_numpy(trace.features_TBKD), sums_TBKH)
        operators = encoding.operator_logits_RN.expand(num_steps, num_episodes, -1)
        yield _masked(slice(0, num_steps), operators, devices, trace)
        return
    assert trace.partial_TBNX is not None, "message passing per step needs features of the partial assignment"
    for at in range(0, num_steps, _STEPS_AT_ONCE):
        steps = slice(at, min(at + _STEPS_AT_ONCE, num_steps))
        partial_RNX = trace.partial_TBNX[steps].reshape(-1, n, trace.partial_TBNX.shape[-1])
        here = encode(policy, graph, partial_RNX)
        on_device_TBKN = _on_device(trace, steps)
        shape = on_device_TBKN.shape[:2]
        sums = on_device_TBKN @ here.embedding_RNH.view(*shape, n, -1)
        index = torch.from_numpy(trace.operators_TB[steps])[..., None, None].expand(
            -1, -1, 1, here.operator_part_RNC.shape[-1]
        )
        parts = here.operator_part_RNC.view(*shape, n, -1).gather(2, index)[:, :, 0]
        devices = policy.place(parts, torch.from_numpy(trace.features_TBKD[steps]), sums)
        yield _masked(steps, here.operator_logits_RN.view(*shape, n), devices, trace)


def _masked(steps: slice, operators_TBN: Tensor, devices_TBK: Tensor, trace: Trace) -> StepProbabilities:
    candidates, allowed = torch.from_numpy(trace.candidates_TBN[steps]), torch.from_numpy(trace.allowed_TBK[steps])
    return StepProbabilities(
        steps,
        operators_TBN.masked_fill(~candidates, -torch.inf).log_softmax(-1),
        devices_TBK.masked_fill(~allowed, -torch.inf).log_softmax(-1),
    )


def _sums_before(embedding_NH: Tensor, trace: Trace) -> Tensor:
    """Before each step, the sums (T, B, K, H) of the embeddings of the operators on each device."""
    num_devices = trace.allowed_TBK.shape[-1]
    on_TBK = torch.from_numpy(trace.devices_TB)[..., None] == torch.arange(num_devices)
    added_TBKH = embedding_NH[torch.from_numpy(trace.operators_TB)][:, :, None, :] * on_TBK[..., None]
    return added_TBKH.cumsum(0) - added_TBKH


def _on_device(trace: Trace, steps: slice) -> Tensor:
    """Before each of some steps, 1 (T, B, K, N) for the operators on each device."""
    num_steps, num_episodes, n = trace.candidates_TBN.shape
    step_BN = np.empty((num_episodes, n), np.int64)
    device_BN = np.empty((num_episodes, n), np.int64)
    np.put_along_axis(step_BN, trace.operators_TB.T, np.arange(num_steps)[None], axis=1)
    np.put_along_axis(device_BN, trace.operators_TB.T, trace.devices_TB.T, axis=1)
    placed_TBN = step_BN < np.arange(num_steps)[steps, None, None]
    on_BKN = device_BN[:, None] == np.arange(trace.allowed_TBK.shape[-1])[:, None]
    return torch.from_numpy((placed_TBN[:, :, None] & on_BKN).astype(np.float32))
