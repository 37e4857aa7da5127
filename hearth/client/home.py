"""The client library for asyncio programs: `AsyncHome` has one method per operation and sends messages by `hearth.wire.rpc`.

`hearth.client.sync` is the same API for programs without an event loop, `hearth.client.answers` handles generated text, and
`hearth.client.arrays` the arrays of an ONNX graph.

Every call has a timeout and raises a `HearthError`. The client reconnects automatically after a lost connection; if it found
the coordinator by mDNS, it searches again, because the address may have changed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import zmq.asyncio

from hearth.client import answers
from hearth.client.arrays import Arrays, InferenceResult, array_frames, decode_inference
from hearth.errors import BadRequest, ConnectionLost, DeadlineExceeded, HearthError, NoCoordinator, Unreachable
from hearth.platform.asyncio_tools import with_timeout
from hearth.platform.security import Access, Credential, coordinator_access, fingerprint, resolve_credential
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply, RpcClient

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

COORDINATOR_PORT = 47830  # default TCP port of a coordinator: the first after an agent's ports, 47800 to 47829
CALL_SECONDS = 10.0  # default timeout of calls that run no model: long for a busy coordinator, short for a waiting user
_READY_POLL_SECONDS = 0.2  # interval of the readiness requests in `wait_ready`: short compared with loading a model

_M = TypeVar("_M", bound=wire.Message)


class Result(NamedTuple):
    """`vectors` is float32: [N,H] for texts, [T,H] for tokens. `latency_seconds` excludes the time in the queue."""

    vectors: np.ndarray[Any, Any]
    latency_seconds: float
    num_tokens: int
    traces: tuple[wire.DeviceTrace, ...]


class AsyncHome(AbstractAsyncContextManager["AsyncHome"]):
    """A connection to the home's coordinator, for asyncio programs. Create it with `connect_async`."""

    def __init__(self, access: Access, address: str | None, interfaces: Sequence[str] | None) -> None:
        self._access = access
        self._address = address
        self._interfaces = interfaces
        self._context = zmq.asyncio.Context()
        self._client: RpcClient | None = None
        self._reopening = asyncio.Lock()
        self._closed = False

    async def open(self, timeout_seconds: float) -> AsyncHome:
        """Find the coordinator, connect, and compare protocol versions.

        Raises NoCoordinator, Unreachable, WrongKey, ProtocolMismatch, DeadlineExceeded.
        """
        endpoint = await self._find(timeout_seconds)
        await self._close_client()
        self._client = RpcClient(self._context, endpoint, self._access, name="client")
        await self._client.hello(wire.CoordinatorWelcome, timeout_seconds=timeout_seconds)
        return self

    async def close(self) -> None:
        """Close the connection; calls in progress raise ConnectionLost."""
        self._closed = True
        await self._close_client()
        self._context.destroy(linger=0)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- inference ------------------------------------------------------------------------------------------------

    async def embed(self, texts: Sequence[str], timeout_seconds: float = 60.0) -> np.ndarray[Any, Any]:
        """Return normalised sentence embeddings [N,H], float32.

        Raises TextTooLong, NotServing, QueueFull, WorkerDied, ...
        """
        return (await self.request_embeddings(texts, timeout_seconds)).vectors

    async def request_embeddings(
        self, texts: Sequence[str], timeout_seconds: float = 60.0, trace: bool = False
    ) -> Result:
        """As `embed`, but also returns the latency and, with `trace`, each device's timeline."""
        request = answers.valid(wire.Embed, texts=tuple(texts), **_request_fields(timeout_seconds), trace=trace)
        return await self._vectors(request, (), timeout_seconds)

    async def hidden_states(
        self, token_ids: Sequence[int] | np.ndarray[Any, Any], timeout_seconds: float = 60.0
    ) -> np.ndarray[Any, Any]:
        """Return the last hidden states [T,H], float32, of one sequence of T token ids."""
        request = answers.valid(wire.GetHiddenStates, **_request_fields(timeout_seconds))
        return (await self._vectors(request, answers.token_frames(token_ids), timeout_seconds)).vectors

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: answers.Chat | None = None,
        token_ids: Sequence[int] | np.ndarray[Any, Any] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        timeout_seconds: float = 600.0,
        **sampling: Unpack[answers.SamplingSettings],
    ) -> answers.AsyncGeneration:
        """Continue a prompt, answer a chat, or continue token ids; `async for token in home.generate("Once")`.

        Give exactly one of `prompt`, `messages` and `token_ids`. Settings that are left out come from the model's
        generation_config.json; settings that it lacks default to greedy decoding (temperature 0) and at most 512 tokens.
        `sampling` takes temperature, top_k, top_p, min_p, repetition_penalty and seed. `timeout_seconds` bounds the whole
        answer.

        Raises BadRequest at once for a value out of range; while iterating, ContextTooLong, NotServing, QueueFull,
        DeadlineExceeded, ConnectionLost, WorkerDied, ...
        """
        if unknown := sampling.keys() - wire.SamplingChoice.model_fields:
            raise TypeError(f"generate() got an unexpected keyword argument '{min(unknown)}'")
        request = answers.valid(
            wire.Generate, prompt=prompt, messages=tuple(answers.chat_message(message) for message in messages or ()),
            sampling=answers.valid(wire.SamplingChoice, **sampling), max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            **_request_fields(timeout_seconds),
        )  # fmt: skip
        if [prompt is not None, bool(messages), token_ids is not None].count(True) != 1:
            raise BadRequest(reason="give a prompt, messages or token_ids, and only one of them")
        payload = answers.token_frames(token_ids) if token_ids is not None else ()
        return answers.AsyncGeneration(self._answer(request, payload, timeout_seconds))

    async def infer(self, inputs: Arrays, timeout_seconds: float = 60.0) -> dict[str, np.ndarray[Any, Any]]:
        """Run the served ONNX graph once: inputs by name in, outputs by name out; `model_info` lists both.

        Raises BadRequest that names the input with a wrong name, dtype or shape; NotServing, QueueFull, DeviceLost, ...
        """
        return (await self.request_inference(inputs, timeout_seconds)).outputs

    async def request_inference(
        self, inputs: Arrays, timeout_seconds: float = 60.0, trace: bool = False
    ) -> InferenceResult:
        """As `infer`, but also returns the latency and, with `trace`, each device's timeline."""
        request = answers.valid(wire.Infer, names=tuple(inputs), **_request_fields(timeout_seconds), trace=trace)
        reply = await self._call(request, array_frames(inputs), timeout_seconds)
        return decode_inference(reply.message, reply.payload)

    async def model_info(self, timeout_seconds: float = CALL_SECONDS) -> wire.ModelInfo:
        """Return the names, dtypes and shapes of the served graph's inputs and outputs."""
        return await self._ask(wire.GetModelInfo, wire.ModelInfo, timeout_seconds)

    async def readiness(self, timeout_seconds: float = CALL_SECONDS) -> wire.Readiness:
        """Return whether a model is ready, which one, and the state of the deployment."""
        return await self._ask(wire.GetReadiness, wire.Readiness, timeout_seconds)

    async def ready(self, timeout_seconds: float = CALL_SECONDS) -> bool:
        """Return whether the coordinator answers inference requests now."""
        return (await self.readiness(timeout_seconds)).ready

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Wait until inference requests are answered. Raises DeadlineExceeded, which names the current state."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while not (state := await self.readiness()).ready:
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineExceeded(action=f"getting ready ({state.state})", seconds=timeout_seconds)
            await asyncio.sleep(_READY_POLL_SECONDS)

    # ---- with an admin key ----------------------------------------------------------------------------------------

    async def devices(self, timeout_seconds: float = CALL_SECONDS) -> wire.DeviceList:
        """List the devices that the coordinator knows, and the links that it has measured (admin key)."""
        return await self._ask(wire.ListDevices, wire.DeviceList, timeout_seconds)

    async def status(self, timeout_seconds: float = CALL_SECONDS) -> wire.Status:
        """Return the coordinator's state: model, plan, queue, counters, last error (admin key)."""
        return await self._ask(wire.GetStatus, wire.Status, timeout_seconds)

    async def add_app(self, name: str, public_key: str, timeout_seconds: float = CALL_SECONDS) -> None:
        """Authorise an app's public key (Z85) to request inference (admin key)."""
        await self._ask(wire.AddApp, wire.Done, timeout_seconds, name=name, public_key=public_key)

    async def revoke_app(self, name: str, timeout_seconds: float = CALL_SECONDS) -> None:
        """Revoke an app's key; its next request is refused (admin key)."""
        await self._ask(wire.RevokeApp, wire.Done, timeout_seconds, name=name)

    async def add_device(self, name: str, public_key: str, timeout_seconds: float = CALL_SECONDS) -> None:
        """Admit an agent by the public key (Z85) of its device key (admin key)."""
        await self._ask(wire.AddDevice, wire.Done, timeout_seconds, name=name, public_key=public_key)

    async def revoke_device(self, name: str, timeout_seconds: float = CALL_SECONDS) -> None:
        """Shut out the agent with this key, at once (admin key)."""
        await self._ask(wire.RevokeDevice, wire.Done, timeout_seconds, name=name)

    async def apps(self, timeout_seconds: float = CALL_SECONDS) -> wire.AppList:
        """List the admitted and the revoked apps (admin key)."""
        return await self._ask(wire.ListApps, wire.AppList, timeout_seconds)

    # ---- inside ---------------------------------------------------------------------------------------------------

    async def _vectors(self, request: wire.Message, payload: Sequence[Any], timeout_seconds: float) -> Result:
        from hearth.wire.framing import unpack_array

        reply = await self._call(request, payload, timeout_seconds)
        answer = wire.expect_message(reply.message, wire.Vectors, "the coordinator")
        return Result(unpack_array(reply.payload), answer.latency_seconds, answer.num_tokens, answer.traces)

    async def _ask(self, request: type[wire.Message], answer: type[_M], timeout_seconds: float, **fields: str) -> _M:
        reply = await self._call(request(**_request_fields(timeout_seconds), **fields), (), timeout_seconds)
        return wire.expect_message(reply.message, answer, "the coordinator")

    async def _call(self, request: wire.Message, payload: Sequence[Any], timeout_seconds: float) -> Reply:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        client = await self._connected(None, timeout_seconds)
        try:
            return await client.call(request, payload, timeout_seconds=deadline - loop.time())
        except (Unreachable, ConnectionLost):
            # All requests are idempotent, so sending one again is safe.
            if self._closed or (remaining := deadline - loop.time()) <= 0.1:
                raise
            client = await self._connected(client, remaining)
            return await client.call(request, payload, timeout_seconds=max(deadline - loop.time(), 0.1))

    async def _answer(
        self, request: wire.Generate, payload: Sequence[Any], timeout_seconds: float
    ) -> AsyncGenerator[answers.Token | answers.Usage, None]:
        """Stream one answer.

        If the connection breaks before the first message, the request is sent again, once; later, the error is raised.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        failed: RpcClient | None = None
        while True:
            client = await self._connected(failed, deadline - loop.time())
            sent, first_token_seconds = loop.time(), None
            stream = client.stream(request, payload, timeout_seconds=max(deadline - sent, 0.1), last=wire.TextEnded)
            try:
                async with aclosing(stream) as replies:
                    async for reply in replies:
                        seconds = loop.time() - sent
                        first_token_seconds = first_token_seconds if first_token_seconds is not None else seconds
                        for part in answers.stream_parts(reply.message, seconds, first_token_seconds):
                            yield part
                return
            except (Unreachable, ConnectionLost):
                if failed or self._closed or first_token_seconds is not None or deadline - loop.time() <= 0.1:
                    raise
                failed = client

    async def _connected(self, failed: RpcClient | None, timeout_seconds: float) -> RpcClient:
        """Return the connection. If it is `failed` and the coordinator was found by mDNS, search for it and connect again."""

        def usable_client() -> RpcClient | None:
            return None if self._client is failed and self._address is None else self._client

        async def find() -> RpcClient:
            async with self._reopening:  # other callers that wait here use the connection that the first one opened
                if usable_client() is None:
                    await self.open(timeout_seconds)
                assert self._client is not None
                return self._client

        if (client := usable_client()) is not None:
            return client
        try:
            return await with_timeout(timeout_seconds + 1.0, find())  # 1 s later than `open`, whose error says more
        except asyncio.TimeoutError:
            raise NoCoordinator(seconds=timeout_seconds) from None

    async def _find(self, timeout_seconds: float) -> str:
        if self._address is not None:
            return endpoint_of(self._address)
        from hearth.platform.discovery import find_coordinator

        service = await find_coordinator(fingerprint(self._access.server_public), timeout_seconds, self._interfaces)
        if service is None:
            raise NoCoordinator(seconds=timeout_seconds)
        return f"tcp://{service.hosts[0]}:{service.port}"

    async def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _request_fields(timeout_seconds: float) -> dict[str, Any]:
    """The common fields of one request: a unique id and its timeout.

    The timeout sent is 10 % (at most 1 s) shorter than the caller's, so that the coordinator's error, which says why the
    request is late, arrives in time.
    """
    return {
        "request_id": secrets.token_hex(8),
        "timeout_seconds": max(timeout_seconds - min(0.1 * timeout_seconds, 1.0), 1e-3),
    }


def endpoint_of(address: str) -> str:
    """Convert `host`, `host:port` or `[v6]:port` to a ZeroMQ endpoint. The default port is the coordinator's."""
    from hearth.platform.discovery import parse_static_peers

    ((host, port),) = parse_static_peers(address, default_port=COORDINATOR_PORT)
    return f"tcp://{host}:{port}"


async def connect_async(
    address: str | None = None,
    key: str | Path | Credential | None = None,
    timeout_seconds: float = 10.0,
    interfaces: Sequence[str] | None = None,
) -> AsyncHome:
    """As `hearth.connect`, for asyncio programs: `async with await hearth.connect_async() as home: ...`."""
    home = AsyncHome(coordinator_access(resolve_credential(key)), address, interfaces)
    try:
        return await home.open(timeout_seconds)
    except HearthError:
        await home.close()
        raise
