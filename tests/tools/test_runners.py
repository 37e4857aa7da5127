"""The child processes of a benchmark: their request loop, the engine runner, and what the parent calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support.waiting import wait_for

from hearth.errors import DeadlineExceeded, InternalError
from tools.bench import processes
from tools.bench.drive import EngineRunners
from tools.bench.processes import ProcessGroup


def test_runner_computes_until_stopped() -> None:
    pytest.importorskip("torch")
    from tools.bench.runner import Runner

    runner = Runner("127.0.0.1")
    for _ in range(2):
        runner.begin_to_compute()
        layers = runner._layers
        assert layers is not None
        before = layers.num_runs
        wait_for("two layers", lambda before=before, layers=layers: layers.num_runs >= before + 2)  # type: ignore[misc]
        runner.end_computing()
        assert runner._computing is not None
        assert not runner._computing.is_alive()


class _RecordedRunners(EngineRunners):
    """Runners without processes that record their calls in order."""

    def __init__(self, devices: tuple[str, ...], all_busy: bool) -> None:
        self._devices = devices if all_busy else ()
        self._plans = {"plan": SimpleNamespace(devices=[SimpleNamespace(name="b")])}  # type: ignore[dict-item]
        self.called: list[tuple[str, tuple[str, ...]]] = []

    def call_each(self, requests: Mapping[str, Mapping[str, Any]], seconds: float = 0.0) -> dict[str, dict[str, Any]]:
        self.called += [(str(request["do"]), tuple(requests)) for request in list(requests.values())[:1]]
        answer = {"began": 1.0, "ended": 3.0, "sums": [1.0], "trace": []}
        return dict.fromkeys(requests, answer)


def test_idle_devices_run_a_dummy_load_during_a_step() -> None:
    runners = _RecordedRunners(("a", "b", "c"), all_busy=True)
    assert runners.run("plan", 8).seconds == 2.0
    assert runners.called == [("begin_to_compute", ("a", "c")), ("run", ("b",)), ("end_computing", ("a", "c"))]
    runners = _RecordedRunners(("a", "b", "c"), all_busy=False)
    runners.run("plan", 8)
    assert runners.called == [("run", ("b",))]


CHILD = """
import asyncio, sys
from tools.bench.processes import serve

class Target:
    def double(self, number): return {"number": 2 * number}
    async def later(self): await asyncio.sleep(0)
    async def fail(self): raise ValueError("a reason")

serve(sys.argv[1], Target())
"""


def test_child_answers_plain_and_coroutine_methods_and_survives_errors(tmp_path: Path) -> None:
    socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.PAIR)
    socket.linger = 0
    socket.bind(address := f"ipc://{tmp_path}/child")
    child = subprocess.Popen([sys.executable, "-c", CHILD, address])
    try:
        for request, expected in (
            ({"do": "fail"}, {"error": "ValueError: a reason"}),
            ({"do": "later"}, {}),
            ({"do": "double", "number": 4}, {"number": 8}),
        ):
            socket.send(json.dumps(request).encode())
            assert socket.poll(20_000)
            assert json.loads(socket.recv()) == expected
    finally:
        child.kill()
        child.wait(10)
        socket.close()


def test_a_child_that_has_ended_is_an_error_instead_of_a_wait(tmp_path: Path) -> None:
    def popen(*_: str, **__: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import sys; sys.exit('no torch')"], stderr=log)

    testbed = SimpleNamespace(folder=tmp_path, popen=popen)
    with (tmp_path / "runner-one.log").open("wb") as log, ProcessGroup(testbed, "runner") as group:  # type: ignore[arg-type]
        group.start("one")
        with pytest.raises(InternalError, match="it has ended: no torch"):
            group.call_all(("one",), "load")


STUCK = """
import sys, time
from tools.bench.processes import serve

class Target:
    def wait_for_ever(self): time.sleep(600)
    def fail(self): raise ValueError("a reason")

serve(sys.argv[1], Target())
"""


@pytest.fixture
def two_children(tmp_path: Path) -> Iterator[ProcessGroup]:
    """Processes of the module `stuck` on the devices one and two."""
    (tmp_path / "stuck.py").write_text(STUCK)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    running: list[subprocess.Popen[bytes]] = []

    def popen(_: str, *command: str, stdout: Any, stderr: Any, **__: object) -> subprocess.Popen[bytes]:
        child = [part.replace("tools.bench.stuck", "stuck") for part in command]
        running.append(subprocess.Popen(child, stdout=stdout, stderr=stderr, env=environment))
        return running[-1]

    try:
        with ProcessGroup(SimpleNamespace(folder=tmp_path, popen=popen), "stuck") as group:  # type: ignore[arg-type]
            for device in ("one", "two"):
                group.start(device)
            yield group
    finally:
        for child in running:
            child.kill()
            child.wait(10)


def test_stacks_of_all_children_are_printed_when_one_does_not_answer(
    two_children: ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DeadlineExceeded, match="stuck on one, two did not finish"):
        two_children.call_each({device: {"do": "wait_for_ever"} for device in ("one", "two")}, 1.0)
    said = capsys.readouterr().err
    assert "the log of stuck on one" in said
    assert said.count("in wait_for_ever") == 2


def test_an_error_is_told_although_another_child_does_not_answer(
    two_children: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_AFTER_ERROR_SECONDS", 0.2)
    with pytest.raises(InternalError, match="stuck on two: ValueError: a reason"):
        two_children.call_each({"one": {"do": "wait_for_ever"}, "two": {"do": "fail"}})
