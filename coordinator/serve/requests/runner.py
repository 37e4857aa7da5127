"""Runs requests on the current deployment: admission in the order of arrival, retries, probes, counters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from coordinator.serve.requests.admission import Admission, Place
from coordinator.serve.requests.retry import Failures, is_lost, needs_probe
from hearth.errors import DeadlineExceeded, HearthError, InternalError, LeaseLost, PartLost
from hearth.platform.asyncio_tools import loop_time, with_timeout
from hearth.wire.messages import Inferred, TextEnded, Vectors
from hearth.wire.rpc import Reply

log = logging.getLogger(__name__)

_PROBE_SECONDS = 15.0  # limit of a probe, which has a shorter timeout of its own unless steps are predicted to be long

D = TypeVar("D")
ComputedReply: TypeAlias = tuple[Vectors | Inferred, Sequence[Any]]  # a reply message with its latency, and its payload


@dataclass(eq=False)
class Ticket:
    """One request from its arrival to its end, over all deployments that it runs on."""

    place: Place
    timeout_seconds: float  # from its arrival
    deadline: float  # time of the event loop
    failures: Failures = field(default_factory=Failures)
    failure: HearthError | None = None  # of the last attempt; None if that is dealt with
    probe: asyncio.Task[bool] | None = None  # that decides whether the plan of the last attempt works
    alone: bool = True  # whether no other request ran during the last attempt
    admitted_before: int = 0  # requests that were admitted when the last attempt began, itself included


class Requests(Generic[D]):
    """The requests of one deployed model.

    A request whose plan is lost returns to its place in the queue and runs on the next plan, within its own deadline
    (`coordinator.serve.requests.retry` says how often). After a failed step the plan may still work: admission pauses while
    `probe(deployment, error)` runs a small request, and only if that fails, too, the plan is lost.

    `why_not_ready` is the error of requests for which no deployment came in time. `on_loss(deployment, error)` is called when a
    plan is lost, and must close `admission`. `on_measured` gets the times of each step or request: of which deployment, then as
    `DriftMonitor.observe`.
    """

    def __init__(
        self,
        queue_limit: int,
        why_not_ready: Callable[[], HearthError],
        on_loss: Callable[[D, HearthError], None],
        probe: Callable[[D, HearthError], Awaitable[None]],
        on_measured: Callable[[D, float, Sequence[float], float | None], None] = lambda *times: None,
    ) -> None:
        self.admission: Admission[D] = Admission(queue_limit)
        self.num_served = 0
        self.num_failed = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0  # of the prompts', found in the KV cache
        self.num_drafted_tokens = 0  # of the answers, guessed before they were computed
        self.num_accepted_tokens = 0  # of these, tokens of the answers
        self.last_error = ""
        self.last_latency_seconds: float | None = None
        self._on_loss = on_loss
        self._probe = probe
        self._why_not_ready = why_not_ready
        self.observe = on_measured
        self._running: set[asyncio.Task[Reply]] = set()
        self._probing: tuple[D, asyncio.Task[bool]] | None = None  # the last probe and its deployment

    async def run(self, compute: Callable[[D], Awaitable[ComputedReply]], ticket: Ticket) -> Reply:
        """Run one request. `compute` runs it on one deployment, and is called again if that is lost.

        Raises QueueFull, NotServing, DeadlineExceeded and the errors of `compute`. A started request holds its slot until
        the workers finish it, even if its client stops waiting.
        """
        try:
            while True:
                deployment = await self._enter(ticket)
                running = asyncio.create_task(self._attempt(compute, deployment, ticket))
                self._running.add(running)
                running.add_done_callback(partial(self._on_task_done, ticket.place.caller))
                await asyncio.wait({running}, timeout=self._remaining_seconds(ticket))
                if not running.done():
                    raise self._timeout_error(ticket)
                if ticket.failure is None:
                    reply = running.result()
                    self.count_served(getattr(reply.message, "latency_seconds", 0.0))
                    return reply
        except HearthError as error:
            self.count_failed(error)
            raise

    @asynccontextmanager
    async def slot(self, ticket: Ticket) -> AsyncIterator[D]:
        """Hold a slot on the deployment. Suppresses an error of the block that means that the plan was lost.

        The caller then asks for a slot again, which raises that error if the request may not run again. Raises QueueFull,
        NotServing, DeadlineExceeded while waiting for a slot.
        """
        deployment = await self._enter(ticket)
        try:
            yield deployment
        except HearthError as error:
            if loop_time() >= ticket.deadline:  # the request's own deadline says nothing about the plan
                raise
            self._record_failure(ticket, deployment, error)
            if ticket.failure is None:
                raise
        finally:
            self.admission.leave(ticket.place.caller)

    def arrive(self, timeout_seconds: float) -> Ticket:
        """The ticket of a request that arrives now."""
        return Ticket(self.admission.arrive(), timeout_seconds, loop_time() + timeout_seconds)

    def record_progress(self, ticket: Ticket) -> None:
        """The running request got further than ever before: it is not the cause of its earlier failures."""
        ticket.failures = Failures()
        if ticket.place.alone:
            ticket.place.alone = False
            self.admission.share()

    def count_answer(self, end: TextEnded) -> None:
        """Count a text that was generated, with its tokens."""
        self.num_prompt_tokens += end.num_prompt_tokens
        self.num_cached_tokens += end.num_cached_tokens
        self.num_drafted_tokens += end.num_drafted_tokens
        self.num_accepted_tokens += end.num_accepted_tokens
        self.count_served(end.first_token_seconds + end.decode_seconds)

    def count_served(self, latency_seconds: float) -> None:
        """Count a request as served."""
        self.num_served += 1
        self.last_latency_seconds = latency_seconds

    def count_failed(self, error: HearthError) -> None:
        """Count a request whose client gets an error."""
        self.num_failed += 1
        self.last_error = str(error)

    async def close(self) -> None:
        """Wait for running requests. Call after the deployment has ended."""
        probes = [self._probing[1]] if self._probing is not None else []
        await asyncio.gather(*self._running, *probes, return_exceptions=True)

    # ---- one attempt ----------------------------------------------------------------------------------------------

    async def _enter(self, ticket: Ticket) -> D:
        """Wait for a slot. After a failure, first wait for the probe's verdict; raises the failure if it was the last one."""
        returning = ticket.failure is not None
        if ticket.failure is not None:
            self.admission.pause()  # until this request is back in the queue: no later one may overtake it
            try:
                await self._judge(ticket, ticket.failure)
            except BaseException:
                self.admission.resume()
                raise
        try:
            deployment = await self.admission.enter(self._remaining_seconds(ticket), ticket.place, resume=returning)
        except asyncio.TimeoutError:
            raise self._timeout_error(ticket) from None
        ticket.alone = self.admission.num_running == 1
        ticket.admitted_before = self.admission.num_admitted
        return deployment

    async def _judge(self, ticket: Ticket, failure: HearthError) -> None:
        """Raise `failure` unless the request may run again."""
        plan_works = False
        if ticket.probe is not None:
            await asyncio.wait({ticket.probe}, timeout=self._remaining_seconds(ticket))
            if not ticket.probe.done():
                raise self._timeout_error(ticket)
            plan_works = ticket.probe.result()
        if not ticket.failures.record(failure, ticket.alone, plan_works):
            raise failure
        ticket.place.alone = ticket.failures.must_run_alone
        ticket.failure = ticket.probe = None

    async def _attempt(self, compute: Callable[[D], Awaitable[ComputedReply]], deployment: D, ticket: Ticket) -> Reply:
        try:
            message, payload = await compute(deployment)
        except Exception as error:
            failure = as_hearth_error(error)
            self._record_failure(ticket, deployment, failure)
            raise failure from None
        return Reply(message, payload)

    def _on_task_done(self, caller: str, running: asyncio.Task[Reply]) -> None:
        self._running.discard(running)
        self.admission.leave(caller)
        if not running.cancelled():
            running.exception()  # mark the exception as retrieved, even if the client is gone

    def _record_failure(self, ticket: Ticket, deployment: D, error: HearthError) -> None:
        """Report a lost plan, or begin to probe it. Called before the slot is free, so that no other request takes it."""
        if not is_lost(error):
            if error.scope != "request":
                self._on_loss(deployment, error)
            return
        ticket.failure = error
        ticket.alone &= self.admission.num_admitted == ticket.admitted_before
        if needs_probe(error):
            ticket.probe = self._probe_plan(deployment, error)
        else:
            self._on_loss(deployment, error)

    def _probe_plan(self, deployment: D, error: HearthError) -> asyncio.Task[bool]:
        """The probe of this deployment; its result is whether the plan works. Requests that fail meanwhile share it."""
        if self._probing is None or self._probing[0] is not deployment or self._probing[1].done():
            self.admission.pause()
            probing = asyncio.create_task(self._run_probe(deployment, error))
            probing.add_done_callback(lambda _: self.admission.resume())
            self._probing = deployment, probing
        return self._probing[1]

    async def _run_probe(self, deployment: D, error: HearthError) -> bool:
        try:
            await with_timeout(_PROBE_SECONDS, self._probe(deployment, error))
        except asyncio.TimeoutError:
            self._on_loss(deployment, error)
        except Exception as failure:
            found = as_hearth_error(failure)
            # The first error says what was waited for, unless the probe found what is gone.
            is_cause = isinstance(found, PartLost | LeaseLost)
            self._on_loss(deployment, found if is_cause else error)
        else:
            return True
        return False

    # ---- times ----------------------------------------------------------------------------------------------------

    def _remaining_seconds(self, ticket: Ticket) -> float:
        return max(ticket.deadline - loop_time(), 0.001)

    def _timeout_error(self, ticket: Ticket) -> HearthError:
        if not self.admission.is_open:
            return self._why_not_ready()
        return DeadlineExceeded(action="the request", seconds=ticket.timeout_seconds)


def as_hearth_error(error: Exception) -> HearthError:
    """`error` as a HearthError. Any other exception is a bug: log it with its traceback and return InternalError."""
    if isinstance(error, HearthError):
        return error
    log.error("unexpected exception", exc_info=error)
    return InternalError(where="the coordinator", reason=f"{type(error).__name__}: {error}")
