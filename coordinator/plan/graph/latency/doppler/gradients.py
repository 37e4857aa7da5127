"""REINFORCE with gradients that are written out: of logits, of the heads of Doppler's policies, and Adam. Pure.

The heads are the layers after the encoder (`policy.HEADS`); what they read of a graph is computed once. The loss is minus
the sum over episodes of weight * log pi(all choices) + entropy weight * entropy of all steps: REINFORCE where weights are
advantages, imitation where they are positive constants.

Shape letters: n operators, which are also the steps of an episode, K devices, F features of a device, h hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.latency.doppler.features import Floats, Ints, ProblemFeatures
from coordinator.plan.graph.latency.doppler.policy import HEADS, HIDDEN, Encoding, Policy, act, act_slopes, softmax
from coordinator.plan.graph.latency.doppler.rollout import MAX_LOGIT_SPREAD, Rollouts, candidates_by_step

Array = NDArray[np.floating[Any]]
Weights = dict[str, Array]


def loss_gradients(logits_SK: Array, chosen_S: NDArray[np.intp], advantages_S: Array, entropy_weight: float) -> Array:
    """Gradients by the logits of the sum over steps of -advantage * log pi(chosen) - entropy_weight * entropy.

    Choices with a logit of minus infinity are impossible.
    """
    probabilities = softmax(logits_SK)
    logs = np.log(np.maximum(probabilities, 1e-12))
    entropies = -(probabilities * logs).sum(axis=1, keepdims=True)
    d_logits = probabilities.copy()
    d_logits[np.arange(len(chosen_S)), chosen_S] -= 1.0
    result: Array = advantages_S[:, None] * d_logits + entropy_weight * probabilities * (logs + entropies)
    return result


def advantages(seconds_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much shorter than the mean of the batch each time is, in deviations; 0 if all are equal."""
    deviation = seconds_B.std()
    if deviation <= 1e-9 * seconds_B.mean():
        return np.zeros_like(seconds_B)
    found: NDArray[np.float64] = (seconds_B.mean() - seconds_B) / deviation
    return found


class Adam:
    """Adam (Kingma and Ba, 2015) with its published constants."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights
        self._means = {name: np.zeros_like(each) for name, each in weights.items()}
        self._squares = {name: np.zeros_like(each) for name, each in weights.items()}
        self._num_updates = 0

    def update(self, found: Mapping[str, Array], learning_rate: float) -> None:
        """Move the weights, in place, against the gradients."""
        self._num_updates += 1
        mean_weight, square_weight = 1 - 0.9**self._num_updates, 1 - 0.999**self._num_updates
        for name, weight in self._weights.items():
            gradient, mean, square = found[name], self._means[name], self._squares[name]
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            weight -= learning_rate * (mean / mean_weight) / (np.sqrt(square / square_weight) + 1e-8)


def head_weights(policy: Policy) -> Weights:
    """The weights that are learnt at home; the arrays are the policy's own."""
    return {name: weight for name, weight in policy.weights.items() if name.startswith(HEADS)}


class HeadGradients:
    """The gradients of a policy's heads on one problem; `embedded` is `policy.embed(problem)`."""

    def __init__(self, problem: ProblemFeatures, policy: Policy, embedded: Floats) -> None:
        self._problem = problem.problem
        self._policy, self._embedded = policy, embedded

    def of(self, episodes: Rollouts, weights_B: Floats, entropy_weight: float) -> Weights:
        """The gradients of the loss. Episodes that are not complete count nothing."""
        encoding = self._policy.read(self._embedded)
        found = {name: np.zeros_like(weight) for name, weight in head_weights(self._policy).items()}
        d_select = np.zeros(len(self._embedded))
        for b in np.flatnonzero(episodes.complete).tolist():
            order, weights = episodes.orders[b], np.full(len(self._embedded), weights_B[b])
            d_select += self._d_select_logits(encoding.select_logits, order, weights, entropy_weight)
            self._add_place(found, encoding, episodes, b, weights, entropy_weight)
        self._add_select(found, d_select)
        return found

    def _d_select_logits(self, logits: Floats, order: Ints, weights: Floats, entropy_weight: float) -> Floats:
        """The gradients by SEL's logits [n]: the sum over the steps of one episode."""
        (is_candidate,) = candidates_by_step(self._problem, order[None])
        least = logits.max() - MAX_LOGIT_SPREAD
        masked = np.where(is_candidate, np.maximum(logits, least).astype(float), -np.inf)
        d_logits: Floats = loss_gradients(masked, order, weights, entropy_weight).sum(axis=0) * (logits >= least)
        return d_logits

    def _add_select(self, found: Weights, d_logits_n: Floats) -> None:
        """Backward through SEL's layers."""
        weights = self._policy.weights
        hidden_nh = act(self._embedded @ weights["select.hidden.weight"].T + weights["select.hidden.bias"])
        d_logits_n1 = d_logits_n.astype(hidden_nh.dtype)[:, None]
        d_hidden_nh = d_logits_n1 * weights["select.output.weight"] * act_slopes(hidden_nh)
        found["select.output.weight"] += d_logits_n1.T @ hidden_nh
        found["select.hidden.weight"] += d_hidden_nh.T @ self._embedded
        found["select.hidden.bias"] += d_hidden_nh.sum(axis=0)

    def _add_place(
        self, found: Weights, encoding: Encoding, episodes: Rollouts, b: int, weights: Floats, entropy_weight: float
    ) -> None:
        """Forward and backward through PLC's layers, for all steps of episode b."""
        order, h, own = episodes.orders[b], HIDDEN, self._policy.weights
        devices, allowed_nK, features_nKF = (
            each[b][order] for each in (episodes.assignments, episodes.allowed, episodes.features)
        )
        n, K, F = features_nKF.shape
        read = self._embedded[order][:, : 2 * h]  # Z and H
        placed = _means_before(read[:, h:], devices, K).reshape(n * K, h)  # S
        features = features_nKF.reshape(n * K, F).astype(read.dtype)
        weight = own["place.hidden.weight"]
        device = act(features @ own["device.weight"].T + own["device.bias"])  # Y
        hidden = device @ weight[:, 3 * h :].T + placed @ weight[:, 2 * h : 3 * h].T
        hidden = act(hidden + np.repeat(encoding.static[order], K, axis=0))
        logits_nK = np.where(allowed_nK, (hidden @ own["place.output.weight"].T).reshape(n, K).astype(float), -np.inf)

        d_logits = loss_gradients(logits_nK, devices, weights, entropy_weight).reshape(n * K, 1).astype(read.dtype)
        d_hidden = d_logits * own["place.output.weight"] * act_slopes(hidden)
        d_static = d_hidden.reshape(n, K, h).sum(axis=1)
        d_device = (d_hidden @ weight[:, 3 * h :]) * act_slopes(device)
        found["place.output.weight"] += d_logits.T @ hidden
        found["place.hidden.weight"][:, : 2 * h] += d_static.T @ read
        found["place.hidden.weight"][:, 2 * h :] += d_hidden.T @ np.concatenate([placed, device], axis=1)
        found["place.hidden.bias"] += d_static.sum(axis=0)
        found["device.weight"] += d_device.T @ features
        found["device.bias"] += d_device.sum(axis=0)


def _means_before(values_nh: Floats, devices_n: Ints, K: int) -> Floats:
    """By step and device, the mean of the values of earlier steps on that device [n, K, h]; 0 without any."""
    is_there = (devices_n[:, None] == np.arange(K)).astype(values_nh.dtype)[:, :, None]
    added = values_nh[:, None] * is_there
    means: Floats = (added.cumsum(axis=0) - added) / np.maximum(is_there.cumsum(axis=0) - is_there, 1)
    return means
