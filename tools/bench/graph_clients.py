"""Client app that requests inferences: `python -m tools.bench.graph_clients ipc://PATH KEY ADDRESS`.

Runs in the hub's namespace and uses the client library.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.cli.load_generator import random_inputs
from hearth.client.home import AsyncHome
from tools.bench.child import HomeClients, serve
from tools.bench.stats import Array, largest_difference

_ANSWER_SECONDS = 60.0  # timeout of a request

_Arrays = dict[str, Array]


class GraphClients(HomeClients):
    """Every request has the same inputs; all answers are compared with the first one."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__(key, address)
        self._reference: _Arrays = {}

    async def load(self, at_once: int, warm_up: int, seconds: float = 0.0, count: int = 1) -> dict[str, Any]:
        """Keep `at_once` requests running for `seconds`, and until `count` answers after the first `warm_up` ones.

        Of these answers, `seconds`: the median latency of requests one by one, or the interval between answers of several at
        once; `difference`: the largest of all. Raises the errors of the client library.
        """
        loop = asyncio.get_running_loop()
        done: list[float] = []
        latencies: list[float] = []
        differences: list[float] = []

        async def ask(home: AsyncHome, inputs: _Arrays) -> None:
            while len(done) < warm_up + count or loop.time() < done[warm_up] + seconds:
                sent = loop.time()
                outputs = await home.infer(inputs, _ANSWER_SECONDS)
                done.append(loop.time())
                latencies.append(done[-1] - sent)
                differences.append(self._difference(outputs))

        async with await self.connected() as home:
            inputs = random_inputs((await home.model_info()).inputs)
            await asyncio.gather(*(ask(home, inputs) for _ in range(at_once)))
        return {
            "seconds": statistics.median(latencies[warm_up:]) if at_once == 1 else interval_seconds(done[warm_up:]),
            "answers": len(done) - warm_up,
            "difference": max(differences),
        }

    def _difference(self, outputs: _Arrays) -> float:
        """Largest difference from the reference answer, relative to the largest value of that output."""
        self._reference = self._reference or outputs
        return max(largest_difference(outputs[name], expected) for name, expected in self._reference.items())


def interval_seconds(done: Sequence[float]) -> float:
    """Mean interval between answers of a full pipeline, from their times. Raises ValueError for fewer than two."""
    if len(done) < 2:
        raise ValueError("at least two answers are needed")
    return (done[-1] - done[0]) / (len(done) - 1)


if __name__ == "__main__":
    serve(sys.argv[1], GraphClients(Path(sys.argv[2]), sys.argv[3]))
