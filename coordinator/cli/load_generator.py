"""Load generator for a served graph: throughput and latency as an app sees them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hearth.client.home import AsyncHome
from hearth.errors import HearthError
from hearth.plan.graph_spec import Tensor
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.units import format_seconds
from hearth.wire.messages import ArrayInfo

_SEED = 20240525  # arbitrary; fixed, so that every run sends the same inputs
# After an error: short compared with a measurement, long enough to avoid flooding a coordinator that is re-planning.
_PAUSE_SECONDS = 0.1
_WARM_UP_FRACTION = 0.1  # of the duration, before counting starts: the pipeline fills, and caches warm up


@dataclass(frozen=True)
class LoadResult:
    """One measurement. `latencies`: seconds from request to answer, queueing included, ascending; `errors`: counts by code."""

    concurrency: int
    seconds: float
    latencies: tuple[float, ...]
    errors: Mapping[str, int]

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds if self.seconds > 0 else 0.0

    def percentile(self, percent: int) -> float | None:
        """The latency that `percent` of the answers did not exceed (nearest rank)."""
        if not self.latencies:
            return None
        rank = -(-len(self.latencies) * percent // 100)
        return self.latencies[rank - 1]

    def as_json(self) -> dict[str, Any]:
        return {
            "concurrency": self.concurrency,
            "seconds": self.seconds,
            "answers": len(self.latencies),
            "per_second": self.per_second,
            **{f"p{percent}_seconds": self.percentile(percent) for percent in (50, 90, 99)},
            "errors": dict(self.errors),
        }

    def summary(self) -> str:
        at_once = "1 request at a time" if self.concurrency == 1 else f"{self.concurrency} concurrent requests"
        failed = "".join(f", {count} {name}" for name, count in self.errors.items())
        if not self.latencies:
            return f"{at_once}: no answer in {format_seconds(self.seconds)}{failed}"
        quantiles = ", ".join(
            f"p{percent} {format_seconds(self.percentile(percent) or 0.0)}" for percent in (50, 90, 99)
        )
        return f"{at_once}: {self.per_second:.3g} per second; {quantiles}; {len(self.latencies)} answers{failed}"


def random_inputs(inputs: Sequence[ArrayInfo | Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Floats from a normal distribution; integers 0 or 1, which most models accept as indices and masks."""
    random = np.random.default_rng(_SEED)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for info in inputs:
        if "float" in info.dtype:
            arrays[info.name] = random.standard_normal(info.shape).astype(info.dtype)
        else:
            arrays[info.name] = random.integers(0, 2, info.shape).astype(info.dtype)
    return arrays


async def measure_load(
    home: AsyncHome,
    inputs: Mapping[str, np.ndarray[Any, Any]],
    concurrency: int,
    seconds: float,
    timeout_seconds: float,
    model: str | None = None,
) -> LoadResult:
    """Keep `concurrency` requests in flight. Counts the answers of `seconds` seconds after the warm-up."""
    began = loop_time() + _WARM_UP_FRACTION * seconds
    deadline = began + seconds
    latencies: list[float] = []
    errors: Counter[str] = Counter()

    async def ask() -> None:
        while (sent := loop_time()) < deadline:
            try:
                await home.infer(inputs, timeout_seconds, model=model)
            except HearthError as error:
                errors[error.code] += 1
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if began <= (now := loop_time()) <= deadline:
                latencies.append(now - sent)

    await asyncio.gather(*(ask() for _ in range(concurrency)))
    return LoadResult(concurrency, seconds, tuple(sorted(latencies)), errors)
