"""Times of the kernels that can multiply a model's matrices on this device; the profiler chooses by them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import Partition, emulates_bfloat16
from agent.worker.transformer.matrices import Matrix, layouts_to_measure
from hearth.plan.kernels import KERNEL_ROWS, KernelTime
from hearth.plan.layer import layer_matrices
from hearth.plan.model_spec import ModelSpec, WeightFormat
from hearth.platform.machine import last_level_cache_bytes

# Elements of a measured matrix at most; of a larger one, a part of the outputs is measured, which computes at the same speed.
# More on a GPU, where starting the kernels of a small product takes longer than they do.
_MAX_ELEMENTS, _MAX_GPU_ELEMENTS = 4 << 20, 16 << 20
_GPU_ROWS = 1024  # measured on a GPU, too: up to a few hundred rows, a GEMM takes no longer than its start
_OUTPUT_MULTIPLE = 64  # outputs of a measured part: every layout has whole blocks of them
_MIN_DECODE_ROWS = 16  # rows; below it a product is bound by memory, so that the weights must not be in a cache
# Before such a product, this multiple of the last-level cache is read, but no more than a step of decoding reads.
_CACHE_MULTIPLE = 2
_MAX_EVICT_BYTES = 256 << 20  # takes 25 ms
_UNKNOWN_CACHE_BYTES = 16 << 20  # of a home's computers, where the system does not say
_MIN_TURNS, _MAX_TURNS = 2, 6  # samples, of which the least counts: load, and the pauses of a CPU quota, only add time
_MAX_SECONDS = 0.5  # of all samples of a product beyond `_MIN_TURNS`: slow devices take few
# Relative difference of a row's product alone and among others, as sums of float32 in another order cause it. Those of
# bfloat16 differ by up to 4e-5.
_MAX_ROW_DEPENDENCE = 1e-6
_HOPELESS = 3.0  # times the fastest kernel's time: such a kernel gets no further turns


def measure_kernels(
    spec: ModelSpec, seq_len: int, device: torch.device, deterministic: bool = False
) -> tuple[KernelTime, ...]:
    """Seconds of a product for each shape of a layer, number of rows, and kernel. Empty where there is no choice.

    A decoder decodes few rows and prefills many; an encoder only computes many. `deterministic`: only kernels whose results
    for a row do not depend on the number of rows.
    """
    fewest = 1 if spec.causal else min(_MIN_DECODE_ROWS, seq_len)
    counts = KERNEL_ROWS if device.type == "cpu" else (*KERNEL_ROWS, _GPU_ROWS)
    rows = [count for count in counts if fewest <= count <= max(seq_len, fewest)] or [seq_len]
    most = _MAX_ELEMENTS if device.type == "cpu" else _MAX_GPU_ELEMENTS
    shapes = dict.fromkeys(_measured_part(*shape, most) for shape in layer_shapes(spec))
    evicted = torch.ones(bytes_to_evict(spec, _cache_bytes(device)) // 4, device=device)
    return tuple(
        time for shape in shapes for time in _times_of_shape(shape, spec.weights, rows, device, evicted, deterministic)
    )


def layer_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Outputs and inputs of a layer's matrices."""
    return [matrix.shape for matrix in layer_matrices(spec)]


def synchroniser(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done all that is queued on it; a CPU queues nothing."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def layer_bytes(spec: ModelSpec) -> int:
    """Bytes of a layer's matrices."""
    return round(spec.matrix_bytes * sum(map(math.prod, layer_shapes(spec))))


def bytes_to_evict(spec: ModelSpec, cache_bytes: int) -> int:
    """Bytes to read before a product of few rows, so that the cache holds no more of the weights than in decoding.

    `cache_bytes`: of the last-level cache; 0 if it is unknown.
    """
    decoded_bytes = spec.num_layers * layer_bytes(spec)
    return min(_CACHE_MULTIPLE * (cache_bytes or _UNKNOWN_CACHE_BYTES), decoded_bytes, _MAX_EVICT_BYTES)


def _cache_bytes(device: torch.device) -> int:
    """Bytes of the device's last-level cache; 0 if it is unknown."""
    if device.type == "cpu":
        return last_level_cache_bytes()
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def _measured_part(num_outputs: int, num_inputs: int, max_elements: int) -> tuple[int, int]:
    most = max(max_elements // num_inputs // _OUTPUT_MULTIPLE * _OUTPUT_MULTIPLE, _OUTPUT_MULTIPLE)
    return min(num_outputs, most), num_inputs


def _times_of_shape(
    shape: tuple[int, int],
    weights: WeightFormat,
    rows: Sequence[int],
    device: torch.device,
    evicted: Tensor,
    deterministic: bool,
) -> list[KernelTime]:
    whole = Partition(0, (0, shape[0]))
    layouts = layouts_to_measure(*shape, weights, device, whole)
    others = layouts_to_measure(*shape, weights, device, whole) if min(rows) < _MIN_DECODE_ROWS else layouts
    options = [
        _Option(matrix, kernel, other)
        for matrix, other in zip(layouts, others, strict=True)
        for kernel in matrix.kernels
        if kernel != "expand-bfloat16" or not emulates_bfloat16(device)
    ]
    if len(options) == 1:
        return []
    for matrix, other in zip(layouts, others, strict=True):
        if other is not matrix:
            other.fill()
        if deterministic:
            _randomise(matrix, device)
        else:
            matrix.fill()
    if deterministic:
        dependence = [_row_dependence(option.matrix, option.kernel, max(rows), device) for option in options]
        most = max(_MAX_ROW_DEPENDENCE, min(dependence))
        options = [option for option, found in zip(options, dependence, strict=True) if found <= most]
    num_bytes = {matrix.layout: sum(dict(matrix.memory).values()) for matrix in layouts}
    return [
        KernelTime(
            num_outputs=shape[0],
            num_inputs=shape[1],
            rows=count,
            layout=option.matrix.layout,
            kernel=option.kernel,
            seconds=seconds,
            bytes_per_weight=num_bytes[option.matrix.layout] / math.prod(shape),
        )
        for count in rows
        for option, seconds in zip(options, _least_seconds(options, count, evicted, device), strict=True)
    ]


class _Option(NamedTuple):
    """A kernel to be timed with `matrix`. With few rows, `other`, another matrix of the layout, is multiplied before it."""

    matrix: Matrix
    kernel: str
    other: Matrix


def _randomise(matrix: Matrix, device: torch.device) -> None:
    whole = slice(None)
    matrix.load(whole, whole, torch.randn(matrix.shape, device=device).mul(0.02))


def _row_dependence(matrix: Matrix, kernel: str, rows: int, device: torch.device) -> float:
    """Largest relative difference between a product's first rows and the product of these rows alone."""
    x_sk = torch.randn(rows, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(device)
    together = matrix.product(kernel, x_sk)
    counts = [count for count in KERNEL_ROWS if count < rows]
    parts = [(matrix.product(kernel, x_sk[:count]), together[:count]) for count in counts]
    return max((float((alone - part).norm() / part.norm()) for alone, part in parts), default=0.0)


def _least_seconds(options: Sequence[_Option], rows: int, evicted: Tensor, device: torch.device) -> list[float]:
    """The least time of each kernel. They take turns, so that load in the background disturbs all of them.

    With one thread it is processor time, which other processes disturb less. On a GPU, the time until it has ended.
    """
    on_cpu = device.type == "cpu"
    clock = time.thread_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    wait = synchroniser(device)
    x_sk = torch.randn(rows, options[0].matrix.shape[1], device=device)
    least = [math.inf] * len(options)
    total = 0.0
    cached: set[int] = set()  # matrices read since the eviction
    for turn in range(_MAX_TURNS + 1):
        for index, (matrix, kernel, other) in enumerate(options):
            if turn > 1 and least[index] > _HOPELESS * min(least):
                continue
            if rows < _MIN_DECODE_ROWS:
                if id(matrix) in cached or not cached:
                    evicted.sum()
                    cached.clear()
                cached.add(id(matrix))
                other.product(kernel, x_sk)  # in decoding, the product before has left the kernel's code in a cache
            wait()
            start = clock()
            matrix.product(kernel, x_sk)
            wait()
            seconds = clock() - start
            total += seconds
            if turn or seconds > _MAX_SECONDS:  # the first turn warms up
                least[index] = min(least[index], seconds)
        if turn >= _MIN_TURNS and total > _MAX_SECONDS:
            break
    return least
