"""Copies of tensors between the compute device and host arrays for the wire, with one interface for CPU and CUDA.

On CUDA, tiles are copied through pinned host memory on a separate stream, so that copies overlap with GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

WireTile = np.ndarray[Any, Any]


class CpuStaging:
    """Tensors on the CPU are used as host arrays directly."""

    device = torch.device("cpu")

    def to_wire(self, tensor: Tensor) -> WireTile:
        """Return the tensor as a host array. It must not change afterwards."""
        tile: WireTile = tensor.contiguous().numpy()
        return tile

    def from_wire(self, tile: WireTile, into: Tensor) -> None:
        """Copy a received tile into `into`, before any work that is queued on the device later."""
        # A copy, because received memory has arbitrary alignment, on which GEMM kernels may round differently.
        np.copyto(into.numpy(), tile)

    def add_from_wire(self, tile: WireTile, into: Tensor) -> None:
        """Add a received tile to `into`."""
        array = into.numpy()
        np.add(array, tile, out=array)


class CudaStaging:
    """Tensors on a GPU. torch's caching host allocator reuses a pinned buffer only after its copies have ended."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._copies = torch.cuda.Stream(self.device)

    def to_wire(self, tensor: Tensor) -> Callable[[], WireTile]:
        """Start the copy; return a function that waits for it and returns the array. The tensor must not change afterwards."""
        tensor = tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._copies)
            copied = torch.cuda.Event()
            copied.record(self._copies)

        def wait() -> WireTile:
            copied.synchronize()
            tile: WireTile = host.numpy()
            return tile

        return wait

    def from_wire(self, tile: WireTile, into: Tensor) -> None:
        host = torch.empty(into.shape, dtype=into.dtype, pin_memory=True)
        np.copyto(host.numpy(), tile)
        compute = torch.cuda.current_stream(self.device)
        self._copies.wait_stream(compute)  # `into` may still be in use, or not yet allocated, on the compute stream
        with torch.cuda.stream(self._copies):
            into.copy_(host, non_blocking=True)
            into.record_stream(self._copies)
        compute.wait_stream(self._copies)

    def add_from_wire(self, tile: WireTile, into: Tensor) -> None:
        received = torch.empty_like(into)
        self.from_wire(tile, received)
        into.add_(received)


Staging: TypeAlias = CpuStaging | CudaStaging


def make_staging(compute_device: str) -> Staging:
    """The staging for a compute device."""
    return CudaStaging() if compute_device == "cuda" else CpuStaging()
