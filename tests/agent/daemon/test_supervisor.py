"""The supervisor's end of a worker's private socket."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")

import psutil
import zmq
import zmq.asyncio
from support.contexts import zmq_context
from support.messages import EXAMPLES
from support.waiting import let_tasks_run, until

from agent.daemon import supervisor
from agent.daemon.spawner import Spawner
from agent.daemon.supervisor import WorkerProcess
from hearth import errors
from hearth.files import file_beside
from hearth.wire import messages as wire

REQUEST = wire.GenerateTokens(holder="c", epoch=1, max_tokens=9)
END = wire.GenerationEnded(
    reason="length", num_prompt_tokens=1, num_tokens=2, queued_seconds=0, prefill_seconds=0, decode_seconds=0
)  # fmt: skip


class ScriptedWorker:
    """The worker's end of its private socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._signs: asyncio.Task[None] | None = None
        self.progress = wire.WorkerProgress()

    async def receive(self) -> tuple[bytes, wire.Message, list[bytes]]:
        """The next request. Signs of life are sent from the moment at which the daemon asks for them."""
        while True:
            request_id, body, *payload = await asyncio.wait_for(self._socket.recv_multipart(), 10)
            message = wire.decode(body)
            if not isinstance(message, wire.ReportProgress):
                return request_id, message, payload
            self._signs = asyncio.create_task(self._give_signs(request_id, message.interval_seconds))

    async def _give_signs(self, request_id: bytes, interval: float) -> None:
        while True:
            await self.answer(request_id, self.progress)
            await asyncio.sleep(interval)

    def fall_silent(self) -> None:
        self._signs.cancel()

    async def answer(self, request_id: bytes, *messages: wire.Message) -> None:
        for message in messages:
            await self._socket.send_multipart([request_id, wire.encode(message)])


NEVER_FORK = Spawner("off", lambda num_bytes: True)
EXAMPLE = next(message for message in EXAMPLES if isinstance(message, wire.Start))
START = EXAMPLE.model_copy(update={"store_path": "/dev/null/store", "scratch_path": ""})  # a disk that takes nothing
BOUND = wire.WorkerBound(port=1, public_key="0" * 40, num_bytes_loaded=0)
Running = tuple[WorkerProcess, ScriptedWorker]


def run_instead(folder: Path, argument: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program in place of Python that writes one of its arguments to a file, and sleeps.

    It is called as `program -m agent.worker.main ENDPOINT REQUEST`.
    """
    program, part = folder / "program", folder / "part"
    program.write_text(f'#!/bin/sh\nprintf %s "${argument}" > {part} && mv {part} {file}\nexec sleep 600\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.fixture
@asynccontextmanager
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """A worker process in state ready. The process only writes its endpoint to a file; the test answers there."""
    endpoint = tmp_path / "endpoint"
    run_instead(tmp_path, 3, endpoint, monkeypatch)
    with zmq_context() as context:
        process = WorkerProcess(context, "kitchen", NEVER_FORK)
        try:
            starting = asyncio.create_task(process.start(START))
            await until("the process", endpoint.exists)
            socket = context.socket(zmq.DEALER)
            socket.bind(endpoint.read_text())
            worker = ScriptedWorker(socket)
            request_id, message, _ = await worker.receive()
            assert message == START
            await worker.answer(request_id, BOUND)
            await starting
            connecting = asyncio.create_task(process.connect(wire.ConnectPeers(holder="c", epoch=1, peers=())))
            await worker.answer((await worker.receive())[0], wire.Done())
            await connecting
            assert process.state == "ready"
            yield process, worker
        finally:
            await process.stop()


def token(index: int) -> wire.TokensGenerated:
    return wire.TokensGenerated(token_ids=(index,))


async def read(stream: Any) -> list[wire.Message]:
    return [reply.message async for reply in stream]


async def test_streamed_tokens_are_forwarded_up_to_the_last_message(running: Running) -> None:
    process, worker = running
    one, two = (asyncio.create_task(read(process.stream(REQUEST, [b"ids", name]))) for name in (b"1", b"2"))
    asked = [await worker.receive() for _ in range(2)]
    assert [(message, payload) for _, message, payload in asked] == [
        (REQUEST, [b"ids", b"1"]), (REQUEST, [b"ids", b"2"])
    ]  # fmt: skip
    for index in range(3):
        for request_id, _, [_, name] in asked:
            await worker.answer(request_id, token(10 * int(name) + index))
    await worker.answer(asked[0][0], END)
    await worker.answer(asked[1][0], wire.Failed.of(errors.StepFailed(device="rank 0", reason="aborted")))
    assert await one == [token(10), token(11), token(12), END]
    with pytest.raises(errors.StepFailed):
        await two


async def test_closing_a_stream_early_cancels_the_request(running: Running) -> None:
    process, worker = running
    stream = process.stream(REQUEST, ())
    async with aclosing(stream):
        first = asyncio.create_task(anext(stream))
        request_id, _, _ = await worker.receive()
        await worker.answer(request_id, token(1), token(2))
        assert (await first).message == token(1)
    _, message, _ = await worker.receive()
    assert message == wire.Cancel(request=request_id)
    await worker.answer(request_id, token(3))  # sent before the cancel arrived
    again = asyncio.create_task(read(process.stream(REQUEST, ())))
    request_id, _, _ = await worker.receive()
    await worker.answer(request_id, END)
    assert await again == [END]


@pytest.mark.parametrize("end", ["death", "stop"])
async def test_worker_exit_ends_its_streams(end: str, running: Running) -> None:
    process, worker = running
    reading = asyncio.create_task(read(process.stream(REQUEST, ())))
    request_id, _, _ = await worker.receive()
    await worker.answer(request_id, token(1))
    if end == "death":
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSEGV)
    else:
        await process.stop()
    with pytest.raises(errors.WorkerDied):
        await reading
    if end == "death":  # the cause of death is in the error
        with pytest.raises(errors.WorkerDied, match="SIGSEGV"):
            await process.abort(wire.Abort(holder="c", epoch=1, reason="rank 0 waits"))


@pytest.mark.parametrize("when", ["in a stream", "between two requests"])
async def test_stopped_worker_is_killed_and_its_calls_fail(when: str, running: Running) -> None:
    """A process that is stopped by SIGSTOP ends no connection and no wait; only its silence shows it."""
    process, worker = running
    assert process.pid is not None
    reading = None
    if when == "in a stream":
        reading = asyncio.create_task(read(process.stream(REQUEST, ())))
        await worker.answer((await worker.receive())[0], token(1))
    began = asyncio.get_running_loop().time()
    os.kill(process.pid, signal.SIGSTOP)
    worker.fall_silent()
    await until("the verdict", lambda: process.state == "failed")
    assert asyncio.get_running_loop().time() - began < 10  # not one of the timeouts of requests
    assert isinstance(process.failure, errors.WorkerDied)
    assert "stopped by a signal" in process.failure.reason
    if reading is not None:
        with pytest.raises(errors.WorkerDied, match="no sign of life"):
            await reading
    with pytest.raises(errors.WorkerDied, match="no sign of life"):
        await process.abort(wire.Abort(holder="c", epoch=1, reason="rank 0 waits"))
    await until("the end of the process", lambda: not Path(f"/proc/{process.pid}/exe").exists())
    status = process.status("default")
    assert status.state == "failed"
    assert "no sign of life" in status.failure


async def test_load_that_is_given_up_leaves_the_process_to_the_next_plan(running: Running) -> None:
    def start(epoch: int, **changes: Any) -> wire.Start:
        plan = START.load.plan.model_copy(update={"epoch": epoch})
        return START.model_copy(update={"load": START.load.model_copy(update={"plan": plan}), **changes})

    process, worker = running
    pid = process.pid
    assert not process.give_up_load(start(3))  # it loads nothing
    older, newer = asyncio.create_task(process.reload(start(2), 30.0)), start(3)
    older_id, message, _ = await worker.receive()
    assert message == start(2)
    assert not process.can_reload(newer)
    assert not process.give_up_load(start(3, num_threads=START.num_threads + 1))  # a process keeps its threads
    for ports, can_go_on in ((((1, 5), (7, 9)), True), (((1, 5),), True), (((1, 5), (6, 9)), False), ((), False)):
        limited = START.load.model_copy(update={"data_ports": ((1, 5), (7, 9))})
        wanted = START.load.model_copy(update={"data_ports": ports})
        before, after = (START.model_copy(update={"load": load}) for load in (limited, wanted))
        assert supervisor._fits(before, after) is can_go_on  # it cannot connect to further ports
        assert supervisor._fits(START, after)
    assert process.give_up_load(newer)
    with pytest.raises(errors.StepFailed, match="replaced"):
        await older
    assert (await worker.receive())[1] == wire.Cancel(request=older_id, final=True)
    assert process.can_reload(newer)
    loading = asyncio.create_task(process.reload(newer, 30.0))
    await worker.answer((await worker.receive())[0], BOUND)
    await loading
    assert (process.state, process.epoch, process.pid) == ("bound", 3, pid)


async def test_process_that_does_not_take_the_next_plan_in_time_is_of_no_use(running: Running) -> None:
    process, _ = running
    with pytest.raises(errors.DeadlineExceeded):
        await process.reload(START, 0.05)
    await until("its end by the signal, for which it has no handler", lambda: process.state == "failed")
    assert "SIGUSR1" in process.status("default").failure


async def test_status_names_the_step_that_the_worker_computes(running: Running) -> None:
    process, worker = running
    worker.progress = wire.WorkerProgress(step=3, step_seconds=2.0, busy_seconds=1.0, limit_seconds=15.0)
    await until("the step", lambda: process.status("default").step == 3)
    assert process.status("default").step_seconds == 2.0
    worker.progress = wire.WorkerProgress(step=3, step_seconds=16.0, busy_seconds=15.0, limit_seconds=15.0)
    await until("the verdict", lambda: process.state == "failed")
    assert "computed step 3" in process.status("default").failure


async def test_status_says_what_was_sent_to_each_other_device_in_this_plan(running: Running) -> None:
    process, worker = running
    ids = [device.device_id for device in START.load.plan.devices]
    own = START.load.rank
    sent = tuple(1000 + rank for rank in range(len(ids)))
    worker.progress = wire.WorkerProgress(sent_bytes=sent)
    expected = {each: sent[rank] for rank, each in enumerate(ids) if rank != own}
    assert expected
    await until("the count", lambda: process.status("default").sent_bytes == expected)
    reloading = asyncio.create_task(process.reload(START, 30.0))
    await worker.answer((await worker.receive())[0], BOUND)
    await reloading
    assert process.status("default").sent_bytes == {}
    worker.progress = wire.WorkerProgress()
    connect = wire.ConnectPeers(holder="c", epoch=process.epoch, peers=())
    connecting = asyncio.create_task(process.connect(connect))
    await worker.answer((await worker.receive())[0], wire.Done())
    await connecting
    assert process.state == "ready"
    assert process.status("default").sent_bytes == {}  # the last count was that of the plan before


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 8, 13])
def test_stop_while_the_process_is_being_started_leaves_no_process(
    num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stop` comes after a few turns of the event loop: before, during and after the creation of the process."""

    async def main() -> None:
        with zmq_context() as context:
            process = WorkerProcess(context, "kitchen", NEVER_FORK)
            starting = asyncio.create_task(process.start(START))
            await let_tasks_run(1 + num_turns)
            await asyncio.wait_for(process.stop(), 20)
            with pytest.raises(errors.WorkerDied, match="it was stopped"):
                await asyncio.wait_for(starting, 1)

    asyncio.run(main())
    assert psutil.Process().children() == []


async def test_process_that_does_not_end_when_killed_is_abandoned(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stuck in the kernel: no signal has an effect."""
    monkeypatch.setattr(supervisor, "_STOP_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "_KILL_SECONDS", 0.05)

    process, _ = running
    pid = process.pid
    assert pid is not None
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.subprocess.Process, "terminate", lambda self: None)
        patch.setattr(asyncio.subprocess.Process, "kill", lambda self: None)
        await asyncio.wait_for(process.stop(), 5)
    assert process.abandoned
    os.kill(pid, signal.SIGKILL)


async def test_token_timeout_starts_after_the_first_token(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_TOKEN_SECONDS", 0.2)

    process, worker = running
    reading = asyncio.create_task(read(process.stream(REQUEST, ())))
    request_id, _, _ = await worker.receive()
    await asyncio.sleep(0.5)  # waiting for the first token: other requests run before
    assert not reading.done()
    await worker.answer(request_id, token(1))
    with pytest.raises(errors.DeadlineExceeded):
        await reading
    _, message, _ = await worker.receive()
    assert message == wire.Cancel(request=request_id)


async def test_worker_that_exits_at_start_is_reported_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker exits before it reads its input; the load timeout is not waited for."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))

    with zmq_context() as context:
        process = WorkerProcess(context, "kitchen", NEVER_FORK)
        with pytest.raises(errors.WorkerDied, match="exited with code 1"):
            await asyncio.wait_for(process.start(START), 20)
        assert process.state == "failed"
        await process.stop()


async def test_disk_without_room_for_a_socket_is_a_fault_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(supervisor, "SocketFolder", read_only)
    with zmq_context() as context, pytest.raises(errors.WorkerDied, match="Read-only file system"):
        WorkerProcess(context, "kitchen", NEVER_FORK)


@pytest.mark.parametrize("end", ["stop", "kill -9"])
async def test_scratch_folder_is_removed_with_the_worker(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    run_instead(tmp_path, 4, tmp_path / "request", monkeypatch)
    with zmq_context() as context:
        process = WorkerProcess(context, "kitchen", NEVER_FORK)
        starting = asyncio.create_task(process.start(EXAMPLE.model_copy(update={"store_path": str(store)})))
        await until("the process", (tmp_path / "request").exists)
        (scratch,) = filter(Path.is_dir, store.glob("scratch-*"))
        assert wire.ForkWorker.model_validate_json((tmp_path / "request").read_bytes()).scratch == str(scratch)
        (scratch / "1.weight").write_bytes(b"joined")
        assert file_beside(scratch).exists()
        if end == "stop":
            await process.stop()
        else:
            await until("the worker's start", lambda: process.pid is not None)
            os.kill(process.pid, signal.SIGKILL)
            await until("the end of its folder", lambda: not scratch.exists())
        with pytest.raises(errors.WorkerDied):
            await starting
        await process.stop()
        assert not any(store.iterdir())
