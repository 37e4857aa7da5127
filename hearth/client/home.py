"""The client library for asyncio programs: `AsyncHome` has one method per operation and sends messages by `hearth.wire.rpc`.

`hearth.client.sync` is the same API for programs without an event loop, `hearth.client.answers` handles generated text and
the arrays of an ONNX graph.

`model` names the deployment, or its model, that a request is for; without it, the oldest one of the request's kind answers.

Every call has a timeout and raises a `HearthError`. All requests are safe to repeat: if the connection breaks or the
coordinator cannot serve, the call is repeated until its timeout, on another coordinator if there is one
(`hearth.client.connection`). A text that has begun to stream continues with the next token.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hearth import errors
from hearth.client import answers
from hearth.client.answers import Arrays, InferenceResult, array_frames, decode_inference
from hearth.client.connection import Connection, error_margin
from hearth.client.events import AsyncEvents
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.disk import on_disk
from hearth.platform.security import Access, Credential, coordinator_access, resolve_credential
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply, RpcClient

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from hearth.plan.plan import Plan

CALL_SECONDS = 10.0  # default timeout of calls that run no model: long for a busy coordinator, short for a waiting user
_OPEN_SECONDS = 330.0  # for a model to be opened: the coordinator may read it for 300 s
_STOP_SECONDS = 120.0  # for running requests to finish, and for workers to end
_READY_POLL_SECONDS = 0.2  # interval of the readiness requests in `wait_ready`: short compared with loading a model
# A call is repeated after pauses that are a fraction of the time since its first refusal, within these limits: short compared
# with the failover to another coordinator, but a coordinator that is gone for longer is not flooded.
_PAUSE_FRACTION = 0.1
_MIN_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 0.5
# Errors after which a call is repeated: the request was not sent, its answer was lost, or the coordinator does not serve now.
_REPEATED = (errors.Unreachable, errors.ConnectionLost, errors.NotServing)

# Longest pause between two messages of the event stream; the coordinator sends one at least every 5 s.
_EVENTS_SILENCE_SECONDS = 20.0
_SEED_BITS = 62  # of the seed of a sampled answer; the protocol's limit is 63

_M = TypeVar("_M", bound=wire.Message)
_R = TypeVar("_R", bound=wire.ClientRequest)


class Result(NamedTuple):
    """`vectors` is float32: [N,H] for texts, [T,H] for tokens. `latency_seconds` excludes the time in the queue."""

    vectors: np.ndarray[Any, Any]
    latency_seconds: float
    num_tokens: int
    traces: tuple[wire.DeviceTrace, ...]


class AsyncHome(AbstractAsyncContextManager["AsyncHome"]):
    """A connection to the home's coordinator, for asyncio programs. Create it with `connect_async`."""

    def __init__(self, access: Access, address: str | None, interfaces: Sequence[str] | None) -> None:
        self._connection = Connection(access, address, interfaces)

    async def open(self, timeout_seconds: float) -> AsyncHome:
        """Find a coordinator, connect, and compare protocol versions.

        Raises NoCoordinator, Unreachable, NotServing, WrongKey, ProtocolMismatch, DeadlineExceeded.
        """
        await self._connection.client(None, timeout_seconds)
        return self

    async def close(self) -> None:
        """Close the connection; calls in progress raise ConnectionLost."""
        await self._connection.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- inference ------------------------------------------------------------------------------------------------

    async def embed(
        self, texts: Sequence[str], timeout_seconds: float = 60.0, *, model: str | None = None
    ) -> np.ndarray[Any, Any]:
        """Return normalised sentence embeddings [N,H], float32.

        Raises TextTooLong, UnknownModel, NotServing, QueueFull, WorkerDied, ...
        """
        return (await self.request_embeddings(texts, timeout_seconds, model=model)).vectors

    async def request_embeddings(
        self, texts: Sequence[str], timeout_seconds: float = 60.0, trace: bool = False, *, model: str | None = None
    ) -> Result:
        """As `embed`, but also returns the latency and, with `trace`, each device's timeline."""
        fields = _request_fields(timeout_seconds, model)
        request = answers.valid(wire.Embed, texts=tuple(texts), **fields, trace=trace)
        return await self._vectors(request, (), timeout_seconds)

    async def hidden_states(
        self,
        token_ids: Sequence[int] | np.ndarray[Any, Any],
        timeout_seconds: float = 60.0,
        *,
        model: str | None = None,
    ) -> np.ndarray[Any, Any]:
        """Return the last hidden states [T,H], float32, of one sequence of T token ids."""
        request = answers.valid(wire.GetHiddenStates, **_request_fields(timeout_seconds, model))
        return (await self._vectors(request, answers.token_frames(token_ids), timeout_seconds)).vectors

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: answers.Chat | None = None,
        token_ids: Sequence[int] | np.ndarray[Any, Any] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, bool | int | float | str] | None = None,
        takes_parts: bool = False,
        schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        logprobs: bool = False,
        top_logprobs: int = 0,
        timeout_seconds: float = 600.0,
        model: str | None = None,
        **sampling: Unpack[wire.SamplingSettings],
    ) -> answers.AsyncGeneration:
        """Continue a prompt, answer a chat, or continue token ids; `async for token in home.generate("Once")`.

        Give exactly one of `prompt`, `messages` and `token_ids`. Settings that are left out come from the model's
        generation_config.json; settings that it lacks default to greedy decoding (temperature 0) and at most 512 tokens.
        `sampling` takes the fields of `SamplingSettings`: temperature, top_k, seed, ...
        `timeout_seconds` bounds the whole answer.

        `tools`, as in OpenAI's API, go to the chat template with `template_options` (such as enable_thinking). With tools or
        `takes_parts`, the reasoning and the calls of tools are parts of the answer's tokens, and not in its text.
        `tool_choice` is "auto", "required" (the answer calls tools), or the name of the tool to call.

        At most one of `schema` (a JSON schema), `regex` and `grammar` (Lark, as llguidance reads it) is what the whole answer
        must match; with tools that are not required, it may call them instead.

        With `logprobs`, tokens have log-probabilities, and those of the `top_logprobs` (at most 20) most likely ones.

        Raises BadRequest at once for a value out of range; while iterating, BadGrammar, ContextTooLong, UnknownModel,
        NotServing, QueueFull, DeadlineExceeded, ConnectionLost, WorkerDied, ...
        """
        if unknown := sampling.keys() - wire.SamplingChoice.model_fields:
            raise TypeError(f"generate() got an unexpected keyword argument '{min(unknown)}'")
        request = answers.valid(
            wire.Generate, prompt=prompt, messages=tuple(answers.chat_message(message) for message in messages or ()),
            sampling=answers.valid(wire.SamplingChoice, **sampling), max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            tools=tuple(json.dumps(tool) for tool in tools), template_options=dict(template_options or {}),
            takes_parts=takes_parts, constraint=answers.constraint(schema, regex, grammar),
            called_tools=answers.called_tools(tool_choice, tools), parallel_calls=parallel_tool_calls,
            top_log_probs=top_logprobs if logprobs or top_logprobs else None,
            **_request_fields(timeout_seconds, model),
        )  # fmt: skip
        if [prompt is not None, bool(messages), token_ids is not None].count(True) != 1:
            raise errors.BadRequest(reason="give a prompt, messages or token_ids, and only one of them")
        payload = answers.token_frames(token_ids) if token_ids is not None else ()
        return answers.AsyncGeneration(self._answer(request, payload, timeout_seconds))

    async def infer(
        self, inputs: Arrays, timeout_seconds: float = 60.0, *, model: str | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Run the served ONNX graph once: inputs by name in, outputs by name out; `model_info` lists both.

        Raises BadRequest that names the input with a wrong name, dtype or shape; NotServing, QueueFull, DeviceLost, ...
        """
        return (await self.request_inference(inputs, timeout_seconds, model=model)).outputs

    async def request_inference(
        self, inputs: Arrays, timeout_seconds: float = 60.0, trace: bool = False, *, model: str | None = None
    ) -> InferenceResult:
        """As `infer`, but also returns the latency and, with `trace`, each device's timeline."""
        request = answers.valid(wire.Infer, names=tuple(inputs), **_request_fields(timeout_seconds, model), trace=trace)
        reply = await self._call(request, array_frames(inputs), timeout_seconds)
        return decode_inference(reply.message, reply.payload)

    async def model_info(self, timeout_seconds: float = CALL_SECONDS, *, model: str | None = None) -> wire.ModelInfo:
        """Return the names, dtypes and shapes of the served graph's inputs and outputs."""
        return await self._ask(wire.GetModelInfo, wire.ModelInfo, timeout_seconds, model)

    async def models(self, timeout_seconds: float = CALL_SECONDS) -> tuple[wire.ServedModel, ...]:
        """List the served models, oldest first. The oldest of each kind answers requests that name no model."""
        return (await self._ask(wire.ListModels, wire.ModelList, timeout_seconds)).models

    async def readiness(self, timeout_seconds: float = CALL_SECONDS, *, model: str | None = None) -> wire.Readiness:
        """Return whether a model is ready, and the state of its deployment; without `model`, of the oldest one."""
        return await self._ask(wire.GetReadiness, wire.Readiness, timeout_seconds, model)

    async def ready(self, timeout_seconds: float = CALL_SECONDS, *, model: str | None = None) -> bool:
        """Return whether the coordinator answers inference requests to a model now."""
        return (await self.readiness(timeout_seconds, model=model)).ready

    async def wait_ready(self, timeout_seconds: float, *, model: str | None = None) -> None:
        """Wait until inference requests to a model are answered. Raises DeadlineExceeded, which names the current state."""
        deadline, state = loop_time() + timeout_seconds, ""
        while loop_time() < deadline:
            try:
                answer = await self.readiness(
                    min(CALL_SECONDS, max(deadline - loop_time(), _READY_POLL_SECONDS)), model=model
                )
                if answer.ready:
                    return
                state = answer.state
            except (*_REPEATED, errors.NoCoordinator, errors.DeadlineExceeded) as error:  # as while it starts again
                state = str(error)
            await asyncio.sleep(_READY_POLL_SECONDS)
        raise errors.DeadlineExceeded(action=f"getting ready ({state})", seconds=timeout_seconds)

    async def keep_loaded(
        self, seconds: float, timeout_seconds: float = CALL_SECONDS, *, model: str | None = None
    ) -> None:
        """Have a model unloaded once it has been idle for `seconds` (below 0: kept loaded), until the next request for it.

        That replaces the time of `hearth serve --keep-alive`; a pinned model stays loaded.
        """
        await self._ask(wire.KeepLoaded, wire.Done, timeout_seconds, model, seconds=max(seconds, -1.0))

    # ---- with an admin key ----------------------------------------------------------------------------------------

    async def devices(self, timeout_seconds: float = CALL_SECONDS) -> wire.DeviceList:
        """List the devices that the coordinator knows, and the links that it has measured (admin key)."""
        return await self._ask(wire.ListDevices, wire.DeviceList, timeout_seconds)

    async def status(self, timeout_seconds: float = CALL_SECONDS, *, model: str | None = None) -> wire.Status:
        """Return the state of a model's deployment: plan, queue, counters, last error (admin key)."""
        return await self._ask(wire.GetStatus, wire.Status, timeout_seconds, model)

    async def serve_model(
        self, goal: str, name: str = "", plan: Plan | None = None, timeout_seconds: float = _OPEN_SECONDS
    ) -> str:
        """Serve one more model, and return its name before it is ready (admin key).

        `goal` is what `hearth serve` makes of its options, as JSON. Raises BadSetting, and as opening the model does.
        """
        answer = await self._ask(wire.ServeModel, wire.ModelChanged, timeout_seconds, goal=goal, name=name, plan=plan)
        return answer.deployment

    async def stop_model(self, name: str, timeout_seconds: float = _STOP_SECONDS) -> str:
        """Stop serving a model; return its name once its running requests have finished (admin key).

        Raises UnknownModel.
        """
        return (await self._ask(wire.StopModel, wire.ModelChanged, timeout_seconds, name=name)).deployment

    def events(
        self, since: str = "", kinds: Sequence[str] = (), follow: bool = True, timeout_seconds: float = 60.0
    ) -> AsyncEvents:
        """Iterate over what the coordinator records; `async for recorded in home.events()` (admin key, or role observer).

        `since`: empty for all events that are kept, "now" for later ones, or the `cursor` of an earlier iterator. `kinds`: of
        `hearth.wire.messages.EVENT_KINDS`; empty for all. Without `follow`, it ends after the events that are there.
        `timeout_seconds` bounds the time without a coordinator; it goes on with the one that leads then.
        """
        request = answers.valid(
            wire.WatchEvents, since=since, kinds=tuple(kinds), follow=follow, **_request_fields(timeout_seconds)
        )
        return AsyncEvents(self._watch(request, timeout_seconds))

    async def metrics(self, timeout_seconds: float = CALL_SECONDS) -> str:
        """Return all metrics in Prometheus's text format (admin key, or an app's with the role metrics or observer)."""
        reply = await self._call(wire.GetMetrics(**_request_fields(timeout_seconds)), (), timeout_seconds)
        wire.expect_message(reply.message, wire.Metrics, "the coordinator")
        return bytes(reply.payload[0]).decode() if reply.payload else ""

    async def add_app(
        self, name: str, public_key: str, timeout_seconds: float = CALL_SECONDS, role: wire.AppRole = "app"
    ) -> str:
        """Authorise an app's public key (Z85) to request inference, or as its role says (admin key).

        Returns why this may be lost, empty if it lasts; so do the other changes of keys. Then repeat it later.
        """
        return await self._ask_change(wire.AddApp, timeout_seconds, name=name, public_key=public_key, role=role)

    async def revoke_app(self, name: str, timeout_seconds: float = CALL_SECONDS) -> str:
        """Revoke an app's key; its next request is refused (admin key)."""
        return await self._ask_change(wire.RevokeApp, timeout_seconds, name=name)

    async def add_device(self, name: str, public_key: str, timeout_seconds: float = CALL_SECONDS) -> str:
        """Admit an agent by the public key (Z85) of its device key (admin key)."""
        return await self._ask_change(wire.AddDevice, timeout_seconds, name=name, public_key=public_key)

    async def revoke_device(self, name: str, timeout_seconds: float = CALL_SECONDS) -> str:
        """Shut out the agent with this key, at once (admin key)."""
        return await self._ask_change(wire.RevokeDevice, timeout_seconds, name=name)

    async def apps(self, timeout_seconds: float = CALL_SECONDS) -> wire.AppList:
        """List the admitted and the revoked apps (admin key)."""
        return await self._ask(wire.ListApps, wire.AppList, timeout_seconds)

    # ---- inside ---------------------------------------------------------------------------------------------------

    async def _vectors(self, request: wire.ClientRequest, payload: Sequence[Any], timeout_seconds: float) -> Result:
        from hearth.wire.framing import unpack_array

        reply = await self._call(request, payload, timeout_seconds)
        answer = wire.expect_message(reply.message, wire.Vectors, "the coordinator")
        return Result(unpack_array(reply.payload), answer.latency_seconds, answer.num_tokens, answer.traces)

    async def _ask_change(self, request: type[wire.ClientRequest], timeout_seconds: float, **fields: str) -> str:
        return (await self._ask(request, wire.KeysChanged, timeout_seconds, **fields)).warning

    async def _ask(
        self,
        request: type[wire.ClientRequest],
        answer: type[_M],
        timeout_seconds: float,
        model: str | None = None,
        **fields: Any,
    ) -> _M:
        reply = await self._call(request(**_request_fields(timeout_seconds, model), **fields), (), timeout_seconds)
        return wire.expect_message(reply.message, answer, "the coordinator")

    async def _call(self, request: wire.ClientRequest, payload: Sequence[Any], timeout_seconds: float) -> Reply:
        repeats = _Repeats(timeout_seconds, self._connection)
        while True:
            try:
                client = await repeats.client()
                return await client.call(repeats.adjusted(request), payload, timeout_seconds=repeats.remaining_seconds)
            except (*_REPEATED, errors.WrongKey) as error:
                await repeats.pause(error)

    async def _answer(
        self, request: wire.Generate, payload: Sequence[Any], timeout_seconds: float
    ) -> AsyncGenerator[answers.Token | answers.Usage, None]:
        """Stream one answer. If it breaks off, ask for the rest of it: the seed makes the tokens the same."""
        if request.sampling.seed is None:
            sampling = request.sampling.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})
            request = request.model_copy(update={"sampling": sampling})
        repeats, began = _Repeats(timeout_seconds, self._connection), loop_time()
        received: list[int] = []
        first_seconds = last_seconds = 0.0  # when the first and the newest token came
        resumed = False
        while True:
            try:
                client = await repeats.client()
                asked = repeats.adjusted(request).model_copy(update={"generated": tuple(received)})
                seconds_left = repeats.remaining_seconds
                stream = client.stream(
                    asked, payload, timeout_seconds=seconds_left, total_seconds=seconds_left, last=wire.TextEnded
                )
                async with aclosing(stream) as replies:
                    async for reply in replies:
                        seconds = loop_time() - began
                        if isinstance(reply.message, wire.TextGenerated):
                            first_seconds, last_seconds = seconds if not received else first_seconds, seconds
                            received.extend(reply.message.token_ids)
                            repeats.restart()
                        for part in answers.stream_parts(reply.message, seconds, first_seconds):
                            if resumed and isinstance(part, answers.Usage):  # the coordinator saw only the rest
                                part = part._replace(decode_seconds=last_seconds - first_seconds)
                            yield part
                return
            except (*_REPEATED, errors.WrongKey) as error:
                await repeats.pause(error)
                resumed = bool(received)

    async def _watch(
        self, request: wire.WatchEvents, timeout_seconds: float
    ) -> AsyncGenerator[wire.EventsRecorded, None]:
        """Stream the events; after a loss of the connection, go on after those that have arrived."""
        repeats, cursor = _Repeats(timeout_seconds, self._connection), request.since
        while True:
            try:
                client = await repeats.client()
                asked = repeats.adjusted(request).model_copy(update={"since": cursor})
                stream = client.stream(asked, timeout_seconds=_EVENTS_SILENCE_SECONDS, last=wire.Done)
                async with aclosing(stream) as replies:
                    async for reply in replies:
                        if isinstance(reply.message, wire.Done):
                            return
                        batch = wire.expect_message(reply.message, wire.EventsRecorded, "the coordinator")
                        cursor = batch.cursor
                        repeats.restart(timeout_seconds)
                        yield batch
            except (*_REPEATED, errors.WrongKey, errors.DeadlineExceeded) as error:  # the latter: it is silent
                await repeats.pause(error)


class _Repeats:
    """The attempts of one call: its deadline, the pauses between attempts, and when to give up."""

    def __init__(self, timeout_seconds: float, connection: Connection) -> None:
        self._client: RpcClient | None = None  # of this attempt; None: there was no connection
        self._failed: RpcClient | None = None  # of the last one
        self._repeated = False
        self._connection = connection
        self._deadline = loop_time() + timeout_seconds
        self._margin_seconds = error_margin(timeout_seconds)
        self._refused_at: float | None = None  # first, since the last progress

    @property
    def remaining_seconds(self) -> float:
        return max(self._deadline - loop_time(), 0.001)

    def adjusted(self, request: _R) -> _R:
        """The request with the time that is left to the coordinator."""
        if not self._repeated:
            return request
        return request.model_copy(update={"timeout_seconds": _server_seconds(self.remaining_seconds)})

    async def client(self) -> RpcClient:
        """The connection for the next attempt. Raises as `Connection.client`."""
        self._client = None
        self._client = await self._connection.client(self._failed, self.remaining_seconds)
        return self._client

    def restart(self, timeout_seconds: float | None = None) -> None:
        """Begin with the shortest pause again, because the last attempt made progress; with a deadline, also with that."""
        self._refused_at = None
        if timeout_seconds is not None:
            self._deadline = loop_time() + timeout_seconds

    async def pause(self, error: errors.HearthError) -> None:
        """Wait before the next attempt. Raises the error if there is no time for one.

        After a refusal of the key, another coordinator is tried once: a standby that has lost its disk knows no app.
        """
        if isinstance(error, errors.WrongKey) and self._client in (None, self._failed):
            raise error
        now = loop_time()
        self._refused_at = now if self._refused_at is None else self._refused_at
        seconds = min(max(_PAUSE_FRACTION * (now - self._refused_at), _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
        if self._connection.closed or self.remaining_seconds <= seconds + self._margin_seconds:
            raise error
        self._failed, self._repeated = self._client, True
        await asyncio.sleep(seconds)


def _request_fields(timeout_seconds: float, model: str | None = None) -> dict[str, Any]:
    """The common fields of one request: a unique id, its timeout, and the model that it names.

    The timeout sent is shorter than the caller's, so that the coordinator's error, which says why the request is late, arrives
    in time.
    """
    named = {} if model is None else {"deployment": model}  # requests that concern no model have no such field
    return {"request_id": secrets.token_hex(8), "timeout_seconds": _server_seconds(timeout_seconds), **named}


def _server_seconds(timeout_seconds: float) -> float:
    return max(timeout_seconds - error_margin(timeout_seconds), 1e-3)


async def connect_async(
    address: str | None = None,
    key: str | Path | Credential | None = None,
    timeout_seconds: float = 10.0,
    interfaces: Sequence[str] | None = None,
) -> AsyncHome:
    """As `hearth.connect`, for asyncio programs: `async with await hearth.connect_async() as home: ...`."""
    credential = await on_disk(Path("the key file"), timeout_seconds, resolve_credential, key)
    home = AsyncHome(coordinator_access(credential), address, interfaces)
    try:
        return await home.open(timeout_seconds)
    except errors.HearthError:
        await home.close()
        raise
