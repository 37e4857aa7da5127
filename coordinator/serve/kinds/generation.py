"""Streamed text generation: requests run as sequences on a deployment and continue on the next one when it fails."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import numpy as np

from coordinator.deploy.transformer import TransformerDeployment
from coordinator.serve.kinds.accuracy import DECODED_TOKENS
from coordinator.serve.requests.runner import Requests, Ticket
from coordinator.serve.text.answer_reader import AnswerReader, Piece, joined
from coordinator.serve.text.constraints import AnswerGrammars
from coordinator.serve.text.prompts import GenerationDefaults, StopTextFilter, TextStream, TextTokenizer
from coordinator.serve.text.template_reader import TemplateReader
from coordinator.serve.text.threads import TextThreads
from hearth import errors
from hearth.grammars import Grammars, Vocabulary
from hearth.plan.common import ValueFormatName
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.platform.asyncio_tools import cancel_all, loop_time
from hearth.protocol import REPLY_MARGIN_SECONDS
from hearth.wire import messages as wire
from hearth.wire.codec import Array
from hearth.wire.intake import MAX_REQUESTS_PER_CALLER
from hearth.wire.rpc import caller_may_return

MAX_GENERATIONS = MAX_REQUESTS_PER_CALLER // 2  # at once; the rest of rank 0's limit per caller is left for heartbeats
_MAX_STOP_CHARACTERS = 1000  # of a stop text: bounds the search at every token; real ones are a few words
# A deployment is silent after this many times the longest wait of its workers for a peer, which is 20 times the prediction of a
# step. A worker that is dead or stopped is found much sooner, by its agent.
_SILENCE_FACTOR = 2
_ALL_LOGITS = 0.999999  # top-p of a request whose logits are compared
_ALL_APPS = "all apps"  # the scope of prefixes that are shared; no public key is that short
_PROBE_TOKENS = 8  # of the prompt of a probe: short, but several rows to share
_PROBE_SECONDS = 120.0  # timeout of a probe's answer: the first step also pages the weights in and loads the kernels

_T = TypeVar("_T")


@dataclass(frozen=True)
class TextModel:
    """A decoder's spec, tokenizer and generation defaults, read once from its directory."""

    spec: ModelSpec
    tokenizer: TextTokenizer | None  # None: only token ids are accepted
    defaults: GenerationDefaults

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The tokens, for grammars and log-probabilities; None if they are not known."""
        stop_ids = [token_id for token_id in self.defaults.stop_ids if 0 <= token_id < self.spec.vocab_size]
        if self.tokenizer is None:
            return None
        return self.tokenizer.vocabulary(self.spec.vocab_size, stop_ids)

    @cached_property
    def packed_vocabulary(self) -> bytes | None:
        """The tokens as the devices get them."""
        return self.vocabulary.pack() if self.vocabulary is not None and self.vocabulary.stop_ids else None

    @cached_property
    def _answer_grammars(self) -> AnswerGrammars:
        if self.tokenizer is None or self.vocabulary is None or not self.vocabulary.stop_ids:
            reason = "answers of this model cannot be constrained: its files name no texts of tokens, or no end of text"
            raise errors.BadRequest(reason=reason)
        special = {self.vocabulary.tokens[n].decode(errors="replace"): n for n in self.vocabulary.special_ids}
        return AnswerGrammars(Grammars(self.vocabulary), self.tokenizer.form, special)

    def with_pieces(self, log_probs: wire.TokenLogProbs) -> wire.TokenLogProbs:
        """The same with the bytes of the tokens, if they are known."""
        if self.vocabulary is None:
            return log_probs
        tokens = self.vocabulary.tokens
        chosen, *top = (
            each.model_copy(update={"piece": tokens[each.token_id]}) for each in (log_probs.chosen, *log_probs.top)
        )
        return wire.TokenLogProbs(chosen=chosen, top=tuple(top))

    def grammar(self, request: wire.Generate, prompt: Sequence[int]) -> str:
        """The grammar of the answer, which compiles. Raises BadGrammar, BadRequest."""
        grammars = self._answer_grammars
        assert self.tokenizer is not None
        return grammars.grammar(request, self.tokenizer.begins_with_reasoning(prompt))

    def prompt_ids(self, request: wire.Generate, token_ids: Array | None) -> list[int]:
        """Token ids of the request's prompt. Raises BadRequest."""
        if [request.prompt is not None, bool(request.messages), token_ids is not None].count(True) != 1:
            raise errors.BadRequest(reason="give a prompt, messages or token ids, and only one of them")
        if self.tokenizer is None and (token_ids is None or request.stop):
            raise errors.BadRequest(reason="the model has no tokenizer.json; send token ids without stop texts")
        if any(not 0 < len(stop) <= _MAX_STOP_CHARACTERS for stop in request.stop):
            raise errors.BadRequest(reason=f"a stop text must have 1 to {_MAX_STOP_CHARACTERS} characters")
        if request.tools and not request.messages:
            raise errors.BadRequest(reason="tools need messages, since the chat template describes them to the model")
        if request.tools and self.tokenizer is not None and not self.tokenizer.takes_tools:
            raise errors.BadRequest(
                reason="the model's chat template has no form for calls of tools that Hearth can read"
            )
        is_formed = bool(request.called_tools) or request.constraint is not None
        if request.tools and is_formed and self.tokenizer is not None and self.tokenizer.form.tools is None:
            raise errors.BadRequest(reason="calls in the form of this model cannot be demanded, only left to the model")
        if request.called_tools and not request.tools:
            raise errors.BadRequest(reason="a call is demanded, but there are no tools")
        if token_ids is not None:
            if token_ids.ndim != 1 or str(token_ids.dtype) != "int32":
                raise errors.BadRequest(reason="token ids must be a list of 32-bit integers")
            ids: list[int] = token_ids.tolist()
        else:
            assert self.tokenizer is not None
            ids = self.tokenizer.encode(request.prompt) if request.prompt else []
            if request.messages:
                ids = self.tokenizer.encode_chat(request.messages, request.tools, request.template_options)
        if not ids:
            raise errors.BadRequest(reason="the prompt is empty")
        if min(ids) < 0 or max(ids) >= self.spec.vocab_size:
            raise errors.BadRequest(reason=f"token ids must lie between 0 and {self.spec.vocab_size - 1}")
        if max(request.generated, default=0) >= self.spec.vocab_size:
            raise errors.BadRequest(reason=f"generated token ids must lie between 0 and {self.spec.vocab_size - 1}")
        if request.generated and len(ids) + len(request.generated) > self.spec.max_positions:
            raise errors.BadRequest(reason="more tokens were generated than the model's context holds")
        return ids


def max_context_tokens(plan: TransformerPlan) -> int:
    """Maximum tokens of one request, prompt and answer together. Raises BadPlan."""
    if plan.body.generation is None:
        raise errors.BadPlan(reason="it is not for a model that generates text")
    capacity = plan.body.generation.kv_tokens
    return min(plan.model.max_positions, capacity, plan.body.generation.context or capacity)


async def probe(deployment: TransformerDeployment) -> None:
    """Generate two tokens: checks that all workers reach each other in prefill and decoding, and loads the kernels."""
    context = max_context_tokens(deployment.plan)
    prompt = np.zeros(max(min(_PROBE_TOKENS, context - 2), 1), np.int32)
    request = wire.GenerateTokens(**deployment.command_fields, max_tokens=max(min(2, context - len(prompt)), 1))
    async with aclosing(deployment.generate(prompt, request, _PROBE_SECONDS)) as answers:
        async for _ in answers:
            pass


async def decode_prompt(
    deployment: TransformerDeployment, token_ids: Array, values: ValueFormatName, keep: bool
) -> tuple[float, float]:
    """Generate a few tokens in a value format: the relative error of the logits, and seconds per token after the first.

    `keep`: the logits are kept instead, for comparisons with those of the next calls; the error is 0.
    """
    # The same noise for all formats leads to the same tokens, as far as their logits agree; top-p brings all of them to rank 0.
    sampling = wire.Sampling(temperature=1.0, top_p=_ALL_LOGITS, seed=1)
    request = wire.GenerateTokens(
        **deployment.command_fields, max_tokens=DECODED_TOKENS, sampling=sampling, values=values,
        logits="keep" if keep else "compare",
    )  # fmt: skip
    async with aclosing(deployment.generate(token_ids, request, _PROBE_SECONDS)) as answers:
        async for answer in answers:
            if isinstance(answer, wire.GenerationEnded):
                error = 0.0 if keep else answer.logit_error
                seconds = answer.decode_seconds / max(answer.num_tokens - 1, 1)
                return (math.inf if error is None else error), seconds
    raise errors.BadMessage(reason="a generation had no end")


class GenerationRunner:
    """All generation requests. They run concurrently: rank 0 batches them."""

    def __init__(
        self,
        requests: Requests[TransformerDeployment],
        threads: TextThreads | None = None,
        shared_prefixes: bool = False,
        max_drafted: int = 0,
    ) -> None:
        """`shared_prefixes`: apps share the KV cache of equal prefixes, so that each can measure what others have asked.

        `max_drafted`: tokens that a step guesses of each answer, at most; 0: no speculative decoding.
        """
        self._threads = threads or TextThreads()
        self._shared_prefixes = shared_prefixes
        self._max_drafted = max_drafted
        self._activity: _Activity | None = None  # of the newest deployment
        self._requests = requests

    async def run(
        self, model: TextModel, request: wire.Generate, token_ids: Array | None
    ) -> AsyncGenerator[wire.TextGenerated | wire.TextEnded, None]:
        """Stream the answer. When a deployment fails, the next one continues from the tokens generated so far.

        Without `max_tokens` the limit is that of generation_config.json, else 512 tokens. The free context limits both.
        Raises BadRequest, ContextTooLong, QueueFull, NotServing, DeadlineExceeded, WorkerDied, ...
        """
        ticket = self._requests.arrive(request.timeout_seconds)
        try:
            prompt = await self._in_thread(ticket, request, partial(model.prompt_ids, request, token_ids))
            grammar = ""
            if request.constraint is not None or request.called_tools:
                grammar = await self._with_vocabulary(ticket, partial(model.grammar, request, prompt))
            if request.top_log_probs is not None:  # with the bytes of tokens, which take a moment to read once
                await self._with_vocabulary(ticket, lambda: model.vocabulary)
            began = ticket.deadline - request.timeout_seconds
            caller = ticket.place.caller
            scope = _ALL_APPS if self._shared_prefixes else caller
            generation = _RunningGeneration(model, request, prompt, began, caller, scope, grammar)
            generation.remaining_tokens(model.spec.max_positions)  # refuse early a prompt that can never fit
            if request.generated:  # the client has these tokens and their text from an earlier attempt
                await self._in_thread(ticket, request, partial(generation.append, request.generated))
            async with aclosing(self._stream(generation, ticket)) as messages:
                async for message in messages:
                    yield message
            end_message = generation.end_message()
            yield end_message
            self._requests.count_answer(end_message)
        except errors.HearthError as error:
            self._requests.count_failed(error)
            raise

    async def _in_thread(self, ticket: Ticket, request: wire.Generate, function: Callable[[], _T]) -> _T:
        """Call `function`, which handles all texts of the request, in a thread. Raises DeadlineExceeded, QueueFull."""
        num_characters = len(request.prompt or "") + sum(len(each.content) for each in request.messages)
        num_characters += sum(map(len, request.tools))
        seconds = ticket.deadline - loop_time()
        return await self._threads.run(seconds, num_characters + len(request.generated), function)

    async def _with_vocabulary(self, ticket: Ticket, function: Callable[[], _T]) -> _T:
        """Call `function`, which needs the bytes of the tokens, in the thread for them. Raises DeadlineExceeded, QueueFull."""
        return await self._threads.compile(ticket.deadline - loop_time(), function)

    async def _stream(self, generation: _RunningGeneration, ticket: Ticket) -> AsyncGenerator[wire.TextGenerated, None]:
        """Stream up to the end of the answer, on successive deployments if some fail."""
        while generation.reason is None:
            async with self._requests.slot(ticket) as deployment:
                max_tokens = generation.remaining_tokens(max_context_tokens(deployment.plan))
                if max_tokens == 0:  # all tokens had arrived; only the end message was lost
                    generation.reason = "stop" if generation.ends_with_stop_token else "length"
                    return
                async with (
                    aclosing(
                        generation.continue_on(deployment, max_tokens, ticket.deadline, self._max_drafted)
                    ) as events,
                    self._watched(deployment, generation.num_context_tokens) as watch,
                ):
                    while generation.reason is None:
                        event = await watch.next_event(events, ticket.deadline, generation.request)
                        if isinstance(event, wire.TokensGenerated):
                            self._requests.record_progress(ticket)
                            yield generation.append(event.token_ids, event.log_probs)
                        else:
                            generation.worker_end, generation.reason = event, event.reason

    @asynccontextmanager
    async def _watched(self, deployment: TransformerDeployment, num_context_tokens: int) -> AsyncIterator[_StreamWatch]:
        """Watch over one stream of the deployment. `num_context_tokens` are to be prefilled before its first token."""
        if self._activity is None or self._activity.deployment is not deployment:
            self._activity = _Activity(deployment)
        watch = _StreamWatch(self._activity, num_context_tokens)
        try:
            yield watch
        finally:
            watch.prefilled()


@dataclass(eq=False)
class _Activity:
    """What the streams of one deployment have in common."""

    deployment: TransformerDeployment
    newest_token_at: float = 0.0  # time of the event loop
    num_prefill_tokens: int = 0  # of all streams that wait for their first token


class _StreamWatch:
    """Notices that a deployment generates no more, although its workers live: no token came, on any of its streams."""

    def __init__(self, activity: _Activity, num_context_tokens: int) -> None:
        self._activity = activity
        self._num_prefill_tokens = num_context_tokens  # 0 after the first token
        activity.num_prefill_tokens += num_context_tokens
        self._began = loop_time()
        plan = activity.deployment.plan
        rows = plan.body.max_step_rows
        # The prefill of all prompts that are waiting, in chunks, and one step of decoding.
        num_steps = -(-activity.num_prefill_tokens // rows) + 1
        self._patience_seconds = _SILENCE_FACTOR * num_steps * plan.peer_timeout_seconds(rows)

    async def next_event(
        self,
        events: AsyncGenerator[wire.TokensGenerated | wire.GenerationEnded, None],
        deadline: float,
        request: wire.Generate,
    ) -> wire.TokensGenerated | wire.GenerationEnded:
        """The next event of the stream. Raises DeadlineExceeded, StepFailed if the deployment is silent, and its errors."""
        event = asyncio.ensure_future(anext(events))
        try:
            while not event.done():
                silent_at = max(self._began, self._activity.newest_token_at) + self._patience_seconds
                if loop_time() >= deadline:
                    raise errors.DeadlineExceeded(action="the generation", seconds=request.timeout_seconds)
                if loop_time() >= silent_at:
                    device = self._activity.deployment.plan.devices[0].name
                    raise errors.StepFailed(device=device, reason=f"no token for {self._patience_seconds:.0f} s")
                await asyncio.wait({event}, timeout=max(min(deadline, silent_at) - loop_time(), 0.001))
            self._activity.newest_token_at = loop_time()
            self.prefilled()
            return event.result()
        finally:
            await cancel_all([event])

    def prefilled(self) -> None:
        """Its tokens are prefilled, or need not be any more."""
        self._activity.num_prefill_tokens -= self._num_prefill_tokens
        self._num_prefill_tokens = 0


class _RunningGeneration:
    """One request and its generated tokens. Times are those of the event loop's clock, in seconds."""

    def __init__(
        self,
        model: TextModel,
        request: wire.Generate,
        prompt: list[int],
        began: float,
        caller: str,
        prefix_scope: str,
        grammar: str = "",
    ) -> None:
        self.model = model
        self.request = request
        self.reason: wire.FinishReason | None = None  # None while it runs
        self.worker_end: wire.GenerationEnded | None = None  # as rank 0 reported it
        self._prompt = prompt
        self._tokens: list[int] = []
        # One client's id may be another's: the workers compare the tokens too.
        self._stream_name = request.request_id or secrets.token_hex(8)
        self._text_stream: TextStream | None = None
        self._reader: AnswerReader | TemplateReader | None = None
        if model.tokenizer is not None:
            takes_parts = request.takes_parts or bool(request.tools)
            self._text_stream = model.tokenizer.stream(prompt, marks=takes_parts)
            if takes_parts:
                self._reader = model.tokenizer.reader(prompt, request.tools, self._stream_name, bool(grammar))
        self._stop_filter = StopTextFilter(request.stop)
        self._sampling = model.defaults.merged(request.sampling, secrets.randbits(62))
        self._clock = asyncio.get_running_loop().time  # also called in a thread, which has no loop
        self._began_at = began
        self._caller, self._prefix_scope = caller, prefix_scope
        self._grammar = grammar
        self._num_deployments = 0
        self._sent_at = self._first_token_at = self._last_token_at = began

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self._prompt) + len(self._tokens)

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the newest token is an end-of-text token."""
        return bool(self._tokens) and self._tokens[-1] in self.model.defaults.stop_ids

    def remaining_tokens(self, context: int) -> int:
        """Number of tokens that may still be generated, at most what the context has room for. Raises ContextTooLong."""
        room = context - len(self._prompt)
        if room < 1:
            raise errors.ContextTooLong(num_prompt_tokens=len(self._prompt), max_tokens=1, context_tokens=context)
        if self.ends_with_stop_token:
            return 0
        return max(min(self.request.max_tokens or self.model.defaults.max_tokens, room) - len(self._tokens), 0)

    def continue_on(
        self, deployment: TransformerDeployment, max_tokens: int, deadline: float, max_drafted: int
    ) -> AsyncGenerator[wire.TokensGenerated | wire.GenerationEnded, None]:
        """Generate the remaining tokens on this deployment."""
        self._num_deployments += 1
        if self._num_deployments == 1:
            self._sent_at = self._clock()
        request = wire.GenerateTokens(
            **deployment.command_fields,
            max_tokens=max_tokens,
            sampling=self._sampling,
            stop_ids=self.model.defaults.stop_ids,
            first_index=len(self._tokens),
            stream=self._stream_name,
            caller=self._caller,
            prefix_scope=self._prefix_scope,
            max_drafted=max_drafted,
            grammar=self._grammar,
            top_log_probs=self.request.top_log_probs,
        )
        return deployment.generate(
            np.asarray([*self._prompt, *self._tokens], np.int32),
            request,
            deadline - self._clock() + REPLY_MARGIN_SECONDS,
            lambda: self.reason is None and caller_may_return(),
        )

    def append(self, token_ids: Sequence[int], log_probs: Sequence[wire.TokenLogProbs] = ()) -> wire.TextGenerated:
        """Append the next tokens, up to one that completes a stop text, which ends the answer."""
        self._last_token_at = self._clock()
        if not self._tokens:
            self._first_token_at = self._last_token_at
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._tokens.append(token_id)
            if self._text_stream is not None and not self.ends_with_stop_token:
                text += self._stop_filter.push(self._text_stream.push(token_id))
                if self._stop_filter.found:
                    self.reason = "stop"
                    token_ids = token_ids[:count]
                    break
        piece = self._reader.push(text) if self._reader is not None else Piece(text)
        if piece.tool_calls and not self.request.parallel_calls:
            self.reason = "stop"
        shown = tuple(map(self.model.with_pieces, log_probs[: len(token_ids)]))
        return wire.TextGenerated(token_ids=tuple(token_ids), log_probs=shown, **piece._asdict())

    def end_message(self) -> wire.TextEnded:
        """The end message, with the text that was held back."""
        assert self.reason is not None
        text = ""
        if self._text_stream is not None:
            text = self._stop_filter.push(self._text_stream.flush()) + self._stop_filter.flush()
        piece = Piece(text)
        if self._reader is not None:
            piece = joined([self._reader.push(text), self._reader.flush(is_cut=self.reason != "stop")])
        queued, first = self._sent_at - self._began_at, self._first_token_at - self._sent_at
        others, num_cached = self._last_token_at - self._first_token_at, 0
        if self.worker_end is not None and self._num_deployments == 1:  # rank 0 measured its own queueing more exactly
            queued += self.worker_end.queued_seconds
            first, others = self.worker_end.prefill_seconds, self.worker_end.decode_seconds
            num_cached = min(self.worker_end.num_kept_rows, len(self._prompt))
        return wire.TextEnded(
            **piece._asdict(),
            reason="stop" if self._stop_filter.found else self.reason,
            num_prompt_tokens=len(self._prompt),
            num_tokens=len(self._tokens),
            queued_seconds=queued,
            first_token_seconds=max(first, 0.0),
            decode_seconds=others,
            num_cached_tokens=num_cached,
            num_drafted_tokens=self.worker_end.num_drafted if self.worker_end is not None else 0,
            num_accepted_tokens=self.worker_end.num_accepted if self.worker_end is not None else 0,
        )
