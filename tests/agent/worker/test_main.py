"""The worker process before it has a plan."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from support.contexts import zmq_context
from support.messages import EXAMPLES, FORK_WORKER

from hearth.errors import StepFailed
from hearth.wire.messages import Abort, Done, GenerateTokens, GenerationEnded, Run, Start, WorkerBound
from hearth.wire.rpc import RpcClient

START = next(message for message in EXAMPLES if isinstance(message, Start))
RUN = Run(holder="c", epoch=1, step=1, timeout_seconds=1.0)


def arguments(endpoint: str, scratch: Path) -> tuple[str, str]:
    request = FORK_WORKER.model_copy(update={"endpoint": endpoint, "scratch": str(scratch)})
    return endpoint, request.model_dump_json()


async def test_worker_without_a_plan_rejects_run_and_ignores_abort(tmp_path: Path) -> None:
    with zmq_context() as context:
        client = RpcClient(context, f"ipc://{tmp_path / 'worker'}", None, "the worker")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agent.worker.main", *arguments(client.endpoint, tmp_path)
        )
        try:
            for request in (RUN, Done()):
                with pytest.raises(StepFailed, match=f"not ready for {type(request).__name__}"):
                    await client.call(request, timeout_seconds=60)
            abort = Abort(holder="c", epoch=1, reason="a peer is gone")
            assert (await client.call(abort, timeout_seconds=60)).message == Done()
            stream = client.stream(
                GenerateTokens(holder="c", epoch=1, max_tokens=1), timeout_seconds=60, last=GenerationEnded
            )
            with pytest.raises(StepFailed, match="not ready for GenerateTokens"):
                await anext(stream)
            assert not {"torch", "onnxruntime"} & imported(process.pid)
        finally:
            process.kill()
            await process.wait()
            await client.close()


async def test_other_processes_than_the_agent_get_no_answer(tmp_path: Path) -> None:
    """Such as another worker, which could send requests to this one, or read its answers."""
    endpoint = f"ipc://{tmp_path / 'worker'}"
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agent.worker.main", *arguments(endpoint, tmp_path)
    )
    with zmq_context() as context:
        client = RpcClient(context, endpoint, None, "the worker")
        try:
            other = await asyncio.create_subprocess_exec(
                sys.executable, "-c", OTHER, endpoint, stdout=asyncio.subprocess.PIPE
            )
            for _ in range(2):  # the agent's connection does not suffer from the other one
                with pytest.raises(StepFailed, match="not ready for Done"):
                    await client.call(Done(), timeout_seconds=60)
                await other.wait()
            assert other.stdout is not None
            assert (await other.stdout.read()).split() == [b"0"]
        finally:
            worker.kill()
            await worker.wait()
            await client.close()


OTHER = """
import sys, zmq
from hearth.wire.messages import Done, encode
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
socket.connect(sys.argv[1])
socket.send_multipart([b"12345678", encode(Done())])
print(socket.poll(1000))
"""

# A worker whose first load ends only when it is given up, or not at all with a second argument.
SLOW_WORKER = """
import sys, time
from agent.worker import main
from agent.worker.runtime import LoadGivenUp
from hearth.wire.messages import WorkerBound

class Runtime:
    def __init__(self, start, answer, previous):
        self.previous = previous

    def load(self, is_given_up):
        if self.previous is not None:
            return WorkerBound(port=7, public_key="0" * 40, num_bytes_loaded=0)
        print("loading", flush=True)
        while len(sys.argv) > 2 or not is_given_up():
            time.sleep(0.01)
        raise LoadGivenUp

main.create_runtime, main._GIVE_UP_SECONDS = Runtime, 0.2
main.Worker(sys.argv[1]).run()
"""


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_load_that_is_given_up_leaves_what_it_has_to_the_next_one_unless_it_is_stuck(
    is_stuck: bool, tmp_path: Path
) -> None:
    with zmq_context() as context:
        client = RpcClient(context, f"ipc://{tmp_path / 'worker'}", None, "the worker")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SLOW_WORKER, client.endpoint, *(["stuck"] if is_stuck else []),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            stream = client.stream(START, timeout_seconds=60, last=WorkerBound)
            async with aclosing(stream) as replies:
                loading = asyncio.ensure_future(anext(replies))
                assert await asyncio.wait_for(process.stdout.readline(), 60) == b"loading\n"
                loading.cancel()
                await asyncio.wait({loading})
            if is_stuck:
                assert await asyncio.wait_for(process.wait(), 20) == 1
            else:
                reply = await client.call(START, timeout_seconds=60)
                assert isinstance(reply.message, WorkerBound)
                assert reply.message.port == 7
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await client.close()


def imported(pid: int) -> set[str]:
    """The large libraries (torch, onnxruntime) that the process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in ("torch", "onnxruntime") if f"/{name}/" in maps}
