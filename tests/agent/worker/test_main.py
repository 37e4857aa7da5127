"""The worker process before it has a plan."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest
from support.contexts import zmq_context

from hearth.errors import StepFailed
from hearth.wire.messages import Abort, Done, GenerateTokens, GenerationEnded, Run
from hearth.wire.rpc import RpcClient

RUN = Run(holder="c", epoch=1, step=1, timeout_seconds=1.0)


def test_worker_without_a_plan_rejects_run_and_ignores_abort(tmp_path: Path) -> None:
    async def main() -> None:
        with zmq_context() as context:
            client = RpcClient(context, f"ipc://{tmp_path / 'worker'}", None, "the worker")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agent.worker.main", client.endpoint, logging.getLevelName(logging.INFO),
                str(tmp_path / "store"),
            )  # fmt: skip
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

    asyncio.run(main())


def imported(pid: int) -> set[str]:
    """The large libraries (torch, onnxruntime) that the process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in ("torch", "onnxruntime") if f"/{name}/" in maps}
