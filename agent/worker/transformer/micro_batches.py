"""One prefill step as several micro-batches in flight at once: while one waits for its tiles, another computes.

Each has a thread of its own, its own tiles and its own step number on the wire. They share nothing but the KV cache: a
later one attends to the rows of those before it, so in each layer it waits until they are in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hearth.errors import HearthError, StepFailed

T = TypeVar("T")
# Fewer rows a micro-batch would cost more in small GEMMs than they hide.
MIN_ROWS = 32


class Turns:
    """The order in which micro-batches put their rows of a layer into the KV cache."""

    def __init__(self, num_layers: int, timeout_seconds: float, before: Turns | None = None) -> None:
        self._kept = [threading.Event() for _ in range(num_layers)]
        self._timeout_seconds = timeout_seconds
        self._before = before
        self._failed = False

    def kept(self, layer: int) -> None:
        """Our rows of this layer are in the cache; returns when those before ours are too. Raises StepFailed."""
        self._kept[layer].set()
        if self._before is not None:
            self._before._await(layer)

    def end(self, failed: bool) -> None:
        """Nothing more comes of this micro-batch: who waits for it learns that."""
        self._failed = failed
        for event in self._kept:
            event.set()

    def _await(self, layer: int) -> None:
        if not self._kept[layer].wait(self._timeout_seconds):
            raise StepFailed(
                device="this device", reason=f"an earlier micro-batch has not reached layer {layer} in time"
            )
        if self._failed:
            raise StepFailed(device="this device", reason="an earlier micro-batch of the step failed")


def run_all(runs: Sequence[Callable[[], T]], abort: Callable[[HearthError], None]) -> list[T]:
    """Run all at once, the first in this thread. The first error to happen is raised, after `abort` has ended the others."""
    num_threads = torch.get_num_threads()
    results: list[T | None] = [None] * len(runs)
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            results[index] = runs[index]()
        except BaseException as error:
            errors.append(error)
            abort(error if isinstance(error, HearthError) else StepFailed(device="this device", reason=str(error)))

    def in_thread(index: int) -> None:
        torch.set_num_threads(num_threads)  # each thread starts with a team of all cores
        one(index)

    threads = [
        threading.Thread(target=in_thread, args=(index,), name=f"micro-batch-{index}", daemon=True)
        for index in range(1, len(runs))
    ]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]
