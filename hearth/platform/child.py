"""Child processes with one task: a Python module that reads all its input from stdin and answers on stdout."""

from __future__ import annotations

import asyncio
import logging
import os
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


class Child:
    """A running `python -m MODULE`, which gets all its input at once. It ends with this process, however that ends."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._module = module
        self._process = process

    @classmethod
    async def start(cls, module: str, *arguments: str, pipe_stderr: bool) -> Child:
        """Start the module. Without `pipe_stderr`, it inherits our stderr. Raises OSError.

        `child_main.SPARE` with arguments as module: a process that imports these modules, and then waits for its input.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hearth.platform.child_main", str(os.getpid()), module, *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if pipe_stderr else None,
        )  # fmt: skip
        return cls(module, process)

    @property
    def runs(self) -> bool:
        """Whether the process has not ended yet, as far as this process has noticed."""
        return self._process.returncode is None

    async def wait_for_line(self, expected: str) -> None:
        """Drop lines of its stderr up to the expected one. Raises RuntimeError with the last lines if it ends before."""
        assert self._process.stderr is not None
        lines: deque[str] = deque(maxlen=_STDERR_TAIL_LINES)
        async for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            if text == expected:
                return
            lines.append(text)
        code = await self._process.wait()
        raise RuntimeError(
            f"it {describe_exit(code)} before it wrote {expected!r}: {' / '.join(lines) or 'no message'}"
        )

    async def run(
        self, stdin_bytes: bytes, timeout_seconds: float, on_stderr_line: Callable[[str], None] | None = None
    ) -> ChildResult:
        """Give the process its input and wait for its end, once. See `run_module`. Raises asyncio.TimeoutError."""
        process = self._process
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
            await self.kill()
            if stderr_task is not None:
                if process.returncode is not None:
                    await asyncio.wait({stderr_task}, timeout=_KILL_SECONDS)
                await cancel_all([stderr_task])
        return ChildResult(output, process.returncode or 0, tuple(lines))

    async def kill(self) -> None:
        """End the process, if it has not ended. One that does not end within `_KILL_SECONDS` is left behind."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()  # no more is written, and an open pipe would keep what asyncio holds for the process
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        try:
            await with_timeout(_KILL_SECONDS, process.wait())
        except asyncio.TimeoutError:
            log.error("%s (process %d) did not end when it was killed, and is left behind", self._module, process.pid)


async def run_module(
    module: str, stdin_bytes: bytes, timeout_seconds: float, on_stderr_line: Callable[[str], None] | None = None
) -> ChildResult:
    """Run `python -m MODULE` with `stdin_bytes` as its stdin, and wait for its end.

    `on_stderr_line` is called with each line of its stderr; without it, the child inherits our stderr. On cancellation or
    timeout the child is killed; one that does not end then is left behind. Raises asyncio.TimeoutError.
    """
    child = await Child.start(module, pipe_stderr=on_stderr_line is not None)
    return await child.run(stdin_bytes, timeout_seconds, on_stderr_line)


def describe_exit(code: int) -> str:
    """Describe an exit status as `subprocess` reports it."""
    if code == -signal.SIGKILL:
        return "killed (SIGKILL), often by the kernel because memory ran out"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
