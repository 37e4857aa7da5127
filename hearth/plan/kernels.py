"""Kernels for products with weight matrices: their measured times, and the choice that follows from them. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

KERNEL_ROWS = (1, 4, 16, 64, 256)  # rows of activations for which kernels are measured: decoding up to prefill
# The request whose time decides about the layout, assumed for all homes, since a profile is older than the requests: a prompt
# as long as the default context, and an answer a sixteenth as long. That is the shape of an assistant's requests, whose prompts
# hold instructions and states: 8 products of 256 rows, and 128 of one row, which weigh the same if the former takes 16 times as
# long as the latter.
_PROMPT_ROWS, _ANSWER_ROWS = 2048, 128
# Exponent of a layout's memory in its price: one that takes half as much again must save 4 % of the time. Small, so that time
# decides unless two layouts are about as fast; then the smaller one leaves more room for other weights.
_MEMORY_EXPONENT = 0.1

_Name = Annotated[str, Field(min_length=1, max_length=64)]
_Size = Annotated[int, Field(ge=1, le=1 << 31)]


class KernelTime(BaseModel, frozen=True):
    """Seconds of a product of `rows` rows with a matrix [num_outputs, num_inputs].

    A matrix is held in one layout, which takes `bytes_per_weight`; all kernels of a layout read the same memory.
    """

    num_outputs: _Size
    num_inputs: _Size
    rows: _Size
    layout: _Name
    kernel: _Name
    seconds: float = Field(gt=0, allow_inf_nan=False)
    bytes_per_weight: float = Field(gt=0, le=16)


class KernelChoice(BaseModel, frozen=True):
    """The layout of matrices of about this shape, and the kernel for up to each of these numbers of rows."""

    num_outputs: _Size
    num_inputs: _Size
    layout: _Name
    rows: tuple[_Size, ...] = Field(min_length=1, max_length=16)  # rising
    kernels: tuple[_Name, ...] = Field(min_length=1, max_length=16)

    def kernel(self, rows: int) -> str:
        """The kernel for this number of rows; the last one beyond the measured numbers."""
        return self.kernels[min(bisect_left(self.rows, rows), len(self.kernels) - 1)]


def choose_kernels(times: Iterable[KernelTime], single: bool = False) -> tuple[KernelChoice, ...]:
    """The choice for each measured shape. `single`: one kernel for all numbers of rows.

    All shapes have the same layout: the one with the least time of a request (`_request_seconds`), times a small power of its
    memory. The time is the median of the ratios to the fastest layouts by shape, so that a disturbed measurement is outvoted.
    Between two measured numbers of rows, times are taken to be linear: a kernel is used up to where the next one is faster.
    """
    times = list(times)
    options: defaultdict[tuple[str, str], dict[_Cell, KernelTime]] = defaultdict(dict)
    cells: set[_Cell] = set()
    for time in times:
        option, cell = options[time.layout, time.kernel if single else ""], _Cell.of(time)
        if cell not in option or time.seconds < option[cell].seconds:
            option[cell] = time
        cells.add(cell)
    complete = [option for option in options.values() if len(option) == len(cells)]
    if not complete:
        return ()
    requests = [_request_seconds(option) for option in complete]
    fastest = {shape: min(seconds[shape] for seconds in requests) for shape in requests[0]}
    prices = [
        median(seconds[shape] / fastest[shape] for shape in fastest)
        * fmean(time.bytes_per_weight for time in option.values()) ** _MEMORY_EXPONENT
        for option, seconds in zip(complete, requests, strict=True)
    ]
    best = complete[prices.index(min(prices))]
    by_shape: defaultdict[tuple[int, int], list[KernelTime]] = defaultdict(list)
    for cell in sorted(cells):
        by_shape[cell.num_outputs, cell.num_inputs].append(best[cell])
    by_time = sorted(times, key=lambda each: each.seconds, reverse=True)  # of repeated measurements, the least
    seconds_of = {(_Cell.of(each), each.layout, each.kernel): each.seconds for each in by_time}
    return tuple(
        KernelChoice(
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            layout=chosen[0].layout,
            rows=(*(_last_rows(one, other, seconds_of) for one, other in pairwise(chosen)), chosen[-1].rows),
            kernels=tuple(time.kernel for time in chosen),
        )
        for (num_outputs, num_inputs), chosen in by_shape.items()
    )


def _last_rows(one: KernelTime, other: KernelTime, seconds_of: Mapping[tuple[_Cell, str, str], float]) -> int:
    """The largest number of rows, less than the `other`'s, up to which the kernel of `one` is the faster of the two."""
    at_other = seconds_of.get((_Cell.of(other), one.layout, one.kernel))
    at_one = seconds_of.get((_Cell.of(one), other.layout, other.kernel))
    if one.kernel == other.kernel or at_other is None or at_one is None:
        return one.rows
    lead, lag = at_one - one.seconds, at_other - other.seconds
    between = other.rows - one.rows
    return one.rows + min(math.floor(between * lead / (lead + lag)), between - 1) if lead > 0 else one.rows


def _request_seconds(option: Mapping[_Cell, KernelTime]) -> dict[tuple[int, int], float]:
    """Seconds of a request's products with a matrix of each shape: of a prompt and of answers.

    Without times of single rows (encoders): as many tokens as a prompt has, in texts of each measured length.
    """
    rows = {cell.rows for cell in option}
    weights = {1: _ANSWER_ROWS, max(rows): _PROMPT_ROWS / max(rows)} if 1 in rows and len(rows) > 1 else {}
    seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
    for cell, time in option.items():
        weight = weights.get(cell.rows, 0.0) if weights else _PROMPT_ROWS / cell.rows
        seconds[cell.num_outputs, cell.num_inputs] += weight * time.seconds
    return seconds


class _Cell(NamedTuple):
    """A measured shape and number of rows."""

    num_outputs: int
    num_inputs: int
    rows: int

    @classmethod
    def of(cls, time: KernelTime) -> _Cell:
        return cls(time.num_outputs, time.num_inputs, time.rows)


def nearest_choice(choices: Iterable[KernelChoice], num_outputs: int, num_inputs: int) -> KernelChoice | None:
    """The choice for the most similar shape; None if there is no choice or the matrix is empty."""
    if not num_outputs or not num_inputs:
        return None
    return min(
        choices,
        key=lambda choice: (
            abs(math.log(choice.num_outputs / num_outputs)) + abs(math.log(choice.num_inputs / num_inputs))
        ),
        default=None,
    )


def chosen_bytes_per_weight(times: Sequence[KernelTime], choices: Iterable[KernelChoice]) -> float:
    """Mean bytes per weight of the chosen layouts, weighted by the sizes of the shapes; 0 without measurements."""
    layouts = {(time.num_outputs, time.num_inputs, time.layout): time.bytes_per_weight for time in times}
    sizes = {(each.num_outputs, each.num_inputs, each.layout): each.num_outputs * each.num_inputs for each in choices}
    total = sum(sizes.values())
    return sum(layouts[key] * size for key, size in sizes.items()) / total if total else 0.0
