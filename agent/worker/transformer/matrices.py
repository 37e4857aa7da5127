"""Weight matrices in the plan's weight format, multiplied with float32 activations.

Shapes: [n,k] for n outputs and k inputs, as in checkpoints; s rows of activations. `kernels` has the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch

from agent.worker.transformer.kernels.base import Partition
from agent.worker.transformer.kernels.int4 import Int4Matrix
from agent.worker.transformer.kernels.int4_cuda import Int4CudaMatrix, has_int4_kernel
from agent.worker.transformer.kernels.int8 import Int8Matrix
from agent.worker.transformer.kernels.int8_packed import PackedInt8Matrix
from agent.worker.transformer.kernels.nbits import Int4NBitsMatrix, Int8NBitsMatrix, NBitsMatrix
from agent.worker.transformer.kernels.onednn import PackedMatrix
from agent.worker.transformer.kernels.plain import FloatMatrix, WholeMatrix
from hearth.errors import UnsupportedWeights
from hearth.plan.kernels import KernelChoice, nearest_choice
from hearth.plan.model_spec import WeightFormat

# A matrix is loaded in parts by `load`, then multiplied by `matmul`; `quantisation_error` is the loss of its weight format.
Matrix: TypeAlias = FloatMatrix | PackedMatrix | Int8Matrix | WholeMatrix


def empty_matrix(
    num_outputs: int,
    num_inputs: int,
    weights: WeightFormat,
    device: torch.device,
    partition: Partition | None = None,
    choices: Sequence[KernelChoice] = (),
) -> Matrix:
    """Allocate an uninitialised matrix. `partition`: the only parts that will be used (None: any).

    `choices` are the measured layouts and kernels; a choice that this device, shape or partition does not allow gives way to
    the default. With int4, a matrix whose shape does not fit the int4 layout is stored as int8. Raises UnsupportedWeights if
    the device has no int4 kernel.
    """
    if weights == "int4" and device.type != "cpu" and not has_int4_kernel(device):
        raise UnsupportedWeights(device="this device", weights=weights, compute_device=device.type)
    shape = num_outputs, num_inputs
    choice = nearest_choice(choices, *shape)
    layouts = _layouts(*shape, weights, device, partition)
    name = next(iter(layouts)) if choice is None or choice.layout not in layouts else choice.layout
    if name == "onnxruntime" and not _NBITS[weights].supports(*shape, device):
        name = next(iter(layouts))
    matrix = layouts[name]()
    matrix.choice = choice
    return matrix


def layouts_to_measure(
    num_outputs: int, num_inputs: int, weights: WeightFormat, device: torch.device, partition: Partition
) -> list[Matrix]:
    """An uninitialised matrix in each layout that this device, shape and partition allow; the default first."""
    layouts = _layouts(num_outputs, num_inputs, weights, device, partition)
    if "onnxruntime" in layouts and not _NBITS[weights].supports(num_outputs, num_inputs, device):
        del layouts["onnxruntime"]
    return [make() for make in layouts.values()]


_NBITS: dict[str, type[NBitsMatrix]] = {"int4": Int4NBitsMatrix, "int8": Int8NBitsMatrix}


def _layouts(
    num_outputs: int, num_inputs: int, weights: WeightFormat, device: torch.device, partition: Partition | None
) -> dict[str, Callable[[], Matrix]]:
    """The layouts by name, the default first. Without asking onnxruntime, whose import takes memory."""
    shape = num_outputs, num_inputs
    layouts: dict[str, Callable[[], Matrix]] = {}
    if weights == "int4" and device.type != "cpu" and Int4CudaMatrix.supports(*shape):
        layouts["torch"] = partial(Int4CudaMatrix, *shape, device)
    elif weights == "int4" and device.type == "cpu" and Int4Matrix.supports(*shape):
        layouts["torch"] = partial(Int4Matrix, *shape, device)
        layouts["onnxruntime"] = partial(Int4NBitsMatrix, *shape, device)
    elif weights in ("int8", "int4"):
        layouts["torch"] = partial(Int8Matrix, *shape, device)
        if weights == "int8" and partition is not None and len(partition.borders) == 2:
            layouts["onnxruntime"] = partial(Int8NBitsMatrix, *shape, device)
            if PackedInt8Matrix.supports(*shape, device):
                layouts["onednn"] = partial(PackedInt8Matrix, *shape)
    else:
        if weights == "float32" and partition is not None and PackedMatrix.supports(*shape, device):
            layouts["onednn"] = partial(PackedMatrix, *shape, partition)
        dtype = getattr(torch, weights)
        layouts["plain"] = lambda: FloatMatrix(torch.empty(shape, dtype=dtype, device=device))
    return layouts
