"""Rank 0 of a decoder's plan: accepts requests, schedules steps, and answers token by token."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent.worker.transformer.generation.facts import SequenceCancelled, log_fact
from agent.worker.transformer.generation.scheduler import Scheduler, SequenceState
from agent.worker.transformer.generation.steps import StepExecutor
from hearth.errors import BadRequest, HearthError, StepFailed
from hearth.plan.plan import TransformerPlan
from hearth.wire.framing import unpack_array
from hearth.wire.messages import Failed, GenerateTokens, GenerationEnded, KeptCache, Message, TokensGenerated

log = logging.getLogger("hearth.worker")

# How long KV caches of streams are kept that may return. Streams return as soon as the next plan serves.
_KEPT_SECONDS = 30.0

Replies = list[tuple[bytes, Message]]  # request id and answer


@dataclass
class _PendingRequest:
    """A request and the times of its progress, in seconds of the monotonic clock."""

    request_id: bytes
    submitted: float
    started: float | None = None
    first_token: float | None = None


class Leader:
    """Drives the generation: schedules requests and runs steps. `step` returns the answers that one step produced."""

    def __init__(self, plan: TransformerPlan, executor: StepExecutor, kept: Sequence[KeptCache] = ()) -> None:
        """`kept` are KV caches of earlier plans, with which their streams continue."""
        assert plan.body.generation is not None
        self._spec = plan.model
        self._limits = plan.body.generation
        self._executor = executor
        self._whole_prompts = any(plan.body.mode(layer).attention == "rows" for layer in range(plan.model.num_layers))
        self._num_groups = _num_groups(plan)
        self._scheduler = self._new_scheduler()
        self._scheduler.keep(kept)
        self._drops_kept_at = time.monotonic() + _KEPT_SECONDS
        self._requests: dict[int, _PendingRequest] = {}  # keyed by sequence number
        self._last_number = 0
        self._failure: HearthError | None = None

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and (self._failure is not None or not self._executor.num_in_flight)

    @property
    def seconds_until_due(self) -> float | None:
        """How long an idle leader may wait for requests before it must `step`; None: without limit."""
        if self._failure is not None or not self._scheduler.has_kept:
            return None
        return max(self._drops_kept_at - time.monotonic(), 0.0)

    def submit(self, request_id: bytes, request: GenerateTokens, payload: list[bytes]) -> None:
        """Queue a request. Raises BadRequest, or the error that ended this plan."""
        if self._failure is not None:
            raise self._failure
        token_ids = unpack_array(payload)
        if token_ids.ndim != 1 or token_ids.dtype != np.int32 or not len(token_ids):
            raise BadRequest(reason="a prompt is a non-empty list of 32-bit token ids")
        if token_ids.min() < 0 or token_ids.max() >= self._spec.vocab_size:
            raise BadRequest(reason=f"token ids must lie between 0 and {self._spec.vocab_size - 1}")
        self._last_number += 1
        prompt = token_ids.tolist()
        sequence = SequenceState(self._last_number, request, prompt, len(prompt))
        if sequence.capacity > self._spec.max_positions or not self._scheduler.fits(sequence):
            room = min(self._spec.max_positions, self._scheduler.max_sequence_tokens)
            raise BadRequest(reason=f"{sequence.capacity} tokens of context; the plan has room for {room}")
        self._requests[sequence.number] = _PendingRequest(request_id, time.monotonic())
        self._scheduler.add(sequence)

    def cancel(self, request_id: bytes) -> None:
        """Cancel a request. Does nothing if it has ended."""
        for number in [number for number, request in self._requests.items() if request.request_id == request_id]:
            running = self._scheduler.running.get(number)
            log_fact(log, SequenceCancelled(sequence=number, num_tokens=len(running.generated) if running else 0))
            self._scheduler.cancel(number)
            self._drops_kept_at = time.monotonic() + _KEPT_SECONDS
            del self._requests[number]

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
            return self._fail(error)
        replies: Replies = []
        for number, token in tokens.items():
            if number in self._requests:  # it may have been cancelled meanwhile
                replies += self._append_token(number, token)
        return replies

    def _begin(self) -> bool:
        """Begin the next step, if there is one. Returns whether there was."""
        if self._scheduler.has_kept and time.monotonic() >= self._drops_kept_at:
            self._scheduler.drop_unclaimed()
        order = self._scheduler.next_order()
        if order is None:
            return False
        began = time.monotonic()
        for rows in order.rows:
            if rows.new is not None:
                self._requests[rows.sequence].started = began
        self._executor.begin(order)
        return True

    def _append_token(self, number: int, token: int) -> Replies:
        sequence, request = self._scheduler.running[number], self._requests[number]
        self._scheduler.append_token(number, token)
        if request.first_token is None:
            request.first_token = time.monotonic()
        replies: Replies = [(request.request_id, TokensGenerated(token_ids=(token,)))]
        if sequence.ended:
            replies.append((request.request_id, self._end(sequence, request)))
            self._forget(number)
        return replies

    def _end(self, sequence: SequenceState, request: _PendingRequest) -> GenerationEnded:
        now = time.monotonic()
        started, first = request.started or now, request.first_token or now
        return GenerationEnded(
            reason="stop" if sequence.generated[-1] in sequence.request.stop_ids else "length",
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_tokens=len(sequence.generated),
            queued_seconds=started - request.submitted,
            prefill_seconds=first - started,
            decode_seconds=now - first,
            num_kept_rows=sequence.num_kept_rows,
        )

    def end(self, error: HearthError) -> Replies:
        """End the generation: all current requests fail with `error`, and so do later ones."""
        return self._fail(error)

    def _fail(self, error: HearthError) -> Replies:
        """Fail all requests: a step belongs to all of them, so the error cannot be attributed to one."""
        if error.scope == "request":
            error = StepFailed(device="rank 0", reason=error.explanation())
        self._failure = error
        failed, self._requests = list(self._requests.values()), {}
        self._scheduler = self._new_scheduler()
        return [(request.request_id, Failed.of(error)) for request in failed]

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._limits, self._whole_prompts, self._num_groups)

    def _forget(self, number: int) -> None:
        self._scheduler.remove(number)
        del self._requests[number]


def _num_groups(plan: TransformerPlan) -> int:
    """Number of groups in which sequences decode: the stages that can be busy at once while the slowest one always is.

    More groups would only add load to the slowest stage, which reads its weights once per group.
    """
    if plan.body.num_stages == 1:
        return 1
    busy = [device.compute_seconds for device in plan.devices]
    return max(round(sum(busy) / max(busy)), 1) if max(busy) > 0 else plan.num_ranks
