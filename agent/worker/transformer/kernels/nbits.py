"""int4 and int8 weights in the layout of onnxruntime's `MatMulNBits`, with activations quantised to int8 (accuracy level 4).

The quantised values are those of `Int4Matrix` and `Int8Matrix`; activations get one scale for each block of inputs. Inputs and
outputs are bound to torch's memory. onnxruntime is imported only where such a matrix is made or measured.
"""

from __future__ import annotations

import gc
import math
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import FILLED_WITH, add_bias
from agent.worker.transformer.kernels.int4 import INT4_GROUP_SIZE, dequantise_int4, quantise_int4
from agent.worker.transformer.kernels.int8 import quantise_int8
from agent.worker.transformer.kernels.plain import WholeMatrix

_ACCURACY_LEVEL = 4  # int8 products: the other levels expand the weights to floats in each run
_INT8_BLOCKS = (128, 64, 32)  # inputs that share a scale of the activations: the largest that divides the inputs
# By bits: onnxruntime 1.31 keeps a block's scale twice, and a sum; in 4 bits also a zero point, and bindings take memory
# (0.923 bytes per weight were measured for 2048 x 2048).
_BLOCK_BYTES = {4: 14, 8: 12}
_STEPS_OF_ONE = {4: 0x11, 8: 0x81}  # bytes whose steps are one above the zero point: 0 in 4 bits, 128 in 8 bits
_ERRORS_ONLY = 3  # onnxruntime's log severity ERROR
_PROBE_TOLERANCE = 0.05  # relative error; int8 activations cause 0.01


class _BoundRow(NamedTuple):
    """Memory for one row of inputs and outputs, bound to a session."""

    x: Tensor  # [1,k]
    y: Tensor  # [1,n]
    binding: Any


class NBitsMatrix(WholeMatrix):
    """A matrix in a session of onnxruntime that consists of one `MatMulNBits`."""

    layout = "onnxruntime"
    kernels = ("onnxruntime",)
    bits: ClassVar[int]

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
        self._session: Any = None
        self._free_rows: list[_BoundRow] = []  # one for each thread that has multiplied a single row

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def memory(self) -> tuple[tuple[int, int], ...]:
        num_blocks = self.shape[0] * (self.shape[1] // self._block)
        num_bytes = self.shape[0] * self.shape[1] * self.bits // 8 + num_blocks * _BLOCK_BYTES[self.bits]
        return ((id(self), num_bytes), *super().memory)

    @property
    def _block(self) -> int:
        raise NotImplementedError

    @classmethod
    def supports(cls, num_outputs: int, num_inputs: int, device: torch.device) -> bool:
        fits = num_outputs > 0 and num_inputs > 0 and num_outputs % 16 == 0 and num_inputs % INT4_GROUP_SIZE == 0
        return device.type == "cpu" and fits and _is_available(cls)

    def fill(self) -> None:
        num_blocks = self.shape[1] // self._block
        steps = np.full((self.shape[0], num_blocks, self._block * self.bits // 8), _STEPS_OF_ONE[self.bits], np.uint8)
        scales = np.full((self.shape[0], num_blocks), FILLED_WITH, np.float32)
        zero_points = np.zeros((self.shape[0], -(-num_blocks // 2)), np.uint8) if self.bits == 4 else None
        self._session = _session(self.bits, self._block, steps, scales, zero_points)

    def _product(self, x_sk: Tensor, out: Tensor | None) -> Tensor:
        """The product, which onnxruntime writes to `out` itself if it is contiguous."""
        x_sk = x_sk.contiguous()
        y_sn = x_sk.new_empty(x_sk.shape[0], self.shape[0]) if out is None or not out.is_contiguous() else out
        if x_sk.shape[0]:
            self._session.run_with_iobinding(self._bind(x_sk, y_sn))
        return y_sn

    def _bind(self, x_sk: Tensor, y_sn: Tensor) -> Any:
        binding = self._session.io_binding()
        binding.bind_input("x", "cpu", 0, np.float32, tuple(x_sk.shape), x_sk.data_ptr())
        binding.bind_output("y", "cpu", 0, np.float32, tuple(y_sn.shape), y_sn.data_ptr())
        return binding

    def _product_of_one_row(self, x_1k: Tensor, out: Tensor | None) -> Tensor:
        """As `_product`, without binding each time, which takes 30 to 60 µs."""
        try:
            row = self._free_rows.pop()
        except IndexError:
            x, y = torch.empty(1, self.shape[1]), torch.empty(1, self.shape[0])
            row = _BoundRow(x, y, self._bind(x, y))
        row.x.copy_(x_1k)
        self._session.run_with_iobinding(row.binding)
        y_1n = row.y.clone() if out is None else out.copy_(row.y)
        self._free_rows.append(row)
        return y_1n

    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y_sn = self._product_of_one_row(x_sk, out) if x_sk.shape[0] == 1 else self._product(x_sk, out)
        return add_bias(y_sn, bias_n, None if y_sn is out else out)


class Int4NBitsMatrix(NBitsMatrix):
    """int4 with the steps, scales and zero points of `quantise_int4`."""

    bits = 4

    @property
    def _block(self) -> int:
        return INT4_GROUP_SIZE

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        steps, scales, zero_points = quantise_int4(weight_nk)
        padded = torch.nn.functional.pad(zero_points, (0, zero_points.shape[1] % 2))
        self._session = _session(
            self.bits, INT4_GROUP_SIZE, _pack_pairs(steps), scales.float().numpy(), _pack_pairs(padded)
        )
        return dequantise_int4(steps, scales, zero_points)


class Int8NBitsMatrix(NBitsMatrix):
    """int8: all blocks of an output have its scale."""

    bits = 8

    @property
    def _block(self) -> int:
        return next(block for block in _INT8_BLOCKS if self.shape[1] % block == 0)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        values, scales = quantise_int8(weight_nk)
        blocks = values.unflatten(1, (-1, self._block))
        steps = (blocks.view(torch.uint8) ^ 0x80).numpy()  # plus 128, the default zero point
        repeated = scales.float()[:, None].expand(blocks.shape[:2]).contiguous()
        self._session = _session(self.bits, self._block, steps, repeated.numpy())
        return values * scales.float()[:, None]


def _pack_pairs(values: Tensor) -> np.ndarray[Any, Any]:
    """Values from 0 to 15 as bytes, two neighbours of the last axis in each, the first in its low half."""
    low, high = values.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(dim=-1)
    packed: np.ndarray[Any, Any] = (high << 4 | low).numpy()
    return packed


def _session(
    bits: int,
    block: int,
    steps: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    zero_points: np.ndarray[Any, Any] | None = None,
) -> Any:
    """A session that computes y = x W^T. `steps` [n, k / block, block * bits / 8] uint8, `scales` [n, k / block] float32.

    `zero_points` [n, k / block / 2] uint8, two in a byte; None: the middle. onnxruntime packs all of them while it creates the
    session, and then holds only the packed steps, scales and sums.
    """
    from agent.worker.onnx_runtime import ort

    options = ort.SessionOptions()
    if torch.get_num_threads() == 1:
        options.intra_op_num_threads = 1  # it computes in the calling thread, without a pool
    else:
        options.use_per_session_threads = False
        _share_threads()
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.log_severity_level = _ERRORS_ONLY
    arrays = {"steps": steps, "scales": scales} | ({} if zero_points is None else {"zero_points": zero_points})
    values = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
    options.add_external_initializers(list(arrays), values)
    model = _model(bits, block, steps.shape[0], steps.shape[1] * block, zero_points is not None)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=1)
def _share_threads() -> None:
    """Create the pool of threads for all sessions. From then on, no session of this process can have threads of its own."""
    from agent.worker.onnx_runtime import ort

    ort.set_global_thread_pool_sizes(torch.get_num_threads(), 1)


@lru_cache(maxsize=64)
def _model(bits: int, block: int, num_outputs: int, num_inputs: int, with_zero_points: bool) -> bytes:
    from onnx import TensorProto, helper

    def external(name: str, kind: int, shape: tuple[int, ...], item_bytes: int) -> TensorProto:
        tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "none"), ("offset", "0"), ("length", str(math.prod(shape) * item_bytes))):
            tensor.external_data.add(key=key, value=value)
        return tensor

    blocks = num_inputs // block
    weights = [
        external("steps", TensorProto.UINT8, (num_outputs, blocks, block * bits // 8), 1),
        external("scales", TensorProto.FLOAT, (num_outputs, blocks), 4),
    ]
    if with_zero_points:
        weights.append(external("zero_points", TensorProto.UINT8, (num_outputs, -(-blocks // 2)), 1))
    node = helper.make_node(
        "MatMulNBits", ["x", *(tensor.name for tensor in weights)], ["y"], domain="com.microsoft",
        K=num_inputs, N=num_outputs, bits=bits, block_size=block, accuracy_level=_ACCURACY_LEVEL,
    )  # fmt: skip
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["s", num_inputs])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["s", num_outputs])]
    graph = helper.make_graph([node], "product", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return model


@lru_cache(maxsize=2)
def _is_available(kind: type[NBitsMatrix]) -> bool:
    """Whether onnxruntime is installed and multiplies such a matrix correctly on this processor."""
    weight, x = torch.linspace(-1, 1, 32 * 128).view(128, 32).t().contiguous(), torch.linspace(-1, 1, 256).view(2, 128)
    try:
        matrix = kind(32, 128, torch.device("cpu"))
        matrix.load(slice(None), slice(None), weight)
        error = (matrix.matmul(x) - x @ weight.t()).norm() / (x @ weight.t()).norm()
    except Exception:  # onnxruntime's errors have no common base class
        return False
    finally:
        gc.collect()
    return bool(error < _PROBE_TOLERANCE)
