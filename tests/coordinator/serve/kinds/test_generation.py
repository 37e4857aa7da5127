"""Token streams of a scripted deployment: failover, stop texts, limits; the client library and its commands."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_models import save_byte_level, write_config
from support.checkpoints import write_model
from support.controllers import ServedController, serving
from support.fleets import TransformerFleet
from support.plans import LLAMA_1B, make_plan, with_generation
from support.servers import rpc_server
from support.waiting import WAIT_LIMIT_SECONDS, let_tasks_run, until, wait_for
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.cli.commands import generate as generate_command
from coordinator.deploy.transformer import TransformerDeployment
from coordinator.serve.kinds import generation
from coordinator.serve.kinds.generation import GenerationRunner, TextModel, max_context_tokens, probe
from coordinator.serve.replan.drift import MIN_PRESENCE_SECONDS
from coordinator.serve.requests.admission import CALLER, Admission
from coordinator.serve.requests.runner import Requests
from coordinator.serve.state import TransformerGoal
from coordinator.serve.text.prompts import GenerationDefaults, StopTextFilter, TextTokenizer
from hearth import errors
from hearth.client.answers import Token
from hearth.client.home import AsyncHome
from hearth.client.sync import Home, connect
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits
from hearth.platform.security import Access, HomeKey, derive_keypair, new_home_key, save_credential
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.rpc import Caller, Reply, Response

VOCAB, POSITIONS, CONTEXT, END_TOKEN = 300, 80, 64, 7
SPEC = LLAMA_1B.model_copy(update={"vocab_size": VOCAB, "max_positions": POSITIONS})
PLAN = make_plan(
    SPEC,
    "hmp",
    (1, 1),
    generation=GenerationLimits(kv_tokens=3 * CONTEXT, max_sequences=4, prefill_rows=16, context=CONTEXT),
)
DIED = errors.WorkerDied(device="device1", reason="killed")
LOST = errors.DeviceLost(device="device1", reason="no answer")
MODEL = TextModel(SPEC, None, GenerationDefaults(stop_ids=(END_TOKEN,)))


def next_token(ids: Sequence[int]) -> int:
    """The scripted model: the next token depends on every token and on its position."""
    value = sum((index + 1) * token for index, token in enumerate(ids)) + len(ids)
    return 10 + value % (VOCAB - 10)


def expected(prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@dataclass
class Request:
    ids: list[int]
    asked: wire.GenerateTokens


@dataclass
class Script:
    """A stand-in for Deployment. `fails` lists, for each request, the number of tokens before an error, and the error."""

    plan: TransformerPlan = PLAN
    fails: list[tuple[int, errors.HearthError]] = field(default_factory=list)
    tokens: Sequence[int] = ()  # used in place of the scripted model's, if given
    at_once: int = 1  # tokens per message
    num_cached: int = 0  # tokens of every prompt in the KV cache
    silent_after: int | None = None  # tokens after which it gives no more
    silence_ended: bool = False  # set: it goes on
    requests: list[Request] = field(default_factory=list)
    open_now: int = 0
    may_return: list[bool] = field(default_factory=list)  # whether each stream that has ended may go on
    tokens_given: int = 0
    command_fields: ClassVar[dict[str, Any]] = {"holder": "coordinator", "epoch": 1}

    async def generate(
        self,
        token_ids: np.ndarray[Any, Any],
        asked: wire.GenerateTokens,
        timeout_seconds: float,
        may_return: Callable[[], bool] = lambda: False,
    ) -> AsyncGenerator[wire.TokensGenerated | wire.GenerationEnded, None]:
        assert token_ids.dtype == np.int32
        assert timeout_seconds > 0
        ids, reason = token_ids.tolist(), "length"
        self.requests.append(Request(list(ids), asked))
        limit, error = self.fails.pop(0) if self.fails else (None, None)
        self.open_now += 1
        count, batch = 0, []
        try:
            while count < asked.max_tokens and reason == "length":
                await asyncio.sleep(0)
                if count == limit:
                    assert error is not None
                    raise error
                if count == self.silent_after:
                    while not self.silence_ended:
                        await asyncio.sleep(0.005)
                token = self.tokens[asked.first_index + count] if self.tokens else next_token(ids)
                ids.append(token)
                batch.append(token)
                count += 1
                reason = "stop" if token in asked.stop_ids else "length"
                if len(batch) == self.at_once or reason == "stop" or count == asked.max_tokens:
                    self.tokens_given += len(batch)
                    yield wire.TokensGenerated(token_ids=tuple(batch))
                    batch = []
            if limit == count:
                assert error is not None
                raise error
            yield wire.GenerationEnded(
                reason=reason, num_prompt_tokens=len(token_ids), num_tokens=count, queued_seconds=0.5,
                prefill_seconds=0.25, decode_seconds=0.125, num_kept_rows=min(self.num_cached, len(token_ids)),
                num_drafted=2 * asked.max_drafted, num_accepted=asked.max_drafted,
            )  # fmt: skip
        finally:
            self.open_now -= 1
            self.may_return.append(may_return())


class Host(Requests[Any]):
    """Real admission; a failed deployment is replaced by the next one after a pause. A probe fails unless `plan_works`."""

    def __init__(self, *deployments: Script, pause_seconds: float = 0.0, plan_works: bool = False) -> None:
        async def probe(deployment: Script, error: errors.HearthError) -> None:
            if not plan_works:
                raise errors.StepFailed(device="device0", reason="the probe failed")

        super().__init__(99, lambda: errors.NotServing(state="planning again"), self._lost, probe)
        self.deployments = list(deployments)
        self.errors: list[errors.HearthError] = []
        self._pause_seconds = pause_seconds
        self.admission.open(self.deployments[0], 99)

    def _lost(self, deployment: Script, error: errors.HearthError) -> None:
        self.errors.append(error)
        if self.admission.is_open and deployment is self.deployments[0]:
            self.admission.close()
            asyncio.get_running_loop().call_later(self._pause_seconds, self._next)

    def _next(self) -> None:
        if len(self.deployments) > 1:
            self.deployments.pop(0)
        self.admission.open(self.deployments[0], 99)


@dataclass
class Outcome:
    tokens: list[int]
    text: str
    end: wire.TextEnded


async def ask(
    host: Host, *, model: TextModel = MODEL, token_ids: Sequence[int] | None = (1, 2, 3), **fields: Any
) -> Outcome:
    generations = GenerationRunner(host)
    return await read(generations, model, token_ids, **fields)


async def read(
    generations: GenerationRunner, model: TextModel, token_ids: Sequence[int] | None, **fields: Any
) -> Outcome:
    ids = None if token_ids is None else np.asarray(token_ids, np.int32)
    tokens: list[int] = []
    text = ""
    async with aclosing(generations.run(model, wire.Generate(**fields), ids)) as parts:
        async for part in parts:
            text += part.text
            if isinstance(part, wire.TextGenerated):
                tokens.extend(part.token_ids)
    assert isinstance(part, wire.TextEnded)
    return Outcome(tokens, text, part)


# ---- on one plan ----------------------------------------------------------------------------------------------------


def test_tokens_are_streamed_and_end_with_usage() -> None:
    script = Script()
    found = asyncio.run(ask(Host(script), max_tokens=6, sampling=wire.SamplingChoice(temperature=0.5, seed=3)))
    assert found.tokens == expected((1, 2, 3), 6)
    (request,) = script.requests
    assert (request.ids, request.asked.max_tokens, request.asked.first_index) == ([1, 2, 3], 6, 0)
    assert (request.asked.sampling, request.asked.stop_ids) == (wire.Sampling(temperature=0.5, seed=3), (END_TOKEN,))
    end = found.end
    assert (end.reason, end.num_prompt_tokens, end.num_tokens, end.text) == ("length", 3, 6, "")
    assert (end.first_token_seconds, end.decode_seconds) == (0.25, 0.125)
    assert end.queued_seconds >= 0.5


def test_random_seeds_differ_between_requests() -> None:
    script = Script()
    for _ in range(2):
        asyncio.run(ask(Host(script), max_tokens=1))
    first, second = (request.asked.sampling.seed for request in script.requests)
    assert first != second


def test_stop_ids_are_passed_to_the_deployment() -> None:
    found = asyncio.run(ask(Host(Script(tokens=[20, 21, END_TOKEN])), max_tokens=9))
    assert (found.tokens, found.end.reason, found.end.num_tokens) == ([20, 21, END_TOKEN], "stop", 3)


def test_default_length_is_limited_by_model_and_context() -> None:
    async def length(token_ids: Sequence[int], requested: int | None = None, **defaults: Any) -> int:
        model = replace(MODEL, defaults=GenerationDefaults(**defaults))
        found = await ask(Host(Script()), model=model, token_ids=token_ids, max_tokens=requested)
        assert found.end.reason == "length"
        return len(found.tokens)

    assert asyncio.run(length([1] * 10)) == CONTEXT - 10
    assert asyncio.run(length([1] * 10, max_tokens=5)) == 5
    assert asyncio.run(length([1] * 62, max_tokens=5)) == 2
    assert asyncio.run(length([1] * 10, requested=3000)) == CONTEXT - 10
    assert asyncio.run(length([1] * 63, requested=2, max_tokens=5)) == 1


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(64, None), (64, 2), (79, 2), (80, None), (81, 1)])
def test_prompt_above_the_context_is_rejected_with_numbers(num_prompt: int, max_tokens: int | None) -> None:
    script = Script()
    with pytest.raises(errors.ContextTooLong) as error:
        asyncio.run(ask(Host(script), token_ids=[1] * num_prompt, max_tokens=max_tokens))
    context = POSITIONS if num_prompt >= POSITIONS else CONTEXT
    assert error.value.details() == {"num_prompt_tokens": num_prompt, "max_tokens": 1, "context_tokens": context}
    assert not script.requests


def test_encoder_plan_is_a_bad_plan() -> None:
    with pytest.raises(errors.BadPlan):
        max_context_tokens(with_generation(PLAN, None))


@pytest.mark.parametrize(
    ("fields", "token_ids", "message_part"),
    [
        ({}, None, "only one of them"),
        ({"prompt": "a", "messages": (wire.ChatMessage(role="user", content="a"),)}, None, "only one of them"),
        ({"prompt": "a"}, [1], "only one of them"),
        ({"prompt": "a"}, None, "no tokenizer"),
        ({"stop": ("a",)}, [1], "no tokenizer"),
        ({}, [], "the prompt is empty"),
        ({}, [VOCAB], "between 0 and 299"),
        ({}, [-1], "between 0 and 299"),
        ({}, [[1]], "a list of 32-bit integers"),
    ],
)
def test_bad_request_is_rejected_before_it_runs(fields: dict[str, Any], token_ids: Any, message_part: str) -> None:
    host = Host(Script())
    with pytest.raises(errors.BadRequest) as error:
        asyncio.run(ask(host, token_ids=token_ids, **fields))
    assert message_part in str(error.value)
    assert not host.errors
    assert not host.deployments[0].requests


async def test_requests_beyond_the_queue_are_refused_and_leave_no_slot_taken() -> None:
    host = Host(Script(silent_after=1))
    host.admission = Admission(1)
    host.admission.open(host.deployments[0], 2)
    generations = GenerationRunner(host)
    async with aclosing(generations.run(MODEL, wire.Generate(), np.ones(1, np.int32))) as one:
        async with aclosing(generations.run(MODEL, wire.Generate(), np.ones(1, np.int32))) as two:
            await anext(one)
            await anext(two)
            waiting = asyncio.create_task(read(generations, MODEL, [1], max_tokens=1))
            await let_tasks_run()
            with pytest.raises(errors.QueueFull):
                await read(generations, MODEL, [1])
        assert (await waiting).tokens == expected((1,), 1)
    assert host.admission.num_running == 0


async def test_request_deadline_does_not_end_the_plan() -> None:
    script = Script(silent_after=2)
    host = Host(script)
    with pytest.raises(errors.DeadlineExceeded):
        await ask(host, timeout_seconds=0.1)
    assert (script.open_now, host.errors) == (0, [])
    host.admission.close()
    with pytest.raises(errors.NotServing, match="planning again"):
        await ask(host, timeout_seconds=0.1)


def test_plan_that_generates_no_more_is_probed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For instance if rank 0 hangs in a computation: no request waits out its own deadline."""
    monkeypatch.setattr(generation, "_SILENCE_FACTOR", 0.005)  # 50 ms
    for silent_after in (0, 3):
        hung, second = Script(silent_after=silent_after), Script()
        host = Host(hung, second)
        assert asyncio.run(ask(host, max_tokens=6)).tokens == expected((1, 2, 3), 6)
        assert (hung.open_now, [type(error) for error in host.errors]) == (0, [errors.StepFailed])


async def test_other_streams_show_that_a_plan_still_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_SILENCE_FACTOR", 0.05)  # 0.5 s

    host = Host(Script(silent_after=0))
    generations = GenerationRunner(host)
    waiting = asyncio.create_task(read(generations, MODEL, [1], max_tokens=1))
    began = time.monotonic()
    await let_tasks_run()
    host.deployments[0].silent_after = None
    while time.monotonic() < began + 1.5:
        await read(generations, MODEL, [1], max_tokens=3)
        await asyncio.sleep(0.02)
    assert (waiting.done(), host.errors) == (False, [])
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_closing_the_answer_ends_the_sequence() -> None:
    script = Script()
    host = Host(script)
    generations = GenerationRunner(host)
    parts = generations.run(MODEL, wire.Generate(), np.ones(1, np.int32))
    for _ in range(3):
        await anext(parts)
    assert (script.open_now, host.admission.num_running) == (1, 1)
    await parts.aclose()
    assert (script.open_now, host.admission.num_running) == (0, 0)
    assert script.may_return == [True]  # the caller, whose connection may just have been lost


def test_probe_fits_into_any_context() -> None:
    for context in (1, 2, 3, 9, 64):
        limits = GenerationLimits(kv_tokens=context, max_sequences=1, prefill_rows=1)
        script = Script(plan=with_generation(PLAN, limits))
        asyncio.run(probe(script))
        (request,) = script.requests
        assert 1 <= len(request.ids) <= 8
        assert len(request.ids) + request.asked.max_tokens <= max(context, 2)


# ---- failover -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        DIED,
        errors.DeviceLost(device="device1", reason="no answer"),
        errors.StepFailed(device="the coordinator", reason="the plan was unloaded"),
        errors.DeadlineExceeded(action="GenerateTokens", seconds=120),
    ],
    ids=lambda error: error.code,
)
def test_generation_resumes_on_the_next_plan_after_a_failure(error: errors.HearthError) -> None:
    first, second = Script(fails=[(4, error)]), Script()
    host = Host(first, second, pause_seconds=0.05)
    found = asyncio.run(ask(host, max_tokens=10, sampling=wire.SamplingChoice(temperature=1.0)))
    assert found.tokens == expected((1, 2, 3), 10)
    assert host.errors == [error]
    (began,), (resumed,) = first.requests, second.requests
    assert resumed.ids == [1, 2, 3, *found.tokens[:4]]
    assert (resumed.asked.first_index, resumed.asked.max_tokens) == (4, 6)
    assert resumed.asked.sampling == began.asked.sampling
    assert (found.end.num_prompt_tokens, found.end.num_tokens, found.end.reason) == (3, 10, "length")


@given(st.lists(st.integers(0, 12), max_size=3), st.integers(1, 12), st.integers(1, 5))
def test_tokens_are_independent_of_number_and_place_of_failures(
    limits: list[int], max_tokens: int, at_once: int
) -> None:
    scripts = [*(Script(fails=[(limit, LOST)], at_once=at_once) for limit in limits), Script(at_once=at_once)]
    found = asyncio.run(ask(Host(*scripts), max_tokens=max_tokens))
    assert found.tokens == expected((1, 2, 3), max_tokens)
    assert all(script.open_now == 0 for script in scripts)


def test_stream_that_progresses_survives_any_number_of_failures() -> None:
    scripts = [Script(fails=[(1, errors.WorkerDied(device=f"device{index}", reason="again"))]) for index in range(30)]
    host = Host(*scripts, Script())
    assert asyncio.run(ask(host, max_tokens=40)).tokens == expected((1, 2, 3), 40)
    assert len(host.errors) == 30


def test_request_that_ends_every_plan_on_which_it_runs_alone_gets_the_error() -> None:
    scripts = [
        Script(fails=[(0, errors.WorkerDied(device=f"device{index}", reason="out of memory"))]) for index in range(5)
    ]
    host = Host(*scripts)
    with pytest.raises(errors.WorkerDied, match="device2"):
        asyncio.run(ask(host, max_tokens=20))
    assert (len(host.errors), host.num_failed) == (3, 1)


def test_losses_that_no_request_causes_are_not_counted() -> None:
    scripts = [Script(fails=[(0, errors.DeviceLost(device="device1", reason="no answer"))]) for _ in range(9)]
    assert asyncio.run(ask(Host(*scripts, Script()), max_tokens=4)).tokens == expected((1, 2, 3), 4)


def test_internal_error_of_one_request_does_not_end_a_plan_that_works() -> None:
    error = errors.InternalError(where="a worker", reason="a fault")
    script = Script(fails=[(0, error), (0, error)])
    host = Host(script, plan_works=True)
    with pytest.raises(errors.InternalError):
        asyncio.run(ask(host, max_tokens=20))
    assert (host.errors, len(script.requests)) == ([], 2)
    assert asyncio.run(ask(Host(Script(fails=[(0, error)]), plan_works=True), max_tokens=4)).tokens


@pytest.mark.parametrize(("tokens", "reason"), [([20, 21, 22], "length"), ([20, END_TOKEN, 0], "stop")])
def test_lost_end_message_causes_no_new_request(tokens: list[int], reason: str) -> None:
    count = 2 if reason == "stop" else 3
    first, second = Script(tokens=tokens, fails=[(count, DIED)]), Script()
    found = asyncio.run(ask(Host(first, second), max_tokens=3))
    assert (found.tokens, found.end.reason, second.requests) == (tokens[:count], reason, [])


@pytest.mark.parametrize(("shared", "scopes"), [(False, ["lamp", "heating"]), (True, ["all apps"] * 2)])
async def test_apps_share_no_prefixes_unless_allowed(shared: bool, scopes: list[str]) -> None:
    async def ask_as(name: str, generations: GenerationRunner) -> Outcome:
        CALLER.set(name)
        return await read(generations, MODEL, (1, 2, 3), max_tokens=2)

    script = Script(num_cached=2)
    host = Host(script)
    generations = GenerationRunner(host, shared_prefixes=shared)
    for name in ("lamp", "heating"):
        found = await asyncio.create_task(ask_as(name, generations))
        assert found.end.num_cached_tokens == 2
    assert [request.asked.prefix_scope for request in script.requests] == scopes
    assert (host.num_prompt_tokens, host.num_cached_tokens) == (6, 4)


async def test_guessed_tokens_are_counted() -> None:
    host = Host(Script())
    generations = GenerationRunner(host, max_drafted=3)
    for number in (1, 2):
        found = await read(generations, MODEL, (1, 2, 3), max_tokens=2)
        assert (found.end.num_drafted_tokens, found.end.num_accepted_tokens) == (6, 3)
        assert (host.num_drafted_tokens, host.num_accepted_tokens) == (6 * number, 3 * number)


def test_rows_kept_over_a_change_of_plan_are_not_counted_as_cached() -> None:
    found = asyncio.run(ask(Host(Script(fails=[(2, DIED)]), Script(num_cached=4)), max_tokens=4))
    assert found.end.num_cached_tokens == 0


def test_smaller_plan_limits_the_length() -> None:
    limits = GenerationLimits(kv_tokens=20, max_sequences=1, prefill_rows=8)
    small = with_generation(PLAN, limits)

    def scripts() -> tuple[Script, Script]:
        return Script(fails=[(8, DIED)]), Script(plan=small)

    for max_tokens in (None, 40):
        assert asyncio.run(ask(Host(*scripts()), max_tokens=max_tokens)).tokens == expected((1, 2, 3), 17)


async def test_plan_change_waits_for_running_answers_and_holds_new_ones() -> None:
    host = Host(Script(silent_after=2), Script())
    generations = GenerationRunner(host)
    one = generations.run(MODEL, wire.Generate(max_tokens=3), np.ones(1, np.int32))
    await anext(one)
    host.admission.close()
    drained = asyncio.create_task(host.admission.wait_until_drained())
    asking = asyncio.create_task(read(generations, MODEL, [1], max_tokens=3))
    await anext(one)
    await let_tasks_run()
    assert not drained.done()
    await one.aclose()
    await drained
    assert len(host.deployments[0].requests) == 1
    host.admission.open(host.deployments[1], 9)
    assert (await asking).tokens == expected([1], 3)
    assert len(host.deployments[1].requests) == 1


# ---- texts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """In the texts of these tests, every byte is a token."""
    folder = save_byte_level(tmp_path_factory.mktemp("tokenizer"), adds_bos=False)
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    return TextTokenizer(write_config(folder, chat_template=template))


def script_of_text(tokenizer: TextTokenizer, text: str, **more: Any) -> tuple[Script, TextModel]:
    """A deployment that generates a text and its end token."""
    end = tokenizer.encode("</s>")[0]
    script = Script(tokens=[*tokenizer.encode(text), end], **more)
    return script, TextModel(SPEC, tokenizer, GenerationDefaults(stop_ids=(end,)))


def test_prompt_or_chat_is_answered_with_text(tokenizer: TextTokenizer) -> None:
    script, model = script_of_text(tokenizer, "Grüße! 🙂")
    found = asyncio.run(ask(Host(script), model=model, token_ids=None, prompt="Hi"))
    assert (found.text, found.end.text, found.end.reason) == ("Grüße! 🙂", "", "stop")
    chat = (wire.ChatMessage(role="user", content="Hi"),)
    asyncio.run(ask(Host(script), model=model, token_ids=None, messages=chat))
    assert [tokenizer.decode(request.ids) for request in script.requests] == ["Hi", "user:Hi\n"]
    with pytest.raises(errors.BadRequest, match="empty"):
        asyncio.run(ask(Host(script), model=model, token_ids=None, prompt=""))


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_stop_text_ends_the_answer_and_the_sequence(at_once: int, tokenizer: TextTokenizer) -> None:
    script, model = script_of_text(tokenizer, "one two three four", at_once=at_once)
    found = asyncio.run(ask(Host(script), model=model, stop=("thr", "nothing"), max_tokens=18))
    assert (found.text, found.end.reason, found.end.num_tokens) == ("one two ", "stop", 11)
    assert found.tokens == script.tokens[:11]
    assert (script.open_now, script.may_return) == (0, [False])
    assert script.tokens_given < 11 + at_once


def test_withheld_text_is_sent_at_the_end(tokenizer: TextTokenizer) -> None:
    script, model = script_of_text(tokenizer, "one two th")
    found = asyncio.run(ask(Host(script), model=model, stop=("thr",), max_tokens=10))
    assert (found.text, found.end.text, found.end.reason) == ("one two th", "th", "length")
    script, model = script_of_text(tokenizer, "a€")
    found = asyncio.run(ask(Host(script), model=model, max_tokens=3))
    assert (found.text, found.end.text) == ("a\ufffd", "\ufffd")  # cut inside a character


@given(limits=st.lists(st.integers(0, 20), max_size=3))
def test_text_resumes_after_failures_at_any_byte(limits: list[int], tokenizer: TextTokenizer) -> None:
    script, model = script_of_text(tokenizer, "Grüße! 🙂 END more")
    script.fails = [(limit, LOST) for limit in limits]
    found = asyncio.run(ask(Host(script), model=model, stop=("END",)))
    assert found.text == "Grüße! 🙂 "


@pytest.mark.parametrize("stop", ["", "x" * 1001])
def test_stop_text_length_is_checked(stop: str, tokenizer: TextTokenizer) -> None:
    script, model = script_of_text(tokenizer, "a")
    with pytest.raises(errors.BadRequest, match="1 to 1000 characters"):
        asyncio.run(ask(Host(script), model=model, stop=(stop,)))


# ---- the deployment -------------------------------------------------------------------------------------------------


class DecoderFleet(TransformerFleet):
    """Rank 0 streams a script."""

    def __init__(self, names: Sequence[str], script: Script) -> None:
        super().__init__(names)
        self.script = script

    async def stream(
        self,
        device_id: str,
        message: wire.GenerateTokens,
        payload: Sequence[Any],
        last: type[Any],
        timeout_seconds: float,
        may_return: Callable[[], bool],
    ) -> AsyncGenerator[Reply, None]:
        assert (message.epoch, last) == (self.loads[device_id].plan.epoch, wire.GenerationEnded)
        ids = unpack_array([bytes(frame) for frame in payload])
        answers = self.script.generate(ids, message, timeout_seconds)
        async with aclosing(answers):
            async for answer in answers:
                yield Reply(answer)


class Agents(DecoderFleet):
    """The devices of `PLAN`, of which id1 answers an Abort with the error that it knows."""

    def __init__(self, script: Script, knows: errors.HearthError | None = None) -> None:
        super().__init__([device.device_id for device in PLAN.devices], script)
        self.loads["id0"] = wire.Load.model_construct(plan=PLAN)
        self._knows = knows

    async def call(self, device_id: str, message: wire.Message, *arguments: Any, **options: Any) -> Reply:
        reply = await super().call(device_id, message, *arguments, **options)
        if device_id == "id1" and self._knows is not None:
            raise self._knows
        return reply


def deployed(
    agents: Agents,
) -> tuple[TransformerDeployment, AsyncGenerator[wire.TokensGenerated | wire.GenerationEnded, None]]:
    deployment = TransformerDeployment(agents, PLAN)
    request = wire.GenerateTokens(**deployment.command_fields, max_tokens=9)
    return deployment, deployment.generate(np.asarray([1, 2, 3], np.int32), request, 5.0)


async def test_root_cause_is_found_and_all_ranks_are_aborted() -> None:
    agents = Agents(Script(fails=[(2, errors.StepFailed(device="device0", reason="rank 1 is silent"))]), knows=DIED)
    _, answers = deployed(agents)
    with pytest.raises(errors.WorkerDied):
        async for _ in answers:
            pass
    assert [device for device, message in agents.asked if isinstance(message, wire.Abort)] == ["id0", "id1"]


async def test_device_loss_ends_the_stream_immediately() -> None:
    script = Script(silent_after=2)
    deployment, answers = deployed(Agents(script))
    await anext(answers)
    asyncio.get_running_loop().call_later(0.05, deployment.fail, DIED)
    began = time.monotonic()
    with pytest.raises(errors.WorkerDied):
        async for _ in answers:
            pass
    assert time.monotonic() - began < 10
    assert script.open_now == 0
    request = wire.GenerateTokens(**deployment.command_fields, max_tokens=1)
    with pytest.raises(errors.WorkerDied):
        await anext(deployment.generate(np.ones(1, np.int32), request, 1.0))


async def test_abandoned_stream_is_closed_at_the_agent() -> None:
    script = Script(silent_after=2)
    _, answers = deployed(Agents(script))
    await anext(answers)
    waiting = asyncio.create_task(_collect(answers))
    await let_tasks_run()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (waiting.cancelled(), script.open_now) == (True, 0)


async def _collect(answers: AsyncGenerator[Any, None]) -> list[Any]:
    return [answer async for answer in answers]


# ---- the controller -------------------------------------------------------------------------------------------------


class MeasuredFleet(DecoderFleet):
    """Rank 0 answers with the error and the time of each format."""

    def __init__(self, names: str) -> None:
        super().__init__(names, Script())
        self.orders: list[wire.GenerateTokens] = []

    async def stream(self, device_id: str, message: wire.GenerateTokens, *rest: Any) -> AsyncGenerator[Reply, None]:
        self.orders.append(message)
        errors = {"exact": 0.0, "fp16": 1e-4, "bf16": 1e-3, "int8": 1e-2}
        seconds = {"exact": 9.0, "fp16": 5.0, "bf16": 4.0, "int8": 2.0}
        async with aclosing(super().stream(device_id, message, *rest)) as replies:
            async for reply in replies:
                if isinstance(reply.message, wire.GenerationEnded) and message.logits == "compare":
                    assert message.values is not None
                    changes = {"logit_error": errors[message.values], "decode_seconds": seconds[message.values]}
                    yield Reply(reply.message.model_copy(update=changes))
                else:
                    yield reply


@pytest.mark.parametrize(("budget", "chosen"), [(0.1, "int8"), (0.01, "bf16"), (1e-3, "fp16"), (1e-5, "exact")])
async def test_fastest_format_within_the_budget_is_that_of_later_requests(
    budget: float, chosen: str, tmp_path: Path
) -> None:
    fleet = MeasuredFleet("ab")
    goal = goal_of(tmp_path, "llama", strategy="hmp", accuracy_budget=budget)
    async with serving(fleet, tmp_path / "state", goal) as home:
        await home.until(lambda: home.count_lines(f"activations travel as {chosen} "))
        assert {order.values for order in fleet.orders if order.logits == "keep"} == {"exact"}
        fleet.orders.clear()
        await tokens_of(home, max_tokens=5)
        assert [(order.values, order.logits) for order in fleet.orders] == [(chosen, "")]


def goal_of(folder: Path, family: str, **wishes: Any) -> TransformerGoal:
    return TransformerGoal(model_dir=str(write_model(folder / "model", family)), **wishes)


async def tokens_of(home: ServedController, **fields: Any) -> list[int]:
    parts = await _collect(
        await home.kind.generate(wire.Generate(**fields), pack_array(np.asarray([1, 2, 3], np.int32)))
    )
    return [token for part in parts if isinstance(part, wire.TextGenerated) for token in part.token_ids]


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequest(reason="no"),
        errors.FrameTooLarge(num_bytes=2, cap_bytes=1),
        errors.QueueFull(limit=1),
        errors.StepFailed(device="device1", reason="silent"),
        DIED,
    ],
    ids=repr,
)
async def test_only_errors_beyond_the_request_end_the_deployment(error: errors.HearthError, tmp_path: Path) -> None:
    script = Script()
    goal = goal_of(tmp_path, "llama", strategy="hmp")
    async with serving(DecoderFleet("ab", script), tmp_path / "state", goal) as home:
        script.fails = [(2, error)]
        if error.scope == "request":
            with pytest.raises(type(error)):
                await tokens_of(home, max_tokens=5)
            assert await tokens_of(home, max_tokens=5) == expected((1, 2, 3), 5)
            assert (home.ready, home.plan.epoch, home.controller.requests.num_failed) == (True, 1, 1)
            assert not any(isinstance(message, wire.Abort) for _, message in home.fleet.asked)
        else:
            assert await tokens_of(home, max_tokens=5) == expected((1, 2, 3), 5)
            assert home.controller.requests.num_failed == 0
            await home.until(lambda: home.ready)
            assert home.plan.epoch == (
                2 if isinstance(error, errors.WorkerDied) else 1
            )  # a probe succeeded after the others


async def test_long_answer_continues_on_the_next_plan(tmp_path: Path) -> None:
    """A running answer gets time to finish; after that it moves to the new plan, without lost or repeated tokens."""
    script = Script()
    goal = goal_of(tmp_path, "llama", strategy="hmp")
    fleet = DecoderFleet("a", script)
    async with serving(fleet, tmp_path / "state", goal, drain_seconds=0.05) as home:
        script.silent_after = 2
        asking = asyncio.create_task(tokens_of(home, max_tokens=6))
        await home.until(lambda: script.tokens_given == 2 + 2)  # two of them from the warm-up
        home.fleet.add("b")
        await home.wait_for_replanner()
        home.now += MIN_PRESENCE_SECONDS
        await home.until(lambda: "draining" in home.phases())
        script.silent_after = None
        assert await asking == expected((1, 2, 3), 6)
        assert (home.names(), home.plan.epoch) == ("ab", 2)


async def test_requests_must_match_the_kind_of_model(tmp_path: Path) -> None:
    decoder, encoder = (
        ServedController(TransformerFleet("a"), tmp_path / family, goal_of(tmp_path / family, family), None)
        for family in ("llama", "bert")
    )
    with pytest.raises(errors.BadRequest, match="hearth generate"):
        await decoder.kind.embed(wire.Embed(texts=("a",)), ())
    with pytest.raises(errors.BadRequest, match="hearth generate"):
        await decoder.hidden_states(1, 1.0)
    with pytest.raises(errors.BadRequest, match="hearth embed"):
        await encoder.kind.generate(wire.Generate(), ())
    with pytest.raises(errors.NotServing):
        await tokens_of(decoder, timeout_seconds=0.05)
    assert (decoder.controller.requests.num_failed, decoder.controller.requests.num_served) == (1, 0)


# ---- the client -----------------------------------------------------------------------------------------------------

KEY = new_home_key()


class Coordinator:
    """The client interface of a coordinator, with a scripted deployment."""

    def __init__(self, script: Script, model: TextModel) -> None:
        self.script = script
        self.asked = 0
        self.error: errors.HearthError | None = None
        self._model = model
        self._generations = GenerationRunner(Host(script))

    async def handle(self, caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        if isinstance(message, wire.Hello):
            return wire.CoordinatorWelcome(version="0", name="test")
        assert isinstance(message, wire.Generate)
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self._stream(message, unpack_array(payload) if payload else None)

    async def _stream(self, message: wire.Generate, token_ids: Any) -> AsyncGenerator[Reply, None]:
        async with aclosing(self._generations.run(self._model, message, token_ids)) as parts:
            async for part in parts:
                await asyncio.sleep(0.002)
                yield Reply(part)


@asynccontextmanager
async def coordinator(script: Script, model: TextModel = MODEL, port: int = 0) -> Any:
    keys = derive_keypair(KEY.key_bytes(), "coordinator")
    coordinator = Coordinator(script, model)
    async with rpc_server(keys, coordinator.handle, port) as server:
        yield coordinator, server


def access(key: HomeKey = KEY) -> Access:
    keys = derive_keypair(key.key_bytes(), "coordinator")
    return Access(keys, keys.public)


async def test_client_reads_tokens_text_and_usage(tokenizer: TextTokenizer) -> None:
    script, model = script_of_text(tokenizer, "Grüße END", at_once=2)
    async with coordinator(script, model) as (_, server):
        async with AsyncHome(access(), f"127.0.0.1:{server.port}", None) as home:
            answer = home.generate("Hi", stop="END")
            tokens = [token async for token in answer]
            assert "".join(token.text for token in tokens) == "Grüße " == await answer.text()
            assert [token.token_id for token in tokens] == answer.token_ids == script.tokens[: len(tokens)]
            assert all(a.seconds <= b.seconds for a, b in zip(tokens, tokens[1:], strict=False))
            usage = answer.usage
            assert (usage.num_prompt_tokens, usage.num_tokens, usage.finish_reason) == (2, len(tokens), "stop")
            assert usage.first_token_seconds == tokens[0].seconds > 0
            assert usage.tokens_per_second > 0
            held = home.generate(messages=[{"role": "user", "content": "Hi"}], stop=["ENDE"], max_tokens=11)
            assert await held.text() == "Grüße END"
            last = [token async for token in home.generate(token_ids=[1], stop=("ENDE",), max_tokens=11)][-1]
            assert last[:2] == ("END", None)


@pytest.mark.parametrize(
    ("fields", "message_part"),
    [
        ({"temperature": -1}, "temperature must be a number of at least 0 and at most 100, not -1"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0 and at most 100, not nan"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
        ({"top_k": 1.5}, "top_k must be a whole number of at least 0 and at most 16777216, not 1.5"),
        ({"min_p": 2}, "min_p must be a number of at least 0 and at most 1, not 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0 and below"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1 and at most 16777216, not 0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"timeout_seconds": 1e9}, "timeout_seconds must be a number above 0 and at most 86400"),
        ({"messages": [{"role": "user"}], "prompt": None}, "content"),
        ({"messages": ["hello"], "prompt": None}, "a role and a content"),
        ({"messages": [{"role": "user", "content": "a"}]}, "only one of them"),
        ({"prompt": None}, "only one of them"),
        ({"prompt": None, "token_ids": [1.5]}, "32-bit integers"),
        ({"prompt": None, "token_ids": [1 << 40]}, "32-bit integers"),
        ({"prompt": None, "token_ids": ["a"]}, "32-bit integers"),
    ],
)
async def test_value_out_of_range_is_rejected_before_sending(fields: dict[str, Any], message_part: str) -> None:
    async with AsyncHome(access(), "127.0.0.1:1", None) as home:
        with pytest.raises(errors.BadRequest) as error:
            home.generate(**{"prompt": "a", **fields})
        assert message_part in str(error.value)


async def test_unknown_setting_is_a_type_error() -> None:
    async with AsyncHome(access(), "127.0.0.1:1", None) as home:
        with pytest.raises(TypeError, match="temprature"):
            home.generate("a", **{"temprature": 0.5})  # type: ignore[arg-type]


async def test_leaving_an_answer_ends_it_at_the_coordinator() -> None:
    script = Script(silent_after=9)
    async with coordinator(script) as (_, server):
        async with AsyncHome(access(), f"127.0.0.1:{server.port}", None) as home:
            async with home.generate(token_ids=[1]) as answer:
                async for _ in answer:
                    break
            await until("the end after a context", lambda: script.requests and not script.open_now)
            answer = home.generate(token_ids=[1])
            reading = asyncio.create_task(answer.text())
            await until("the silence", lambda: len(answer.token_ids) == 9)
            await answer.aclose()  # while another task reads it
            await until("the end after closing", lambda: not script.open_now)
            await asyncio.wait({reading})
            reading = asyncio.create_task(home.generate(token_ids=[1]).text())
            await until("another", lambda: script.open_now)
            reading.cancel()
            await until("the end after a cancellation", lambda: not script.open_now)
            async for _ in home.generate(token_ids=[1]):
                break
            gc.collect()
            await until("the end of one that was dropped", lambda: not script.open_now)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 5}], ids=str)
async def test_stream_continues_on_a_coordinator_that_started_again(
    sampling: dict[str, Any], tokenizer: TextTokenizer
) -> None:
    text = "Grüße! one two three END"
    script, model = script_of_text(tokenizer, text)
    script.silent_after = 9
    async with coordinator(script, model) as (_, server):
        port = server.port
        home = AsyncHome(access(), f"127.0.0.1:{port}", None)
        await home.open(5)
        answer = home.generate("Hi", stop="END", **sampling)
        reading = asyncio.create_task(answer.text())
        await until("the first tokens", lambda: len(answer.token_ids) == 9)
        await server.close()
    again, _ = script_of_text(tokenizer, text, at_once=3)
    async with coordinator(again, model, port) as (_, server):
        assert await reading == "Grüße! one two three "
    (first,), (second,) = script.requests, again.requests
    assert second.ids == [*first.ids, *script.tokens[:9]]
    assert (second.asked.first_index, second.asked.sampling) == (9, first.asked.sampling)
    assert sampling.get("seed") in (None, first.asked.sampling.seed)
    usage = answer.usage
    assert (usage.num_prompt_tokens, usage.num_tokens) == (2, len(answer.token_ids))
    assert answer.token_ids == script.tokens[: len(answer.token_ids)]
    assert usage.decode_seconds > 0
    await home.close()


@given(num_received=st.integers(0, 30), at_once=st.integers(1, 4), stop=st.sampled_from(["", "END", "! 🙂", "zz"]))
def test_resumed_answer_repeats_and_omits_nothing(
    num_received: int, at_once: int, stop: str, tokenizer: TextTokenizer
) -> None:
    """The rest of an answer after any number of received tokens."""
    fields: dict[str, Any] = {"stop": (stop,) if stop else ()}
    script, model = script_of_text(tokenizer, "Grüße! 🙂 END more")
    whole = asyncio.run(ask(Host(script), model=model, token_ids=None, prompt="Hi", **fields))
    received = tuple(whole.tokens[:num_received])
    stream, stops = model.tokenizer.stream(script.requests[0].ids), StopTextFilter(fields["stop"])  # type: ignore[union-attr]
    end = model.defaults.stop_ids[0]
    text = "".join(stops.push(stream.push(token)) for token in received if token != end)
    script, _ = script_of_text(tokenizer, "Grüße! 🙂 END more", at_once=at_once)
    rest = asyncio.run(ask(Host(script), model=model, token_ids=None, prompt="Hi", generated=received, **fields))
    assert (*received, *rest.tokens) == tuple(whole.tokens)
    assert text + rest.text == whole.text
    assert (rest.end.num_tokens, rest.end.reason) == (whole.end.num_tokens, whole.end.reason)


@pytest.mark.parametrize("generated", [(VOCAB,), (1,) * POSITIONS])
def test_generated_tokens_are_checked(generated: tuple[int, ...]) -> None:
    with pytest.raises(errors.BadRequest, match="generated"):
        asyncio.run(ask(Host(Script()), generated=generated))


async def test_calls_are_repeated_until_the_deadline() -> None:
    async with coordinator(Script()) as (_, server):
        port = server.port
    home = AsyncHome(access(), f"127.0.0.1:{port}", None)
    fresh = home.generate(token_ids=[1], max_tokens=2, timeout_seconds=WAIT_LIMIT_SECONDS)
    asking = asyncio.create_task(fresh.text())
    await let_tasks_run()
    async with coordinator(Script(silent_after=0), port=port) as (served, _):
        await until("the request", lambda: served.asked)
    async with coordinator(Script(), port=port) as (served, _):
        served.error = errors.NotServing(state="starting again")
        await until("repeats", lambda: served.asked > 2)
        served.error = None
        await asking
        assert fresh.token_ids == expected([1], 2)
        served.error = errors.AppRevoked(app="lamp")
        with pytest.raises(errors.AppRevoked):
            await home.generate(token_ids=[1]).text()
        served.error = errors.NotServing(state="starting again")
        with pytest.raises(errors.NotServing):
            await home.generate(token_ids=[1], timeout_seconds=0.5).text()
    with pytest.raises((errors.Unreachable, errors.ConnectionLost)):
        await home.generate(token_ids=[1], timeout_seconds=0.5).text()
    await home.close()


async def test_client_changes_to_a_coordinator_that_serves() -> None:
    async with coordinator(Script()) as (standby, standby_server):
        standby.error = errors.NotServing(state="standby")
        async with coordinator(Script(silent_after=3)) as (_, leader_server):
            addresses = f"127.0.0.1:1, 127.0.0.1:{standby_server.port},127.0.0.1:{leader_server.port}"
            home = AsyncHome(access(), addresses, None)
            answer = home.generate(token_ids=[1], max_tokens=6, timeout_seconds=WAIT_LIMIT_SECONDS)
            reading = asyncio.create_task(answer.text())
            await until("tokens of the leader", lambda: len(answer.token_ids) == 3)
            await leader_server.close()
        await until("repeats", lambda: standby.asked > 2)
        assert len(answer.token_ids) == 3
        standby.error = None
        await reading
        assert answer.token_ids == expected([1], 6)
        await home.close()


# ---- synchronous client ---------------------------------------------------------------------------------------------


class Background:
    """A coordinator in its own thread."""

    def __init__(self, script: Script, model: TextModel = MODEL) -> None:
        self.script = script
        self.port = 0
        self._model = model
        self._started, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        async with coordinator(self.script, self._model) as (_, server):
            self.port = server.port
            self._started.set()
            while not self._stop.is_set():
                await asyncio.sleep(0.005)

    def __enter__(self) -> Background:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def connect(self) -> Home:
        return connect(f"127.0.0.1:{self.port}", key=KEY)

    def wait_idle(self) -> None:
        wait_for("the end of the sequence", lambda: not self.script.open_now)


def test_answer_is_a_plain_iterator() -> None:
    with Background(Script()) as served, served.connect() as home:
        answer = home.generate(token_ids=[1, 2, 3], max_tokens=5)
        tokens = [token for token in answer]  # noqa: C416 (tests iteration)
        assert isinstance(tokens[0], Token)
        assert [token.token_id for token in tokens] == answer.token_ids == expected((1, 2, 3), 5)
        assert answer.usage.num_tokens == 5
        assert list(answer) == []
        assert home.generate(token_ids=[1], max_tokens=2).text() == ""
        with pytest.raises(errors.ContextTooLong):
            home.generate(token_ids=[1] * 70, max_tokens=2).text()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """The default handler of SIGINT, even if the tests were started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_leaving_a_loop_ends_the_answer() -> None:
    with Background(Script(silent_after=9)) as served, served.connect() as home:
        for _ in home.generate(token_ids=[1]):
            break
        served.wait_idle()
        with home.generate(token_ids=[1]) as answer:
            next(answer)
        served.wait_idle()
        assert list(answer) == []


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_answer_but_not_the_connection() -> None:
    with Background(Script(silent_after=3)) as served, served.connect() as home:
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        tokens = []

        def read() -> None:
            for token in home.generate(token_ids=[1]):
                tokens.append(token)

        with pytest.raises(KeyboardInterrupt):
            read()
        assert len(tokens) == 3
        served.wait_idle()
        assert len(list(home.generate(token_ids=[1], max_tokens=2))) == 2


def test_threads_share_a_client_and_none_hangs_when_it_is_closed() -> None:
    with Background(Script(silent_after=20)) as served, served.connect() as home:
        found: list[Any] = []

        def read(max_tokens: int) -> None:
            try:
                found.append(len(list(home.generate(token_ids=[1], max_tokens=max_tokens))))
            except errors.HearthError as error:
                found.append(error.code)

        threads = [threading.Thread(target=read, args=(count,)) for count in (5, 6, 7, 30, 31)]
        for thread in threads:
            thread.start()
        for thread in threads[:3]:
            thread.join(15)
        assert sorted(found) == [5, 6, 7]
        home.close()
        for thread in threads:
            thread.join(15)
        assert sorted(map(str, found)) == ["5", "6", "7", "ConnectionLost", "ConnectionLost"]
        served.script.silence_ended = True  # the coordinator notices at the next token that its client is gone
        served.wait_idle()


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> str:
    save_credential(tmp_path / "key", KEY)
    return str(tmp_path / "key")


def command(served: Background, key: str, *arguments: str, text: str | None = None, code: int = 0) -> Any:
    result = CliRunner().invoke(
        app, [*arguments, "--address", f"127.0.0.1:{served.port}", "--key", key], input=text, catch_exceptions=False
    )
    assert result.exit_code == code, result.output
    return result


def test_generate_prints_text_and_usage(tokenizer: TextTokenizer, key: str) -> None:
    with Background(*script_of_text(tokenizer, "Grüße! 🙂")) as served:
        result = command(served, key, "generate", "Hi")
        assert result.stdout == "Grüße! 🙂\n"
        assert "2 tokens in, 14 out (stopped); first token after" in " ".join(result.stderr.split())
        assert command(served, key, "generate", "-", "--stop", "!", text="from a pipe").stdout == "Grüße\n"
        found = json.loads(command(served, key, "generate", "Hi", "--json").stdout)
        assert (found["text"], found["usage"]["finish_reason"], len(found["token_ids"])) == ("Grüße! 🙂", "stop", 14)
        refused = command(served, key, "generate", "Hi", "--top-p", "2", code=1)
        assert "top_p must be a number above 0 and at most 1" in " ".join(refused.stderr.split())


def test_generate_reads_and_prints_token_ids(key: str) -> None:
    with Background(Script()) as served:
        result = command(served, key, "generate", "--token-ids", "1, 2,3", "--max-tokens", "4")
        assert [int(text) for text in result.stdout.split()] == expected((1, 2, 3), 4)
        refused = command(served, key, "generate", "Hi", code=1)
        assert "no tokenizer.json" in " ".join(refused.stderr.split())


def test_chat_keeps_its_history_until_reset(tokenizer: TextTokenizer, key: str) -> None:
    script, model = script_of_text(tokenizer, "Yo!")
    with Background(script, model) as served:
        lines = "one\n\n/help\ntwo\n/reset\nthree\n/exit\nfour\n"
        result = command(served, key, "chat", "--system", "Be.", "--max-tokens", "9", text=lines)
        asked = [tokenizer.decode(request.ids) for request in script.requests]
        assert asked == [
            "system:Be.\nuser:one\n",
            "system:Be.\nuser:one\nassistant:Yo!\nuser:two\n",
            "system:Be.\nuser:three\n",
        ]
        assert result.stdout.count("Yo!\n") == 3
        lines = "x" * 100 + "\nshort\n"
        result = command(served, key, "chat", text=lines)  # ends at the end of input, as with Ctrl-D
        assert "prompt tokens and 1 to generate exceed the plan's context" in " ".join(result.stderr.split())
        assert result.stdout.count("Yo!\n") == 1


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_chat_ends_only_the_answer(
    tokenizer: TextTokenizer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, model = script_of_text(tokenizer, "one two")
    script.silent_after = 3
    lines = iter(["a", "b"])

    def read_line() -> str | None:
        line = next(lines, None)
        if line is not None:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return line

    monkeypatch.setattr(generate_command, "_read_line", read_line)
    with Background(script, model) as served:
        result = command(served, key, "chat")
        served.wait_idle()
    assert result.stdout.count("one") == 2
    asked = [tokenizer.decode(request.ids) for request in script.requests]
    assert asked == ["user:a\n", "user:a\nassistant:one\nuser:b\n"]
