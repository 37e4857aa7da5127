"""Tensors and the arrays of the wire: copies between the compute device and the host, and conversions of activations.

Copies have one interface for CPU and CUDA. On CUDA, tiles are copied through pinned host memory on separate streams, so that
copies overlap with GEMMs. Conversions in torch are several times faster than in numpy for many values, with the same results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hearth.wire.codec import Array, Casts

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
    """Tensors on a GPU. torch's caching host allocator reuses a pinned buffer only after its copies have ended.

    Copies from the device and copies to it have a stream each, so that neither waits for the other. A received tile is first
    copied to memory of that stream, which no computation uses: the copy waits for none that is queued.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._to_host = torch.cuda.Stream(self.device)
        self._to_device = torch.cuda.Stream(self.device)

    def to_wire(self, tensor: Tensor) -> Callable[[], WireTile]:
        """Start the copy; return a function that waits for it and returns the array. The tensor must not change afterwards."""
        tensor = tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._to_host.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_host):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._to_host)
            copied = torch.cuda.Event()
            copied.record(self._to_host)

        def wait() -> WireTile:
            copied.synchronize()
            tile: WireTile = host.numpy()
            return tile

        return wait

    def from_wire(self, tile: WireTile, into: Tensor) -> None:
        into.copy_(self._received(tile, into))

    def add_from_wire(self, tile: WireTile, into: Tensor) -> None:
        into.add_(self._received(tile, into))

    def _received(self, tile: WireTile, into: Tensor) -> Tensor:
        """The tile on the device, for work that is queued on the current stream from now on."""
        host = torch.empty(into.shape, dtype=into.dtype, pin_memory=True)
        np.copyto(host.numpy(), tile)
        with torch.cuda.stream(self._to_device):
            received = torch.empty(into.shape, dtype=into.dtype, device=self.device)
            received.copy_(host, non_blocking=True)
        compute = torch.cuda.current_stream(self.device)
        compute.wait_stream(self._to_device)
        received.record_stream(compute)
        return received


Staging: TypeAlias = CpuStaging | CudaStaging


def make_staging(compute_device: str) -> Staging:
    """The staging for a compute device."""
    return CudaStaging() if compute_device == "cuda" else CpuStaging()


# Received frames are read-only, which is safe, since nothing here writes to its input.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
# Up to this many values, as in decoding, calling torch's operators takes longer than numpy's pass over the values: 3.2 and 1.2
# microseconds for 2048 values.
_FEW_VALUES = 8192


class TorchCasts(Casts):
    """The conversions of `Casts`, in torch where that is faster."""

    def to_fp16(self, array: Array) -> Array:
        half: Array = torch.from_numpy(array).half().numpy()
        return half

    def from_fp16(self, array: Array) -> Array:
        full: Array = torch.from_numpy(array).float().numpy()
        return full

    def to_bf16(self, array: Array) -> Array:
        bits: Array = torch.from_numpy(array).bfloat16().view(torch.int16).numpy()
        return bits.view("<u2")

    def from_bf16(self, array: Array) -> Array:
        if array.size <= _FEW_VALUES:
            return super().from_bf16(array)
        full: Array = torch.from_numpy(array.view("<i2")).view(torch.bfloat16).float().numpy()
        return full
