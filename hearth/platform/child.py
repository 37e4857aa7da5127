"""Short-lived child processes: a Python module that reads all its input from stdin and answers on stdout."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from hearth.platform.asyncio_tools import cancel_all, with_timeout

log = logging.getLogger(__name__)

# From SIGKILL until a child is left behind: a process that is stuck in the kernel, on a dying disk for example, may stay for
# ever, and its caller must not.
_KILL_SECONDS = 5.0
_STDERR_TAIL_LINES = 3  # lines of stderr that are kept: the end of a traceback


class ChildResult(NamedTuple):
    """The result of a child process that has ended."""

    output: bytes  # its stdout
    code: int  # exit status; negative: the signal that killed it
    stderr_tail: tuple[str, ...]  # of its stderr, if `run_module` was given `on_stderr_line`

    @property
    def cause(self) -> str:
        """How the process ended, as a phrase for an error message."""
        return describe_exit(self.code)


async def run_module(
    module: str, stdin_bytes: bytes, timeout_seconds: float, on_stderr_line: Callable[[str], None] | None = None
) -> ChildResult:
    """Run `python -m MODULE` with `stdin_bytes` as its stdin, and wait for its end.

    `on_stderr_line` is called with each line of its stderr; without it, the child inherits our stderr. On cancellation or
    timeout the child is killed; one that does not end then is left behind. Raises asyncio.TimeoutError.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if on_stderr_line else None,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    lines: deque[str] = deque(maxlen=_STDERR_TAIL_LINES)

    async def read_stderr(stream: asyncio.StreamReader, on_stderr_line: Callable[[str], None]) -> None:
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            lines.append(text)
            on_stderr_line(text)

    async def exchange(stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> bytes:
        with suppress(BrokenPipeError, ConnectionResetError):  # the child ended without reading its input
            stdin.write(stdin_bytes)
            await stdin.drain()
        stdin.close()
        answer = await stdout.read()
        await process.wait()
        return answer

    stderr_task = (
        asyncio.ensure_future(read_stderr(process.stderr, on_stderr_line))
        if process.stderr and on_stderr_line
        else None
    )
    try:
        output = await with_timeout(timeout_seconds, exchange(process.stdin, process.stdout))
    finally:
        if process.returncode is None:
            process.kill()
            try:
                await with_timeout(_KILL_SECONDS, process.wait())
            except asyncio.TimeoutError:
                log.error("%s (process %d) did not end when it was killed, and is left behind", module, process.pid)
        if stderr_task is not None:
            if process.returncode is not None:
                await asyncio.wait({stderr_task}, timeout=_KILL_SECONDS)
            await cancel_all([stderr_task])
    return ChildResult(output, process.returncode or 0, tuple(lines))


def describe_exit(code: int) -> str:
    """Describe an exit status as `subprocess` reports it."""
    if code == -signal.SIGKILL:
        return "killed (SIGKILL), often by the kernel because memory ran out"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
