"""Kind `kernels`: products with a layer's matrices on one core, by every kernel of the device's table, and in plain floats.

Times are the thread's processor time, so that other processes disturb them little. Weights are random; the model's layers take
turns, as in decoding, so that their weights come from where decoding finds them. With one row, a kernel that expands weights
shows the time of the expansion alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from agent.worker.transformer.kernel_times import measure_kernels
from agent.worker.transformer.kernels.base import multiplies_bfloat16
from agent.worker.transformer.matrices import Matrix
from agent.worker.transformer.shard import filled_layer
from hearth.plan.kernels import KERNEL_ROWS, KernelChoice, KernelTime, choose_kernels
from hearth.plan.model_spec import ModelSpec, WeightFormat
from tools.bench.experiment import Context, Experiment
from tools.bench.load import interleaved
from tools.bench.results import Record, Summary, Table
from tools.bench.stats import Ratio, paired_ratio

DEFAULT, CHOSEN = "default", "chosen"  # kernels; the others are named by their layout and kernel
_CPU = torch.device("cpu")
_SAMPLE_SECONDS = 0.05  # of one round of a variant, at least
_HOPELESS = 2.0  # times the fastest kernel's time in the table: such a kernel is not measured again


class KernelRow(Record):
    """Products of `rows` rows with one layer's matrices. `seconds`: of all of them, by round."""

    weights: str
    rows: int
    variant: str
    layout: str
    kernels: tuple[str, ...]
    processor: str  # the instructions that torch uses
    seconds: tuple[float, ...]
    over_default: Ratio  # speed, in the same rounds
    over_fastest: Ratio  # over the fastest kernel of this weight format
    over_bfloat16: Ratio | None  # None: the processor has no bfloat16 products, and would take a minute


class _Variant(NamedTuple):
    """How products are computed: with the matrices of one layout, by one kernel or by the matrices' own choice."""

    weights: WeightFormat
    layers: Sequence[Sequence[Matrix]]
    kernel: Callable[[Matrix, int], str]  # for a matrix and a number of rows


class KernelSpeed(Experiment[KernelRow]):
    """Seconds of a layer's products."""

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
        times = measure_kernels(spec, max(KERNEL_ROWS), _CPU)
        variants = _variants(spec, times)
        for rows in self.rows:
            hopeless = _hopeless(times, rows)
            if rows > 1 and not multiplies_bfloat16():
                hopeless.add("bfloat16")
            present = {name: variant for name, variant in variants.items() if name not in hopeless}
            seconds = self._rounds(present, rows, context)
            quantised = [name for name in present if present[name].weights == spec.weights]
            fastest = min(quantised, key=lambda name: median(seconds[name]))
            for name, variant in present.items():
                layer = variant.layers[0]
                yield KernelRow(
                    weights=variant.weights, rows=rows, variant=name,
                    layout=", ".join(dict.fromkeys(matrix.layout for matrix in layer)),
                    kernels=tuple(dict.fromkeys(variant.kernel(matrix, rows) for matrix in layer)),
                    processor=_processor(), seconds=tuple(seconds[name]),
                    over_default=paired_ratio(seconds[DEFAULT], seconds[name]),
                    over_fastest=paired_ratio(seconds[fastest], seconds[name]),
                    over_bfloat16=paired_ratio(seconds["bfloat16"], seconds[name]) if "bfloat16" in present else None,
                )  # fmt: skip

    def _rounds(self, variants: Mapping[str, _Variant], rows: int, context: Context) -> dict[str, list[float]]:
        """Seconds of one layer's products by round."""
        inputs = {matrix.shape[1]: torch.randn(rows, matrix.shape[1]) for matrix in variants[DEFAULT].layers[0]}
        runs = {
            name: partial(_seconds, cycle(variant.layers), inputs, variant.kernel) for name, variant in variants.items()
        }
        found, _ = interleaved(runs, self.rounds, lambda step: context.report(f"{rows} rows: {step}"))
        return found

    def summary(self, rows: Sequence[KernelRow]) -> Summary:
        columns = {
            "weights": lambda row: row.weights,
            "rows": lambda row: row.rows,
            "kernels": lambda row: row.variant,
            "which": lambda row: ", ".join(row.kernels),
            "layout": lambda row: row.layout,
            "ms a layer": lambda row: f"{median(row.seconds) * 1e3:.3g}",
            "speed over default": lambda row: row.over_default,
            "over the fastest": lambda row: row.over_fastest,
            "over bfloat16": lambda row: row.over_bfloat16 or "-",
        }
        processors = " and ".join(dict.fromkeys(row.processor for row in rows))
        title = f"Products with a layer's matrices of {self.model.name}, one core, {processors}"
        return Summary(tables=(Table.of_columns(title, columns, rows),))


def _variants(spec: ModelSpec, times: Sequence[KernelTime]) -> dict[str, _Variant]:
    """The default and the chosen kernels, each measured kernel for all shapes, and plain bfloat16 and float32."""
    shapes = dict.fromkeys((time.num_outputs, time.num_inputs) for time in times)
    kernels = dict.fromkeys((time.layout, time.kernel) for time in times)
    chosen = choose_kernels(times)

    def of(weights: WeightFormat, choices: Sequence[KernelChoice]) -> _Variant:
        copy = spec.model_copy(update={"weights": weights})
        layers = [list(filled_layer(copy, _CPU, choices).matrices.values()) for _ in range(spec.num_layers)]
        return _Variant(weights, layers, lambda matrix, rows: matrix.kernel(rows))

    def single(layout: str, kernel: str) -> list[KernelChoice]:
        return [
            KernelChoice(num_outputs=n, num_inputs=k, layout=layout, rows=(1,), kernels=(kernel,)) for n, k in shapes
        ]

    variants = {DEFAULT: of(spec.weights, ()), CHOSEN: of(spec.weights, chosen)}
    known = {variant.layers[0][0].layout: variant.layers for variant in variants.values()}
    for layout, kernel in kernels:
        if layout not in known:
            known[layout] = of(spec.weights, single(layout, kernel)).layers
        variants[f"{layout} {kernel}"] = _Variant(spec.weights, known[layout], partial(_always, kernel))
    return variants | {"bfloat16": of("bfloat16", ()), "float32": of("float32", ())}


def _always(kernel: str, matrix: Matrix, rows: int) -> str:
    return kernel


def _hopeless(times: Sequence[KernelTime], rows: int) -> set[str]:
    """The kernels that take much longer than the fastest, by the table."""
    counts = sorted({time.rows for time in times})
    nearest = next((count for count in counts if count >= rows), counts[-1]) if counts else 0
    totals: dict[str, float] = {}
    for each in times:
        if each.rows == nearest:
            name = f"{each.layout} {each.kernel}"
            totals[name] = totals.get(name, 0.0) + each.seconds
    return {name for name, seconds in totals.items() if rows > 1 and seconds > _HOPELESS * min(totals.values())}


def _processor() -> str:
    capability = str(torch.backends.cpu.get_cpu_capability())
    return f"{capability} {'with' if multiplies_bfloat16() else 'without'} bfloat16 instructions"


def _seconds(
    layers: Iterator[Sequence[Matrix]], inputs: Mapping[int, Tensor], kernel: Callable[[Matrix, int], str]
) -> float:
    """Processor time of one layer's products: the mean of as many layers as fit into `_SAMPLE_SECONDS`."""
    began, count = time.thread_time(), 0
    while not count or time.thread_time() - began < _SAMPLE_SECONDS:
        for matrix in next(layers):
            x_sk = inputs[matrix.shape[1]]
            matrix.product(kernel(matrix, x_sk.shape[0]), x_sk)
        count += 1
    return (time.thread_time() - began) / count
