"""Runs requests on the current deployment: admission in FIFO order, counters, drift observation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeAlias, TypeVar

from coordinator.serve.admission import Admission
from coordinator.serve.drift import DriftMonitor
from hearth.errors import DeadlineExceeded, HearthError, InternalError, NotServing
from hearth.wire.messages import Inferred, Vectors
from hearth.wire.rpc import Reply

log = logging.getLogger(__name__)

D = TypeVar("D")
Answer: TypeAlias = tuple[Vectors | Inferred, Sequence[Any]]  # a reply message with its latency, and its payload


class Requests(Generic[D]):
    """The requests of one deployed model.

    `state` returns the text of NotServing errors. `failed_on(deployment, error)` is called when a request fails.
    """

    def __init__(self, queue_limit: int, state: Callable[[], str], failed_on: Callable[[D, HearthError], None]) -> None:
        self.admission: Admission[D] = Admission(queue_limit)
        self.served = 0
        self.failed = 0
        self.last_error = ""
        self.last_latency_seconds: float | None = None
        self.failed_on = failed_on
        self._state = state
        self._running: set[asyncio.Task[Reply]] = set()
        self.watched: tuple[D, DriftMonitor] | None = None  # the current deployment

    async def run(
        self,
        compute: Callable[[D], Awaitable[Answer]],
        timeout_seconds: float,
        failed_on: Callable[[D, HearthError], None] | None = None,
    ) -> Reply:
        """Run one request on the deployment. `failed_on` overrides `Requests.failed_on`.

        Raises QueueFull, NotServing, DeadlineExceeded and the errors of `compute`. A started request holds its slot until
        the workers finish it, even if its client stops waiting.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        deployment = await self._enter(timeout_seconds)
        running = asyncio.create_task(self._run(compute, deployment, failed_on or self.failed_on))
        self._running.add(running)
        running.add_done_callback(self._ended)
        await asyncio.wait({running}, timeout=max(deadline - loop.time(), 0.001))
        if not running.done():
            raise self._too_late(timeout_seconds)
        return running.result()

    @asynccontextmanager
    async def place(self, timeout_seconds: float) -> AsyncIterator[D]:
        """Hold a slot on the deployment. Raises QueueFull, NotServing, DeadlineExceeded while waiting for one."""
        deployment = await self._enter(timeout_seconds)
        try:
            yield deployment
        finally:
            self.admission.leave()

    def count(self, latency_seconds: float) -> None:
        """Count a request as served."""
        self.served += 1
        self.last_latency_seconds = latency_seconds

    def count_failure(self, error: HearthError) -> None:
        self.failed += 1
        self.last_error = str(error)

    async def close(self) -> None:
        """Wait for running requests. Call after the deployment has ended."""
        await asyncio.gather(*self._running, return_exceptions=True)

    # ---- drift ----------------------------------------------------------------------------------------------------

    def observe(
        self, deployment: D, share: float, compute_seconds: Sequence[float], total_seconds: float | None
    ) -> None:
        """Pass to `DriftMonitor.observe`; measurements from an earlier deployment are ignored."""
        if self.watched is not None and self.watched[0] is deployment:
            self.watched[1].observe(share, compute_seconds, total_seconds)

    # ---- one request ----------------------------------------------------------------------------------------------

    async def _enter(self, timeout_seconds: float) -> D:
        try:
            return await self.admission.enter(max(timeout_seconds, 0.001))
        except asyncio.TimeoutError:
            raise self._too_late(timeout_seconds) from None

    def _too_late(self, seconds: float) -> HearthError:
        if not self.admission.is_open:
            return NotServing(state=self._state())
        return DeadlineExceeded(action="the request", seconds=seconds)

    async def _run(
        self, compute: Callable[[D], Awaitable[Answer]], deployment: D, failed_on: Callable[[D, HearthError], None]
    ) -> Reply:
        try:
            message, payload = await compute(deployment)
        except Exception as error:
            failure = failure_of(error)
            self.count_failure(failure)
            failed_on(deployment, failure)
            raise failure from None
        self.count(message.latency_seconds)
        return Reply(message, payload)

    def _ended(self, running: asyncio.Task[Reply]) -> None:
        self._running.discard(running)
        self.admission.leave()
        if not running.cancelled():
            running.exception()  # mark the exception as retrieved, even if the client is gone


def failure_of(error: Exception) -> HearthError:
    """`error` as a HearthError. Any other exception is a bug: log it with its traceback and return InternalError."""
    if isinstance(error, HearthError):
        return error
    log.error("unexpected exception", exc_info=error)
    return InternalError(where="the coordinator", reason=f"{type(error).__name__}: {error}")
