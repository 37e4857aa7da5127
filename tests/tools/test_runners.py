"""The child processes of a benchmark: their request loop, the engine runner, and what the parent calls."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support.waiting import wait_for

from hearth.errors import InternalError
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
        answer = {
            "began": 1.0, "ended": 3.0, "sums": [1.0], "sent_bytes": 0,
            "raw_bytes": 0, "lz4_saved_bytes": 0, "trace": [],
        }  # fmt: skip
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
from tools.bench.child import AsyncTarget, serve

class Target(AsyncTarget):
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
