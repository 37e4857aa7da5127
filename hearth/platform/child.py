"""Short-lived child processes: a Python module that reads all its input from stdin and answers on stdout."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from hearth.platform.asyncio_tools import within

_LAST_LINES = 3  # lines of stderr that are kept: the end of a traceback


class Ended(NamedTuple):
    """The result of a child process that has ended."""

    output: bytes  # its stdout
    code: int  # exit status; negative: the signal that killed it
    last_lines: tuple[str, ...]  # of its stderr, if `run_module` was given `listen`

    @property
    def cause(self) -> str:
        return cause_of_death(self.code)


async def run_module(
    module: str, given: bytes, timeout_seconds: float, listen: Callable[[str], None] | None = None
) -> Ended:
    """Run `python -m MODULE` with `given` as its stdin, and wait for its end.

    `listen` is called with each line of its stderr; without it, the child inherits our stderr. On cancellation or timeout
    the child is killed. Raises asyncio.TimeoutError.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if listen else None,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    lines: deque[str] = deque(maxlen=_LAST_LINES)

    async def hear(stream: asyncio.StreamReader, listen: Callable[[str], None]) -> None:
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            lines.append(text)
            listen(text)

    async def ask(stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> bytes:
        with suppress(BrokenPipeError, ConnectionResetError):  # the child ended without reading its input
            stdin.write(given)
            await stdin.drain()
        stdin.close()
        answer = await stdout.read()
        await process.wait()
        return answer

    hearing = asyncio.ensure_future(hear(process.stderr, listen)) if process.stderr and listen else None
    try:
        output = await within(timeout_seconds, ask(process.stdin, process.stdout))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if hearing is not None:
            await asyncio.gather(hearing, return_exceptions=True)
    return Ended(output, process.returncode or 0, tuple(lines))


def cause_of_death(code: int) -> str:
    """Describe an exit status as `subprocess` reports it."""
    if code == -signal.SIGKILL:
        return "killed (SIGKILL), often by the kernel because memory ran out"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
