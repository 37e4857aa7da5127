"""Workers that are forked from a template. The template imports a stand-in for the runtimes, which is quick."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("psutil")

import psutil
from support.contexts import zmq_context
from support.messages import FORK_WORKER
from support.waiting import until

from agent.daemon import spawner as spawner_module
from agent.daemon.spawner import ForkedProcess, Spawner, worker_environment
from hearth.errors import StepFailed
from hearth.wire.messages import Done, ForkWorker, ReportProgress, WorkerLibrary, WorkerProgress
from hearth.wire.rpc import RpcClient

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux 5.3 or later")


@pytest.fixture(autouse=True)
def without_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find empty modules in place of torch, and of those that import torch and onnxruntime."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import sys, types\n"
        "for kind in ('transformer', 'graph'):\n"
        "    name = f'agent.worker.{kind}.runtime'\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "torch = sys.modules['torch'] = types.ModuleType('torch')\n"
        "torch.set_num_threads = lambda count: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{hook}{os.pathsep}{os.pathsep.join(filter(None, sys.path))}")


def request(endpoint: str, store: Path) -> ForkWorker:
    return FORK_WORKER.model_copy(update={"endpoint": endpoint, "store": str(store), "scratch": str(store)})


@asynccontextmanager
async def running(spawner: Spawner) -> AsyncIterator[Spawner]:
    try:
        yield spawner
    finally:
        await spawner.close()
        await until("the end of all processes", lambda: not psutil.Process().children(recursive=True))


async def test_forked_worker_serves_and_reports_its_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_KEY", "/secret")

    with zmq_context() as context:
        async with running(Spawner("auto", lambda num_bytes: True)) as spawner:
            client = RpcClient(context, f"ipc://{tmp_path / 'worker'}", None, "the worker")
            process = await spawner.spawn(request(client.endpoint, tmp_path), "torch")
            assert isinstance(process, ForkedProcess)
            with pytest.raises(StepFailed, match="not ready for Done"):
                await client.call(Done(), timeout_seconds=20)
            async with aclosing(
                client.stream(ReportProgress(interval_seconds=0.01), timeout_seconds=20, last=Done)
            ) as signs:
                assert [(await anext(signs)).message for _ in range(3)] == [WorkerProgress()] * 3
            seen = psutil.Process(process.pid)
            assert "agent.worker.main" in seen.cmdline()
            assert seen.ppid() == os.getpid()  # so that it outlives the template
            assert not {"HEARTH_KEY", "CREDENTIALS_DIRECTORY"} & seen.environ().keys()
            assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "500"
            assert process.returncode is None
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 10) == process.returncode == -signal.SIGTERM
            process.kill()  # no effect on a process that has ended
            await client.close()


def the_template() -> psutil.Process:
    """The fork server that is a child of this process."""
    (template,) = filter(_is_template, psutil.Process().children())
    return template


def _is_template(process: psutil.Process) -> bool:
    return "agent.worker.fork_server" in process.cmdline()


async def test_workers_outlive_the_template_and_the_next_is_a_new_process(tmp_path: Path) -> None:
    async with running(Spawner("auto", lambda num_bytes: True)) as spawner:
        forked = [await spawner.spawn(request(f"ipc://{tmp_path / name}", tmp_path), "torch") for name in ("a", "b")]
        template = the_template()
        template.kill()
        await until("the end of the template", lambda: not template.is_running())
        fresh = await spawner.spawn(request(f"ipc://{tmp_path / 'c'}", tmp_path), "torch")
        assert not isinstance(fresh, ForkedProcess)
        forked[0].terminate()
        assert await asyncio.wait_for(forked[0].wait(), 10) == -signal.SIGTERM
        assert forked[1].returncode is None
        assert psutil.Process(forked[1].pid).is_running()
        fresh.kill()
        await fresh.wait()


async def test_workers_end_with_the_daemon(tmp_path: Path) -> None:
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _DAEMON, f"ipc://{tmp_path / 'a'}", FORK_WORKER.model_dump_json(), stdout=subprocess.PIPE
    )
    assert daemon.stdout is not None
    worker = psutil.Process(int(await asyncio.wait_for(daemon.stdout.readline(), 20)))
    daemon.kill()
    await daemon.wait()
    await until("the end of the worker", lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


_DAEMON = """
import asyncio, sys
from agent.daemon.spawner import Spawner
from hearth.wire.messages import ForkWorker

async def main():
    request = ForkWorker.model_validate_json(sys.argv[2]).model_copy(update={"endpoint": sys.argv[1]})
    worker = await Spawner("auto", lambda num_bytes: True).spawn(request, "torch")
    print(worker.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_template_that_hangs_delays_a_new_process_only_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawner_module, "_FORK_SECONDS", 0.1)

    async with running(Spawner("auto", lambda num_bytes: True)) as spawner:
        monkeypatch.setattr(spawner_module, "_FORK_SECONDS", 5.0)
        first = await spawner.spawn(request(f"ipc://{tmp_path / 'a'}", tmp_path), "torch")
        monkeypatch.setattr(spawner_module, "_FORK_SECONDS", 0.1)
        the_template().suspend()
        fresh = await spawner.spawn(request(f"ipc://{tmp_path / 'b'}", tmp_path), "torch")
        assert not isinstance(fresh, ForkedProcess)
        assert first.returncode is None  # its worker goes on
        first.kill()
        assert await asyncio.wait_for(first.wait(), 10) == -signal.SIGKILL
        fresh.kill()
        await fresh.wait()


@pytest.mark.parametrize(
    ("mode", "has_room", "library"), [("off", True, "torch"), ("auto", False, "torch"), ("off", True, "onnxruntime")]
)
async def test_template_is_not_started_where_it_is_not_wanted(
    mode: spawner_module.SpareMode, has_room: bool, library: WorkerLibrary, tmp_path: Path
) -> None:
    async with running(Spawner(mode, lambda num_bytes: has_room)) as spawner:
        process = await spawner.spawn(request(f"ipc://{tmp_path / 'a'}", tmp_path), library)
        assert [child.pid for child in psutil.Process().children()] == [process.pid]
        process.kill()
        await process.wait()


async def test_idle_template_ends_and_one_that_is_wanted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner_module, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(spawner_module, "_IDLE_CHECK_SECONDS", 0.02)

    async with running(Spawner("auto", lambda num_bytes: True)) as spawner:
        keeping = asyncio.create_task(spawner.keep_templates())
        process = await spawner.spawn(request(f"ipc://{tmp_path / 'a'}", tmp_path), "torch")
        await asyncio.sleep(0.5)
        assert process.returncode is None
        process.kill()
        await until("the end of the template", lambda: not psutil.Process().children())
        keeping.cancel()


async def test_template_that_was_prepared_forks_the_first_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawner_module, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(spawner_module, "_IDLE_CHECK_SECONDS", 0.02)

    async with running(Spawner("auto", lambda num_bytes: True)) as spawner:
        spawner.prepare("torch")
        await until("the template", lambda: bool(psutil.Process().children()))
        process = await spawner.spawn(request(f"ipc://{tmp_path / 'a'}", tmp_path), "torch")
        assert isinstance(process, ForkedProcess)
        process.kill()
        await process.wait()
        spawner.prepare("torch")
        keeping = asyncio.create_task(spawner.keep_templates())
        await until("the end of the template", lambda: not psutil.Process().children())
        keeping.cancel()


async def test_each_library_has_a_template_of_its_own(tmp_path: Path) -> None:
    async with running(Spawner("auto", lambda num_bytes: True)) as spawner:
        libraries: tuple[WorkerLibrary, ...] = ("torch", "onnxruntime", "torch", "onnxruntime")
        forked = [
            await spawner.spawn(request(f"ipc://{tmp_path / str(number)}", tmp_path), library)
            for number, library in enumerate(libraries)
        ]
        assert all(isinstance(each, ForkedProcess) for each in forked)
        templates = {each.cmdline()[-1] for each in psutil.Process().children() if _is_template(each)}
        assert templates == {"onnxruntime", "torch"}


def test_environment_of_workers_holds_no_settings_of_the_daemon() -> None:
    environ = {
        "HEARTH_AGENT_KEY_PATH": "/k",
        "HEARTH_KEY": "/k",
        "CREDENTIALS_DIRECTORY": "/c",
        "PATH": "/bin",
        "HOME": "/h",
    }
    assert worker_environment(environ) == {"PATH": "/bin", "HOME": "/h"}
