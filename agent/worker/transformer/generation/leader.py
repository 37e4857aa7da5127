"""Rank 0 of a decoder's plan: accepts requests, schedules steps, and answers token by token."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent.worker.tracing import SchedulerIdle, SequenceCancelled, SequenceResumed, log_fact
from agent.worker.transformer.generation.sampling import LogitErrors
from agent.worker.transformer.generation.scheduler import Scheduler
from agent.worker.transformer.generation.sequence import SequenceState
from agent.worker.transformer.generation.speculation import Speculation
from agent.worker.transformer.generation.steps import StepExecutor
from hearth.errors import BadGrammar, BadRequest, HearthError, StepFailed
from hearth.plan.common import ValueFormatName
from hearth.plan.plan import TransformerPlan
from hearth.wire import messages as wire
from hearth.wire.framing import unpack_array

log = logging.getLogger("hearth.worker")

# How long KV caches of streams are kept that may return. Streams return as soon as the next plan serves.
_KEPT_SECONDS = 30.0
# The same after the last token: it is lost if the coordinator has died, and the next one asks within about twice its lease.
_ENDED_SECONDS = 10.0

Replies = list[tuple[bytes, wire.Message]]  # request id and answer


@dataclass
class _PendingRequest:
    """A request and the times of its progress, in seconds of the monotonic clock.

    One that continues a sequence of this plan has `num_earlier_tokens` of that sequence's answer in its prompt, and
    `num_kept_rows` of its prompt in the KV cache.
    """

    request_id: bytes
    submitted: float
    started: float | None = None
    first_token: float | None = None
    num_earlier_tokens: int = 0
    num_kept_rows: int = 0


class Leader:
    """Drives the generation: schedules requests and runs steps. `step` returns the answers that one step produced."""

    def __init__(
        self,
        plan: TransformerPlan,
        executor: StepExecutor,
        kept: Sequence[wire.KeptCache] = (),
        speculation: Speculation | None = None,
        prefixes: wire.KeptPrefixes | None = None,
    ) -> None:
        """`kept` are KV caches of earlier plans, with which their streams continue; `prefixes`: of their prefix cache."""
        assert plan.body.generation is not None
        self._spec = plan.model
        self._limits = plan.body.generation
        self._executor = executor
        self._whole_prompts = any(plan.body.mode(layer).attention == "rows" for layer in range(plan.model.num_layers))
        self._num_groups = _num_groups(plan)
        self._speculation = speculation or Speculation()
        self._in_flight: deque[tuple[float, int]] = deque()  # when each step began, and its rows if it decodes, else 0
        self._finished_at = 0.0  # on the monotonic clock, the newest finished step
        self._scheduler = self._new_scheduler()
        self._scheduler.keep(kept, prefixes)
        self._drops_kept_at = time.monotonic() + _KEPT_SECONDS
        self._expiries: dict[int, float] = {}  # of paused sequences: by number, on the monotonic clock
        self._requests: dict[int, _PendingRequest] = {}  # keyed by sequence number
        self._last_number = 0
        self._values: ValueFormatName | None = None  # of the newest request
        self._logit_errors = LogitErrors()
        executor.observe_candidates = self._observe_candidates
        self._failure: HearthError | None = None

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and (self._failure is not None or not self._executor.num_in_flight)

    @property
    def seconds_until_due(self) -> float | None:
        """How long an idle leader may wait for requests before it must `step`; None: without limit."""
        due = [*self._expiries.values(), *([self._drops_kept_at] if self._scheduler.has_kept else [])]
        if self._failure is not None or not due:
            return None
        return max(min(due) - time.monotonic(), 0.0)

    def submit(self, request_id: bytes, request: wire.GenerateTokens, payload: list[bytes]) -> Replies:
        """Queue a request; return its first answers. Raises BadRequest, or the error that ended this plan."""
        if self._failure is not None:
            raise self._failure
        token_ids = unpack_array(payload)
        if token_ids.ndim != 1 or token_ids.dtype != np.int32 or not len(token_ids):
            raise BadRequest(reason="a prompt is a non-empty list of 32-bit token ids")
        if token_ids.min() < 0 or token_ids.max() >= self._spec.vocab_size:
            raise BadRequest(reason=f"token ids must lie between 0 and {self._spec.vocab_size - 1}")
        prompt = token_ids.tolist()
        if (resumed := self._scheduler.resume(request, prompt)) is not None:
            return self._resume(request_id, resumed, len(prompt))
        self._last_number += 1
        sequence = SequenceState(self._last_number, request, prompt, len(prompt))
        if sequence.capacity > self._spec.max_positions or not self._scheduler.fits(sequence):
            room = min(self._spec.max_positions, self._scheduler.max_sequence_tokens)
            raise BadRequest(reason=f"{sequence.capacity} tokens of context; the plan has room for {room}")
        self._values = request.values
        if not request.logits:
            self._logit_errors.clear()
        self._requests[sequence.number] = _PendingRequest(request_id, time.monotonic())
        self._scheduler.add(sequence)
        return []

    def _resume(self, request_id: bytes, sequence: SequenceState, num_prompt_tokens: int) -> Replies:
        """Answer a request with a sequence that it continues, beginning with the tokens that its prompt lacks."""
        replies: Replies = []
        now, number = time.monotonic(), sequence.number
        self._expiries.pop(number, None)
        if (earlier := self._requests.get(number)) is not None:  # of a coordinator that is gone
            error = BadRequest(reason="a newer request continues this stream")
            replies.append((earlier.request_id, wire.Failed.of(error)))
        request = self._requests[number] = _PendingRequest(
            request_id,
            submitted=now,
            started=now if sequence.cache else None,
            num_earlier_tokens=num_prompt_tokens - sequence.num_prompt_tokens,
            num_kept_rows=min(sequence.num_computed_rows, num_prompt_tokens),
        )
        log_fact(log, SequenceResumed(sequence=sequence.cache))
        log.info("a stream goes on with %d rows of its KV cache", request.num_kept_rows)
        if count := len(sequence.generated) - request.num_earlier_tokens:
            replies += self._answer_tokens(sequence, request, count)
        return replies

    def cancel(self, request_id: bytes, final: bool = False) -> None:
        """Cancel a request. Does nothing if it has ended. `final`: no stream continues it, so its KV cache is freed at once."""
        for number in [number for number, request in self._requests.items() if request.request_id == request_id]:
            running = self._scheduler.running.get(number)
            if running is not None:
                log_fact(log, SequenceCancelled(sequence=running.cache, num_tokens=len(running.generated)))
            if final:
                self._scheduler.remove(number)
                del self._requests[number]
            else:
                self._pause(number, _KEPT_SECONDS)

    def step(self) -> Replies:
        """Begin a step on all ranks, or finish the oldest step in flight.

        A step is finished if it has ended, if there is nothing to begin, or if the plan's maximum is in flight. If a step
        fails, all current and future requests fail.
        """
        try:
            if not self._executor.oldest_has_ended() and self._begin() and self._executor.can_begin:
                return []
            if not self._executor.num_in_flight:
                return []
            tokens = self._executor.finish()
        except HearthError as error:
            return self.end(error)
        self._record_time()
        replies: Replies = []
        for cache, new in tokens.items():
            if not new.token_ids:
                replies += self._refuse(cache)
                continue
            sequence, appended = self._scheduler.append_tokens(cache, new.token_ids)
            if sequence is None:
                continue
            sequence.log_probs += new.log_probs[: len(appended)]
            if sequence.number in self._requests:  # it may have been cancelled meanwhile
                replies += self._answer_tokens(sequence, self._requests[sequence.number], len(appended))
        return replies

    def _record_time(self) -> None:
        """Record the time of the step that has ended; of steps that overlap in a pipeline, the time since the one before."""
        began, num_rows = self._in_flight.popleft()
        now = time.monotonic()
        seconds = now - max(began, self._finished_at)
        if num_rows:
            self._speculation.times.record(num_rows, seconds)
        self._scheduler.took(seconds)
        self._finished_at = now

    def _begin(self) -> bool:
        """Begin the next step, if there is one. Returns whether there was."""
        now = time.monotonic()
        if self._scheduler.has_kept and now >= self._drops_kept_at:
            self._scheduler.drop_unclaimed()
        for number in [number for number, expiry in self._expiries.items() if now >= expiry]:
            del self._expiries[number]
            self._scheduler.expire(number)
        order = self._scheduler.next_order()
        if order is None:
            return False
        began = time.monotonic()
        for rows in order.rows:
            sequence = self._scheduler.with_cache(rows.sequence)
            if rows.new is not None and sequence is not None:
                request = self._requests[sequence.number]
                request.started = request.started or began
        num_rows = sum(len(rows.token_ids) for rows in order.rows) if order.kind == "decode" else 0
        self._in_flight.append((began, num_rows))
        self._executor.begin(order.model_copy(update={"values": self._values}) if self._values else order)
        if self._scheduler.idle:
            num_free = self._scheduler.num_free_blocks
            log_fact(log, SchedulerIdle(num_blocks=self._limits.num_kv_blocks, num_free_blocks=num_free))
        return True

    def _refuse(self, cache: int) -> Replies:
        """Fail the one request whose grammar cannot be followed any further."""
        sequence = self._scheduler.with_cache(cache)
        if sequence is None:
            return []
        self._scheduler.remove(sequence.number)
        self._scheduler.expire(sequence.number)  # if it was cancelled meanwhile
        if (request := self._requests.pop(sequence.number, None)) is None:
            return []
        reason = f"after {len(sequence.generated)} tokens no further one was found, or a device cannot apply it"
        error = BadGrammar(what="grammar", reason=reason)
        return [(request.request_id, wire.Failed.of(error))]

    def _answer_tokens(self, sequence: SequenceState, request: _PendingRequest, count: int) -> Replies:
        """Answer with the newest `count` tokens of a sequence."""
        if request.first_token is None:
            request.first_token = time.monotonic()
        tokens, log_probs = tuple(sequence.generated[-count:]), tuple(sequence.log_probs[-count:])
        replies: Replies = [(request.request_id, wire.TokensGenerated(token_ids=tokens, log_probs=log_probs))]
        if sequence.ended:
            replies.append((request.request_id, self._end(sequence, request)))
            self._pause(sequence.number, _ENDED_SECONDS)
        return replies

    def _end(self, sequence: SequenceState, request: _PendingRequest) -> wire.GenerationEnded:
        now = time.monotonic()
        started, first = request.started or now, request.first_token or now
        return wire.GenerationEnded(
            reason="stop" if sequence.generated[-1] in sequence.request.stop_ids else "length",
            num_prompt_tokens=sequence.num_prompt_tokens + request.num_earlier_tokens,
            num_tokens=len(sequence.generated) - request.num_earlier_tokens,
            queued_seconds=started - request.submitted,
            prefill_seconds=first - started,
            decode_seconds=now - first,
            num_kept_rows=max(sequence.num_kept_rows, request.num_kept_rows),
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted,
            logit_error=self._logit_errors.largest(sequence.number),
        )

    def _observe_candidates(self, cache: int, candidates: Sequence[np.ndarray[Any, Any]]) -> None:
        sequence = self._scheduler.with_cache(cache)
        if sequence is not None and sequence.request.logits:
            tokens = [*sequence.prompt, *sequence.generated]
            self._logit_errors.add(sequence.number, sequence.request.logits, tokens, np.concatenate(candidates))

    def end(self, error: HearthError) -> Replies:
        """End the generation: all current requests fail with `error`, and so do later ones.

        An error of a step ends it, too: a step belongs to all requests, so the error cannot be attributed to one.
        """
        if error.scope == "request":
            error = StepFailed(device="rank 0", reason=error.explanation())
        self._failure = error
        failed, self._requests = list(self._requests.values()), {}
        self._scheduler, self._expiries = self._new_scheduler(), {}
        return [(request.request_id, wire.Failed.of(error)) for request in failed]

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._limits, self._whole_prompts, self._num_groups, self._speculation)

    def _pause(self, number: int, seconds: float) -> None:
        """End a sequence for now; if it is one of a named stream, a request may continue it within `seconds`."""
        if self._scheduler.pause(number):
            self._expiries[number] = time.monotonic() + seconds
        del self._requests[number]


def _num_groups(plan: TransformerPlan) -> int:
    """Number of groups in which sequences decode: the stages that can be busy at once while the slowest one always is.

    More groups would only add load to the slowest stage, which reads its weights once per group.
    """
    if plan.body.num_stages == 1:
        return 1
    busy = [device.compute_seconds for device in plan.devices]
    return max(round(sum(busy) / max(busy)), 1) if max(busy) > 0 else plan.num_ranks
