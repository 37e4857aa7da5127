"""Client app that requests inferences: `python -m tools.bench.graph_clients ipc://PATH KEY ADDRESS`.

Runs in the hub's namespace and uses the client library.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.cli.load_generator import random_inputs
from hearth.client.home import AsyncHome
from hearth.errors import HearthError
from hearth.wire.messages import DeviceTrace
from tools.bench.child import serve
from tools.bench.clients import HomeClients

_ANSWER_SECONDS = 60.0  # timeout of a request
_TRACE_EVERY = 3  # one request in this many is traced

_Arrays = dict[str, "np.ndarray[Any, Any]"]


class GraphClients(HomeClients):
    """Every request has the same random inputs; all answers are compared with the first one."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__(key, address)
        self._reference: _Arrays = {}

    def forget(self) -> None:
        """Forget the reference answer before another graph is served."""
        self._reference = {}

    async def load(self, at_once: int, warm_up: int, seconds: float) -> dict[str, Any]:
        """Keep `at_once` requests running for `seconds`. `done`: times of the answers after the first `warm_up` ones.

        `compute`: by device, median seconds of its segments over the traced answers.
        """
        loop = asyncio.get_running_loop()
        done: list[float] = []
        differences: list[float] = []
        errors: list[str] = []
        traces: list[dict[str, float]] = []

        async def ask(home: AsyncHome, inputs: _Arrays) -> None:
            while not errors and (len(done) <= warm_up or loop.time() < done[warm_up] + seconds):
                try:
                    traced = len(done) >= warm_up and len(done) % _TRACE_EVERY == 0
                    result = await home.request_inference(inputs, _ANSWER_SECONDS, traced)
                except HearthError as error:
                    errors.append(str(error))
                    return
                done.append(loop.time())
                differences.append(self._difference(result.outputs))
                if traced:
                    traces.append({trace.device: _compute_seconds(trace) for trace in result.traces})

        async with await self.connected() as home:
            inputs = random_inputs((await home.model_info()).inputs)
            await asyncio.gather(*(ask(home, inputs) for _ in range(at_once)))
        return {
            "done": done[warm_up:],
            "difference": max(differences, default=0.0),
            "errors": errors,
            "compute": {name: statistics.median(each[name] for each in traces) for name in (traces or [{}])[0]},
        }

    async def one_by_one(self, count: int) -> dict[str, Any]:
        """`latencies` of `count` sequential requests in seconds, measured by the client after one warm-up request."""
        loop = asyncio.get_running_loop()
        latencies: list[float] = []
        differences: list[float] = []
        async with await self.connected() as home:
            inputs = random_inputs((await home.model_info()).inputs)
            for _ in range(1 + count):
                sent = loop.time()
                outputs = await home.infer(inputs, _ANSWER_SECONDS)
                latencies.append(loop.time() - sent)
                differences.append(self._difference(outputs))
        return {"latencies": latencies[1:], "difference": max(differences)}

    def _difference(self, outputs: _Arrays) -> float:
        """Largest difference from the reference answer, relative to the largest value of that output."""
        self._reference = self._reference or outputs
        return max(
            float(np.abs(outputs[name] - expected).max() / max(float(np.abs(expected).max()), 1e-30))
            for name, expected in self._reference.items()
        )


def _compute_seconds(trace: DeviceTrace) -> float:
    return sum(event.end_seconds - event.start_seconds for event in trace.events if event.lane == "compute")


if __name__ == "__main__":
    serve(sys.argv[1], GraphClients(Path(sys.argv[2]), sys.argv[3]))
