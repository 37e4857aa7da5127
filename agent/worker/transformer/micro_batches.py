"""A prefill step split into concurrent micro-batches: while one waits for its tiles, another computes.

Each micro-batch has its own thread, tiles and step number on the wire. They share only the KV cache: a micro-batch attends to
the rows of earlier ones, so in each layer it waits until these rows are in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hearth.errors import HearthError, StepFailed

T = TypeVar("T")
# Minimum rows of a micro-batch per rank: with fewer, small GEMMs cost more than the overlap saves.
MIN_ROWS_PER_RANK = 32


class MicroBatchOrder:
    """Orders the micro-batches of a step: each stores a layer's rows in the KV cache before the next one attends to them."""

    def __init__(self, num_layers: int, timeout_seconds: float, previous: MicroBatchOrder | None = None) -> None:
        self._stored = [threading.Event() for _ in range(num_layers)]
        self._timeout_seconds = timeout_seconds
        self._previous = previous
        self._failed = False

    def kv_stored(self, layer: int) -> None:
        """Signal that this micro-batch's rows of a layer are cached; wait for those of earlier ones. Raises StepFailed."""
        self._stored[layer].set()
        if self._previous is not None:
            self._previous._wait_until_stored(layer)

    def end(self, failed: bool) -> None:
        """Signal the end of this micro-batch to those that wait for it."""
        self._failed = failed
        for event in self._stored:
            event.set()

    def _wait_until_stored(self, layer: int) -> None:
        if not self._stored[layer].wait(self._timeout_seconds):
            reason = f"an earlier micro-batch has not reached layer {layer} in time"
            raise StepFailed(device="this device", reason=reason)
        if self._failed:
            raise StepFailed(device="this device", reason="an earlier micro-batch of the step failed")


def run_concurrently(runs: Sequence[Callable[[], T]], abort: Callable[[HearthError], None]) -> list[T]:
    """Run all concurrently, the first one in this thread. If one fails, `abort` ends the others and its error is raised."""
    num_threads = torch.get_num_threads()
    results: list[T | None] = [None] * len(runs)
    errors: list[BaseException] = []

    def run_one(index: int) -> None:
        try:
            results[index] = runs[index]()
        except BaseException as error:
            errors.append(error)
            abort(error if isinstance(error, HearthError) else StepFailed(device="this device", reason=str(error)))

    def in_thread(index: int) -> None:
        torch.set_num_threads(num_threads)  # torch's setting is per thread; the default is all cores
        run_one(index)

    threads = [
        threading.Thread(target=in_thread, args=(index,), name=f"micro-batch-{index}", daemon=True)
        for index in range(1, len(runs))
    ]
    for thread in threads:
        thread.start()
    run_one(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]
