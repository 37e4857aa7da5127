"""Requests on their way to the present deployment: admitted in turn, counted, watched for drift."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from coordinator.serve.admission import Admission
from coordinator.serve.drift import DriftMonitor
from hearth.errors import DeadlineExceeded, HearthError, InternalError, NotServing

log = logging.getLogger(__name__)

D = TypeVar("D")


class _Result(Protocol):
    @property
    def latency_seconds(self) -> float: ...


T = TypeVar("T", bound=_Result)


class Requests(Generic[D]):
    """Of one deployed model.

    `state` describes for people what it is doing; `failed_on` is told
    which error a request got from which deployment.
    """

    def __init__(self, queue_limit: int, state: Callable[[], str], failed_on: Callable[[D, HearthError], None]) -> None:
        self.admission: Admission[D] = Admission(queue_limit)
        self.served = 0
        self.failed = 0
        self.last_error = ""
        self.last_latency_seconds: float | None = None
        self._state = state
        self._failed_on = failed_on
        self._running: set[asyncio.Task[object]] = set()
        self._watched: tuple[D, DriftMonitor] | None = None

    async def run(
        self,
        compute: Callable[[D], Awaitable[T]],
        timeout_seconds: float,
        failed_on: Callable[[D, HearthError], None] | None = None,
    ) -> T:
        """One request on the deployment. `failed_on` takes the place of `Requests.failed_on`.

        Raises QueueFull, NotServing, DeadlineExceeded, and what `compute` raises. On the devices a request keeps its
        place until it has ended there, whether or not its client still waits.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        try:
            deployment = await self.admission.enter(timeout_seconds)
        except asyncio.TimeoutError:
            raise self.too_late("the request", timeout_seconds) from None
        running = asyncio.create_task(self._run(compute, deployment, failed_on or self.failed_on))
        self._running.add(running)
        running.add_done_callback(self._ended)
        remaining = deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({running}, timeout=max(remaining, 0.001))
        if not done:
            raise self.too_late("the request", timeout_seconds)
        return running.result()

    @asynccontextmanager
    async def place(self, timeout_seconds: float) -> AsyncIterator[D]:
        """A place on the deployment. Raises QueueFull, NotServing, DeadlineExceeded while it waits for one."""
        try:
            deployment = await self.admission.enter(max(timeout_seconds, 0.001))
        except asyncio.TimeoutError:
            raise self.too_late("the request", timeout_seconds) from None
        try:
            yield deployment
        finally:
            self.admission.leave()

    def failed_on(self, deployment: D, error: HearthError) -> None:
        """A request got this error from a deployment."""
        self._failed_on(deployment, error)

    def too_late(self, action: str, seconds: float) -> NotServing | DeadlineExceeded:
        if not self.admission.is_open:
            return NotServing(state=self._state())
        return DeadlineExceeded(action=action, seconds=seconds)

    def count(self, latency_seconds: float) -> None:
        """A request was served."""
        self.served += 1
        self.last_latency_seconds = latency_seconds

    def count_failure(self, error: HearthError) -> None:
        self.failed += 1
        self.last_error = str(error)

    async def close(self) -> None:
        """Wait for what still runs; the deployment has ended before."""
        await asyncio.gather(*self._running, return_exceptions=True)

    # ---- drift ----------------------------------------------------------------------------------------------------

    def watch(self, deployment: D, monitor: DriftMonitor) -> None:
        self._watched = (deployment, monitor)

    def observe(
        self, deployment: D, share: float, compute_seconds: Sequence[float], total_seconds: float | None
    ) -> None:
        """See `DriftMonitor.observe`; a deployment of before is left out."""
        if self._watched is not None and self._watched[0] is deployment:
            self._watched[1].observe(share, compute_seconds, total_seconds)

    # ---- one request ----------------------------------------------------------------------------------------------

    async def _run(
        self, compute: Callable[[D], Awaitable[T]], deployment: D, failed_on: Callable[[D, HearthError], None]
    ) -> T:
        try:
            result = await compute(deployment)
        except Exception as error:
            failure = failure_of(error)
            self.count_failure(failure)
            failed_on(deployment, failure)
            raise failure from None
        self.count(result.latency_seconds)
        return result

    def _ended(self, running: asyncio.Task[T]) -> None:
        self._running.discard(running)
        self.admission.leave()
        if not running.cancelled():
            running.exception()  # retrieved, though its client may be gone


def failure_of(error: Exception) -> HearthError:
    """An exception that is no HearthError is a fault of ours: it is logged whole, and the coordinator lives on."""
    if isinstance(error, HearthError):
        return error
    log.error("a fault", exc_info=error)
    return InternalError(where="the coordinator", reason=f"{type(error).__name__}: {error}")
