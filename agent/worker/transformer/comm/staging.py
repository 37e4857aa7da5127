"""Where tensors live, and how they get to and from the wire: the same code for CPU and CUDA.

On CUDA, tiles pass through pinned host memory, copied on a stream of their own, so that a copy runs beside a GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

WireTile = np.ndarray[Any, Any]


class CpuStaging:
    device = torch.device("cpu")

    def to_wire(self, tensor: Tensor) -> WireTile:
        """The tensor as a host array. It must not change afterwards."""
        tile: WireTile = tensor.contiguous().numpy()
        return tile

    def from_wire(self, tile: WireTile, into: Tensor) -> None:
        """Copy a received tile into `into`; work queued on the device afterwards sees it."""
        # Into our own aligned buffer: GEMM kernels may round differently on memory aligned by chance.
        np.copyto(into.numpy(), tile)

    def add_from_wire(self, tile: WireTile, into: Tensor) -> None:
        """Add a received tile to `into`."""
        array = into.numpy()
        np.add(array, tile, out=array)


class CudaStaging:
    """Pinned buffers come from torch's caching host allocator, which reuses one only after its copies have ended."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._copies = torch.cuda.Stream(self.device)

    def to_wire(self, tensor: Tensor) -> Callable[[], WireTile]:
        """A function that waits for the copy in host memory. The tensor must not change afterwards."""
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
    return CudaStaging() if compute_device == "cuda" else CpuStaging()
