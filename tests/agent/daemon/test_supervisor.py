"""The supervisor's side of a worker's private socket."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("psutil")

import zmq
import zmq.asyncio
from support.messages import EXAMPLES

from agent.daemon import supervisor
from agent.daemon.supervisor import WorkerProcess
from agent.daemon.worker_state import WorkerLife
from hearth.errors import (
    DeadlineExceeded,
    StepFailed,
    WorkerDied,
)
from hearth.wire.messages import (
    Abort,
    Cancel,
    Failed,
    GenerateTokens,
    GenerationEnded,
    Message,
    Start,
    TokensGenerated,
    decode,
    encode,
)

REQUEST = GenerateTokens(holder="c", epoch=1, max_tokens=9)
END = GenerationEnded(
    reason="length", num_prompt_tokens=1, num_tokens=2, queued_seconds=0, prefill_seconds=0, decode_seconds=0
)  # fmt: skip


class ScriptedWorker:
    """The other end of a worker's private socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def receive(self) -> tuple[bytes, Message, list[bytes]]:
        request_id, body, *payload = await asyncio.wait_for(self._socket.recv_multipart(), 10)
        return request_id, decode(body), payload

    async def answer(self, request_id: bytes, *messages: Message) -> None:
        for message in messages:
            await self._socket.send_multipart([request_id, encode(message)])


@asynccontextmanager
async def scripted_worker() -> AsyncIterator[tuple[WorkerProcess, ScriptedWorker]]:
    context = zmq.asyncio.Context()
    process = WorkerProcess(context, "kitchen")
    process._life = WorkerLife("ready")
    socket = context.socket(zmq.DEALER)
    socket.bind(process._client.endpoint)
    try:
        yield process, ScriptedWorker(socket)
    finally:
        await process.stop()
        context.destroy(linger=0)


def with_worker(scenario: Callable[[WorkerProcess, ScriptedWorker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with scripted_worker() as (process, worker):
            await asyncio.wait_for(scenario(process, worker), 30)

    asyncio.run(main())


def token(index: int) -> TokensGenerated:
    return TokensGenerated(token_ids=(index,))


async def read(stream: Any) -> list[Message]:
    return [reply.message async for reply in stream]


def test_a_workers_tokens_are_passed_on_up_to_the_end() -> None:
    async def scenario(process: WorkerProcess, worker: ScriptedWorker) -> None:
        one, two = (asyncio.create_task(read(process.stream(REQUEST, [b"ids", name]))) for name in (b"1", b"2"))
        asked = [await worker.receive() for _ in range(2)]
        assert [(message, payload) for _, message, payload in asked] == [
            (REQUEST, [b"ids", b"1"]), (REQUEST, [b"ids", b"2"])
        ]  # fmt: skip
        for index in range(3):
            for request_id, _, [_, name] in asked:
                await worker.answer(request_id, token(10 * int(name) + index))
        await worker.answer(asked[0][0], END)
        await worker.answer(asked[1][0], Failed.of(StepFailed(device="rank 0", reason="aborted")))
        assert await one == [token(10), token(11), token(12), END]
        with pytest.raises(StepFailed):
            await two
        assert not process._client._pending

    with_worker(scenario)


def test_a_stream_that_is_closed_early_is_cancelled_at_the_worker() -> None:
    async def scenario(process: WorkerProcess, worker: ScriptedWorker) -> None:
        stream = process.stream(REQUEST, ())
        async with aclosing(stream):
            first = asyncio.create_task(anext(stream))
            request_id, _, _ = await worker.receive()
            await worker.answer(request_id, token(1), token(2))
            assert (await first).message == token(1)
        _, message, _ = await worker.receive()
        assert message == Cancel(request=request_id)
        await worker.answer(request_id, token(3))  # was on its way
        again = asyncio.create_task(read(process.stream(REQUEST, ())))
        request_id, _, _ = await worker.receive()
        await worker.answer(request_id, END)
        assert await again == [END]

    with_worker(scenario)


@pytest.mark.parametrize("end", ["death", "stop"])
def test_a_worker_that_ends_ends_its_streams(end: str) -> None:
    async def scenario(process: WorkerProcess, worker: ScriptedWorker) -> None:
        reading = asyncio.create_task(read(process.stream(REQUEST, ())))
        request_id, _, _ = await worker.receive()
        await worker.answer(request_id, token(1))
        if end == "death":
            process._fail(WorkerDied(device="kitchen", reason="killed by SIGSEGV"))
        else:
            await process.stop()
        with pytest.raises(WorkerDied):
            await reading
        if end == "death":  # whoever gives up a step learns why
            with pytest.raises(WorkerDied, match="SIGSEGV"):
                await process.abort(Abort(holder="c", epoch=1, reason="rank 0 waits"))

    with_worker(scenario)


def test_only_between_two_tokens_a_worker_may_not_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_TOKEN_SECONDS", 0.2)

    async def scenario(process: WorkerProcess, worker: ScriptedWorker) -> None:
        reading = asyncio.create_task(read(process.stream(REQUEST, ())))
        request_id, _, _ = await worker.receive()
        await asyncio.sleep(0.5)  # others come first
        assert not reading.done()
        await worker.answer(request_id, token(1))
        with pytest.raises(DeadlineExceeded):
            await reading
        _, message, _ = await worker.receive()
        assert message == Cancel(request=request_id)

    with_worker(scenario)


def test_a_worker_that_cannot_even_start_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies before it reads anything: nobody waits until its time to load is over."""
    monkeypatch.setattr(supervisor.sys, "executable", shutil.which("false"))
    start = next(message for message in EXAMPLES if isinstance(message, Start))

    async def main() -> None:
        context = zmq.asyncio.Context()
        process = WorkerProcess(context, "kitchen")
        with pytest.raises(WorkerDied, match="exited with code 1"):
            await asyncio.wait_for(process.start(start), 20)
        assert process.state == "failed"
        await process.stop()
        context.destroy(linger=0)

    asyncio.run(main())
