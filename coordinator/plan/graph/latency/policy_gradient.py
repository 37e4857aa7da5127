"""REINFORCE for policies whose gradients are written out: gradients by the logits, advantages, and Adam. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Weights = dict[str, Array]


def softmax(logits_SK: Array) -> Array:
    """Probabilities; each row sums to 1."""
    powers: Array = np.exp(logits_SK - logits_SK.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


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
    """Adam (Kingma and Ba, 2015) with its published constants; gradients are clipped to a global norm first."""

    def __init__(self, weights: Mapping[str, Array], max_norm: float = inf) -> None:
        self._weights = weights
        self._max_norm = max_norm
        self._means = {name: np.zeros_like(each) for name, each in weights.items()}
        self._squares = {name: np.zeros_like(each) for name, each in weights.items()}
        self._num_updates = 0

    def update(self, found: Mapping[str, Array], learning_rate: float) -> None:
        """Move the weights, in place, against the gradients."""
        self._num_updates += 1
        norm = float(np.sqrt(sum(float((each**2).sum()) for each in found.values())))
        scale = min(1.0, self._max_norm / norm) if norm > 0 else 1.0
        mean_weight, square_weight = 1 - 0.9**self._num_updates, 1 - 0.999**self._num_updates
        for name, weight in self._weights.items():
            gradient, mean, square = scale * found[name], self._means[name], self._squares[name]
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            weight -= learning_rate * (mean / mean_weight) / (np.sqrt(square / square_weight) + 1e-8)
