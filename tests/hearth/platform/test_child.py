"""Child processes: input, output, exit codes, time limits and cancellation. Each test writes the module it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hearth.platform import child as child_module
from hearth.platform.child import Child, ChildResult, run_module
from hearth.platform.child_main import READY_LINE, SPARE


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the source of module `short_lived`; the file does not exist yet."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path / "short_lived.py"


def run(**options: object) -> ChildResult:
    return asyncio.run(run_module("short_lived", b"1 2 3\n", 60.0, **options))  # type: ignore[arg-type]


def test_input_output_and_log_lines_are_passed(module: Path) -> None:
    module.write_text("import sys; print(sum(map(int, input().split()))); print('one\\ntwo', file=sys.stderr)")
    lines: list[str] = []
    assert run(on_stderr_line=lines.append) == ChildResult(b"6\n", 0, ("one", "two"))
    assert lines == ["one", "two"]


def test_exit_code_signal_and_last_lines_are_reported(module: Path) -> None:
    module.write_text("raise SystemExit(3)")
    assert (run().code, run().cause) == (3, "exited with code 3")
    module.write_text("import os; os.kill(os.getpid(), 9)")
    assert run().cause.startswith("killed (SIGKILL)")
    module.write_text("import os; os.close(0); raise ValueError('no input')")
    ended = run(on_stderr_line=lambda line: None)
    assert (ended.code, ended.stderr_tail[-1]) == (1, "ValueError: no input")


def children() -> list[psutil.Process]:
    """The children of this process that run the module; one of an earlier test may have ended without being waited for."""
    found = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in found if "short_lived" in each.cmdline()]


async def test_child_is_killed_on_timeout_and_cancellation(module: Path) -> None:
    module.write_text("import time; time.sleep(600)")
    with pytest.raises(asyncio.TimeoutError):
        await run_module("short_lived", b"", 0.2)
    module.write_text("import sys, time; print('here', file=sys.stderr, flush=True); time.sleep(600)")
    arrived = asyncio.Event()
    running = asyncio.ensure_future(run_module("short_lived", b"", 60.0, lambda line: arrived.set()))
    await asyncio.wait_for(arrived.wait(), 60.0)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    assert not children()


async def test_child_that_does_not_end_when_killed_is_left_behind(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stuck in the kernel: no signal has an effect."""
    module.write_text("import sys, time; print('here', file=sys.stderr, flush=True); time.sleep(600)")
    monkeypatch.setattr(child_module, "_KILL_SECONDS", 0.05)

    arrived = asyncio.Event()
    running = asyncio.ensure_future(run_module("short_lived", b"", 60.0, lambda line: arrived.set()))
    await asyncio.wait_for(arrived.wait(), 60.0)
    stuck = children()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.subprocess.Process, "kill", lambda self: None)
        running.cancel()
        await asyncio.wait({running}, timeout=20)
    assert running.cancelled()
    for each in stuck:
        os.kill(each.pid, signal.SIGKILL)


_PARENT = """
import asyncio, sys
from hearth.platform.child import run_module
asyncio.run(run_module("short_lived", b"", 600.0, lambda line: print(line, flush=True)))
"""


def test_child_ends_when_its_parent_is_killed(module: Path) -> None:
    """Also while it imports: a profiler spends seconds on torch."""
    module.write_text("import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=60)


# ---- children that import before they get their task --------------------------------------------------------------------


async def start_spare() -> Child:
    spare = await Child.start(SPARE, "short_lived", pipe_stderr=True)
    await asyncio.wait_for(spare.wait_for_line(READY_LINE), 60.0)
    return spare


async def test_spare_child_imports_with_low_priority_and_runs_its_task_with_normal_priority(module: Path) -> None:
    module.write_text(
        "import os\nimporting = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "def main(task): print(task.decode(), importing, os.getpriority(os.PRIO_PROCESS, 0))\n"
    )
    ended = await (await start_spare()).run(b"task", 60.0, lambda line: None)
    now = os.getpriority(os.PRIO_PROCESS, 0)
    assert ended.output.decode().split() == ["task", str(max(10, now)), str(now)]


async def test_spare_child_is_killed_on_cancellation_and_ends_without_a_task(module: Path) -> None:
    module.write_text("import time\ndef main(task): time.sleep(600)\n")

    spare = await start_spare()
    running = asyncio.ensure_future(spare.run(b"task", 60.0, lambda line: None))
    await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait({running})
    assert not psutil.pid_exists(spare.pid)
    idle = await start_spare()
    assert (await idle.run(b"", 60.0, lambda line: None)).code == 0


async def test_spare_child_whose_import_fails_says_why(module: Path) -> None:
    module.write_text("raise ValueError('not here')")

    spare = await Child.start(SPARE, "short_lived", pipe_stderr=True)
    with pytest.raises(RuntimeError, match=r"it exited with code 1 before it wrote 'ready': .*ValueError: not here"):
        await asyncio.wait_for(spare.wait_for_line(READY_LINE), 60.0)
    await spare.kill()
