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
ComputedReply: TypeAlias = tuple[Vectors | Inferred, Sequence[Any]]  # a reply message with its latency, and its payload


class Requests(Generic[D]):
    """The requests of one deployed model.

    `describe_state` returns the text of NotServing errors. `on_failure(deployment, error)` is called when a request fails.
    """

    def __init__(
        self, queue_limit: int, describe_state: Callable[[], str], on_failure: Callable[[D, HearthError], None]
    ) -> None:
        self.admission: Admission[D] = Admission(queue_limit)
        self.num_served = 0
        self.num_failed = 0
        self.last_error = ""
        self.last_latency_seconds: float | None = None
        self.on_failure = on_failure
        self._describe_state = describe_state
        self._running: set[asyncio.Task[Reply]] = set()
        self.monitored: tuple[D, DriftMonitor] | None = None  # the current deployment

    async def run(
        self,
        compute: Callable[[D], Awaitable[ComputedReply]],
        timeout_seconds: float,
        on_failure: Callable[[D, HearthError], None] | None = None,
    ) -> Reply:
        """Run one request on the deployment. `on_failure` overrides `Requests.on_failure`.

        Raises QueueFull, NotServing, DeadlineExceeded and the errors of `compute`. A started request holds its slot until
        the workers finish it, even if its client stops waiting.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        deployment = await self._enter(timeout_seconds)
        running = asyncio.create_task(self._run(compute, deployment, on_failure or self.on_failure))
        self._running.add(running)
        running.add_done_callback(self._on_task_done)
        await asyncio.wait({running}, timeout=max(deadline - loop.time(), 0.001))
        if not running.done():
            raise self._timeout_error(timeout_seconds)
        return running.result()

    @asynccontextmanager
    async def slot(self, timeout_seconds: float) -> AsyncIterator[D]:
        """Hold a slot on the deployment. Raises QueueFull, NotServing, DeadlineExceeded while waiting for one."""
        deployment = await self._enter(timeout_seconds)
        try:
            yield deployment
        finally:
            self.admission.leave()

    def count_served(self, latency_seconds: float) -> None:
        """Count a request as served."""
        self.num_served += 1
        self.last_latency_seconds = latency_seconds

    def count_failed(self, error: HearthError) -> None:
        self.num_failed += 1
        self.last_error = str(error)

    async def close(self) -> None:
        """Wait for running requests. Call after the deployment has ended."""
        await asyncio.gather(*self._running, return_exceptions=True)

    # ---- drift ----------------------------------------------------------------------------------------------------

    def observe(
        self, deployment: D, relative_size: float, compute_seconds: Sequence[float], total_seconds: float | None
    ) -> None:
        """Pass to `DriftMonitor.observe`; measurements from an earlier deployment are ignored."""
        if self.monitored is not None and self.monitored[0] is deployment:
            self.monitored[1].observe(relative_size, compute_seconds, total_seconds)

    # ---- one request ----------------------------------------------------------------------------------------------

    async def _enter(self, timeout_seconds: float) -> D:
        try:
            return await self.admission.enter(max(timeout_seconds, 0.001))
        except asyncio.TimeoutError:
            raise self._timeout_error(timeout_seconds) from None

    def _timeout_error(self, seconds: float) -> HearthError:
        if not self.admission.is_open:
            return NotServing(state=self._describe_state())
        return DeadlineExceeded(action="the request", seconds=seconds)

    async def _run(
        self,
        compute: Callable[[D], Awaitable[ComputedReply]],
        deployment: D,
        on_failure: Callable[[D, HearthError], None],
    ) -> Reply:
        try:
            message, payload = await compute(deployment)
        except Exception as error:
            failure = as_hearth_error(error)
            self.count_failed(failure)
            on_failure(deployment, failure)
            raise failure from None
        self.count_served(message.latency_seconds)
        return Reply(message, payload)

    def _on_task_done(self, running: asyncio.Task[Reply]) -> None:
        self._running.discard(running)
        self.admission.leave()
        if not running.cancelled():
            running.exception()  # mark the exception as retrieved, even if the client is gone


def as_hearth_error(error: Exception) -> HearthError:
    """`error` as a HearthError. Any other exception is a bug: log it with its traceback and return InternalError."""
    if isinstance(error, HearthError):
        return error
    log.error("unexpected exception", exc_info=error)
    return InternalError(where="the coordinator", reason=f"{type(error).__name__}: {error}")
