"""Kind `kernels`: products with a layer's matrices on one core, by the default kernels, by the chosen ones, and in bfloat16.

Times are the thread's processor time, so that other processes disturb them little. Weights are random; the model's layers take
turns, as in decoding, so that their weights come from where decoding finds them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor

from agent.worker.transformer.kernel_times import layer_shapes, measure_kernels
from agent.worker.transformer.kernels.base import Partition
from agent.worker.transformer.kernels.int4 import dequantise_int4, quantise_int4
from agent.worker.transformer.kernels.int8 import quantise_int8
from agent.worker.transformer.kernels.processor import multiplies_bfloat16
from agent.worker.transformer.matrices import Matrix, empty_matrix
from agent.worker.transformer.random_weights import layer_matrices, random_layer
from hearth.plan.kernels import KERNEL_ROWS, KernelChoice, choose_kernels
from hearth.plan.model_spec import ModelSpec, WeightFormat
from tools.bench.experiment import Context, Experiment
from tools.bench.results import Summary, Table
from tools.bench.stats import Ratio, paired_ratio, rotated

Variant = Literal["default", "chosen", "bfloat16"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
_CPU = torch.device("cpu")
_SAMPLE_SECONDS = 0.05  # of one round of a variant, at least
_ERROR_ROWS = (
    64  # rows of activations with which errors are measured, at most: a row's error does not depend on their number
)
_WEIGHT_SCALE = 0.02  # standard deviation of the weights


class KernelRow(BaseModel):
    """Products of `rows` rows with one layer's matrices. `seconds`: of all of them, by round.

    `error`: relative, of the worst matrix, against the product in float32 with the weights as they are stored.
    """

    model_config = ConfigDict(frozen=True)

    weights: str
    rows: int
    variant: Variant
    layout: str
    kernels: tuple[str, ...]
    processor: str  # the instructions that torch uses
    bytes_per_weight: float
    seconds: tuple[float, ...]
    over_default: Ratio  # speed, in the same rounds
    over_bfloat16: Ratio
    error: float


class _Setting(NamedTuple):
    """The weight format and the kernels of a variant."""

    spec: ModelSpec
    choices: Sequence[KernelChoice]


class KernelSpeed(Experiment):
    """Seconds of a layer's products, and their errors."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(KernelRow)

    model: ModelSpec
    weights: tuple[WeightFormat, ...] = ("int4", "int8")
    rows: tuple[int, ...] = Field((1, 256, 2048), min_length=1)
    rounds: int = Field(10, ge=1)

    def measure(self, context: Context) -> Iterator[KernelRow]:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for weights in self.weights:
                yield from self._of_format(self.model.model_copy(update={"weights": weights}), context)

    def _of_format(self, spec: ModelSpec, context: Context) -> Iterator[KernelRow]:
        context.report(f"{spec.weights}: choosing kernels")
        chosen = choose_kernels(measure_kernels(spec, max(KERNEL_ROWS), _CPU))
        plain = spec.model_copy(update={"weights": "bfloat16"})
        settings: dict[Variant, _Setting] = {
            "default": _Setting(spec, ()), "chosen": _Setting(spec, chosen), "bfloat16": _Setting(plain, ()),
        }  # fmt: skip
        layers = {
            name: [layer_matrices(random_layer(each.spec, _CPU, each.choices)) for _ in range(spec.num_layers)]
            for name, each in settings.items()
        }
        for rows in self.rows:
            seconds = self._rounds(layers, rows, context)
            context.report(f"{spec.weights}: errors with {rows} rows")
            for name, setting in settings.items():
                layer = layers[name][0]
                yield KernelRow(
                    weights=setting.spec.weights,
                    rows=rows,
                    variant=name,
                    layout=", ".join(dict.fromkeys(matrix.layout for matrix in layer)),
                    kernels=tuple(dict.fromkeys(matrix.kernel(rows) for matrix in layer)),
                    processor=_processor(),
                    bytes_per_weight=_bytes_per_weight(layer),
                    seconds=tuple(seconds[name]),
                    over_default=paired_ratio(seconds["default"], seconds[name]),
                    over_bfloat16=paired_ratio(seconds["bfloat16"], seconds[name]),
                    error=max(_error(shape, setting, rows) for shape in layer_shapes(spec)),
                )

    def _rounds(
        self, layers: Mapping[Variant, Sequence[list[Matrix]]], rows: int, context: Context
    ) -> dict[Variant, list[float]]:
        """Seconds of one layer's products by round, after a warm-up round."""
        turns = {name: cycle(layers[name]) for name in VARIANTS}
        inputs = {matrix.shape[1]: torch.randn(rows, matrix.shape[1]) for matrix in layers["default"][0]}
        seconds: dict[Variant, list[float]] = {name: [] for name in VARIANTS}
        for index in range(self.rounds + 1):
            context.report(f"{rows} rows: round {index} of {self.rounds}")
            for name in rotated(VARIANTS, index):
                found = _seconds(turns[name], inputs)
                if index:
                    seconds[name].append(found)
        return seconds

    def summary(self, rows: Sequence[KernelRow]) -> Summary:
        columns = {
            "weights": lambda row: row.weights,
            "rows": lambda row: row.rows,
            "kernels": lambda row: row.variant,
            "which": lambda row: ", ".join(row.kernels),
            "layout": lambda row: row.layout,
            "bytes per weight": lambda row: f"{row.bytes_per_weight:.2f}",
            "ms a layer": lambda row: f"{median(row.seconds) * 1e3:.3g}",
            "speed over default": lambda row: f"{row.over_default.median:.2f} {row.over_default.interval}",
            "speed over bfloat16": lambda row: f"{row.over_bfloat16.median:.2f} {row.over_bfloat16.interval}",
            "error": lambda row: f"{row.error:.1e}",
        }
        processors = " and ".join(dict.fromkeys(row.processor for row in rows))
        title = f"Products with a layer's matrices of {self.model.name}, one core, {processors}"
        return Summary(tables=(Table.of_columns(title, columns, rows),))


def _processor() -> str:
    capability = str(torch.backends.cpu.get_cpu_capability())
    return f"{capability} {'with' if multiplies_bfloat16() else 'without'} bfloat16 instructions"


def _bytes_per_weight(layer: Sequence[Matrix]) -> float:
    num_bytes = sum(size for matrix in layer for _, size in matrix.memory)
    return num_bytes / sum(matrix.shape[0] * matrix.shape[1] for matrix in layer)


def _seconds(layers: Iterator[list[Matrix]], inputs: Mapping[int, Tensor]) -> float:
    """Processor time of one layer's products: the mean of as many layers as fit into `_SAMPLE_SECONDS`."""
    began, count = time.thread_time(), 0
    while not count or time.thread_time() - began < _SAMPLE_SECONDS:
        for matrix in next(layers):
            matrix.matmul(inputs[matrix.shape[1]])
        count += 1
    return (time.thread_time() - began) / count


def _error(shape: tuple[int, int], setting: _Setting, rows: int) -> float:
    """Relative error of a product with a random matrix, by the kernel for this number of rows."""
    weights = setting.spec.weights
    matrix = empty_matrix(*shape, weights, _CPU, Partition(0, (0, shape[0])), setting.choices)
    generator = torch.Generator().manual_seed(0)
    weight_nk = torch.randn(shape, generator=generator) * _WEIGHT_SCALE
    x_sk = torch.randn(min(rows, _ERROR_ROWS), shape[1], generator=generator)
    matrix.load(slice(None), slice(None), weight_nk)
    exact = x_sk @ _stored(weight_nk, weights).t()
    return float((matrix.product(matrix.kernel(rows), x_sk) - exact).norm() / exact.norm())


def _stored(weight_nk: Tensor, weights: WeightFormat) -> Tensor:
    """The weights in float32 that a format stores."""
    if weights == "int4":
        return dequantise_int4(*quantise_int4(weight_nk))
    if weights == "int8":
        values, scales = quantise_int8(weight_nk)
        return values * scales.float()[:, None]
    return weight_nk.to(getattr(torch, weights)).float()
