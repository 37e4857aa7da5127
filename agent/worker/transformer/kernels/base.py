"""Bases of the layouts: buffering while a matrix is loaded, quantisation errors, the choice of a kernel.

Also the instructions of the processor that decide which kernels are fast.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hearth.plan.kernels import KernelChoice

FILLED_WITH = 0.02  # the weights of a matrix that is filled


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products (x86: AMX or AVX512-BF16), and torch may use them.

    `ATEN_CPU_CAPABILITY` keeps torch from newer instructions than it names; without them a bfloat16 GEMM is some hundred
    times slower than one in float32.
    """
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):
        return False
    probes = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(probe is not None and bool(probe()) for probe in probes)


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether this device has no instructions for bfloat16 products, so that one takes seconds and need not be measured."""
    return device.type == "cpu" and platform.machine() == "x86_64" and not multiplies_bfloat16()


def multiply_into(part_sn: Tensor, x_sk: Tensor, tile_km: Tensor, product: Tensor) -> None:
    """Write x @ tile to `part_sn`, by way of the memory of `product` if their data types differ."""
    if x_sk.dtype == part_sn.dtype:
        torch.mm(x_sk, tile_km, out=part_sn)
    else:
        part_sn.copy_(torch.mm(x_sk, tile_km, out=product[: part_sn.numel()].view(part_sn.shape)))


class QuantisationError(NamedTuple):
    """Quantisation error of a matrix: sums of squares of the differences and of the weights."""

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def add(self, stored: Tensor, original: Tensor) -> QuantisationError:
        """Add the error of storing the weights `original` as `stored`."""
        original = original.float()
        error = float((stored.float() - original).square().sum())
        return QuantisationError(self.squared_error + error, self.squared_norm + float(original.square().sum()))


class Partition(NamedTuple):
    """The blocks in which a matrix is used: ranges of outputs (axis 0) or inputs (axis 1) between these borders."""

    axis: int
    borders: tuple[int, ...]  # from 0 to the matrix's size


class KernelMatrix(ABC):
    """A matrix [n,k] in one layout. `choice` selects among `kernels`; without it, or if it names others, `default_kernel`."""

    layout: ClassVar[str]
    kernels: ClassVar[tuple[str, ...]]
    shape: tuple[int, int]
    choice: KernelChoice | None = None

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the matrix in memory."""

    @property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """Address and size in bytes of each piece of memory that the matrix takes."""
        return tuple(map(memory_range, self.tensors))

    @abstractmethod
    def fill(self) -> None:
        """Set all weights to a constant, for measurements: in any format, that takes no longer than writing them."""

    def matmul(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x W^T + bias [s,n]; written to `out` if given."""
        return self.product(self.kernel(x_sk.shape[0]), x_sk, bias_n, out)

    def kernel(self, rows: int) -> str:
        """The kernel that `matmul` uses for this number of rows."""
        chosen = None if self.choice is None else self.choice.kernel(rows)
        return chosen if chosen in self.kernels else self.default_kernel(rows)

    def default_kernel(self, rows: int) -> str:
        """The kernel for this number of rows where none was measured."""
        return self.kernels[0]

    @abstractmethod
    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """As `matmul`, with one of `kernels`."""


class BufferedMatrix(KernelMatrix):
    """Base of formats that are converted in one go: buffers float32 values until the whole matrix is loaded."""

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        self.quantisation_error = QuantisationError()
        self.shape = (num_outputs, num_inputs)
        self._device = device
        self._buffer: Tensor | None = None
        self._num_missing = num_outputs * num_inputs

    def load(self, rows: slice, columns: slice, values: Tensor) -> None:
        if not values.numel() and self.shape[0] * self.shape[1]:
            return  # nothing is left to store, if all values came before
        if self._buffer is None:
            self._buffer = torch.empty(self.shape, dtype=torch.float32, device=self._device)
        self._buffer[rows, columns].copy_(values)
        self._num_missing -= values.numel()
        if self._num_missing == 0:
            self._store(self._buffer)
            self._buffer = None

    def fill(self) -> None:
        self._store(torch.full(self.shape, FILLED_WITH, device=self._device))

    def read(self, rows: slice, columns: slice) -> Tensor | None:
        """A part of the matrix as it was loaded; None if the weight format has changed its values."""
        return None

    def _store(self, weight_nk: Tensor) -> None:
        raise NotImplementedError


class QuantisedMatrix(BufferedMatrix):
    """Base of the quantised formats."""

    def _store(self, weight_nk: Tensor) -> None:
        self.quantisation_error = self.quantisation_error.add(self._quantise(weight_nk), weight_nk)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        """Quantise and store the matrix; returns the dequantised values in float32."""
        raise NotImplementedError


def add_bias(y_sn: Tensor, bias_n: Tensor | None, out: Tensor | None) -> Tensor:
    """Add the bias in place, and copy the result to `out` if given."""
    if bias_n is not None:
        y_sn += bias_n
    return y_sn if out is None else out.copy_(y_sn)


def memory_range(tensor: Tensor) -> tuple[int, int]:
    """Address and size in bytes of a tensor's memory, also for a tensor in oneDNN's layout."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    return tensor.data_ptr(), tensor.nbytes
