"""Base of the quantised layouts of which there are no views."""

from __future__ import annotations

import torch

from agent.worker.transformer.kernels.base import QuantisedMatrix
from agent.worker.transformer.kernels.plain import FloatMatrix
from hearth.errors import StepFailed


class WholeMatrix(QuantisedMatrix):
    """A matrix that is used whole, or not at all: a rank may hold weights of which it uses none for decoding."""

    def rows(self, part: slice) -> WholeMatrix | FloatMatrix:
        return self._view(0, part)

    def columns(self, part: slice) -> WholeMatrix | FloatMatrix:
        return self._view(1, part)

    def _view(self, axis: int, part: slice) -> WholeMatrix | FloatMatrix:
        size = len(range(self.shape[axis])[part])
        if size == self.shape[axis]:
            return self
        if size:
            raise StepFailed(
                device="this device", reason=f"a quantised matrix in {self.layout}'s layout cannot be divided"
            )
        shape = [0 if axis == each else self.shape[each] for each in (0, 1)]
        return FloatMatrix(torch.empty(shape, device=self._device))
