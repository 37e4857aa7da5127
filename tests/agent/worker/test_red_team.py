"""A confined worker that tries to break out. What it may do stands in docs/protocol.md, whose table is compared here."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("psutil")

from support.contexts import zmq_context
from support.messages import EXAMPLES
from support.red_team import ATTEMPTS

from agent.daemon.spawner import Spawner
from agent.daemon.supervisor import WorkerProcess
from hearth.platform import system_calls
from hearth.platform.confine import confinement
from hearth.wire import messages as wire

ROOT = Path(__file__).parents[3]
START = next(
    each for each in EXAMPLES if isinstance(each, wire.Start) and isinstance(each.load.parts, wire.SegmentParts)
)
STARTS_PROCESSES = {"fork", "vfork", "execve", "execveat"}


class Row(NamedTuple):
    """Of the table: `may` is yes, no, or what it depends on; `holder` is one of the names in `confinement`, or empty."""

    may: str
    holder: str


def documented() -> dict[str, Row]:
    text = (ROOT / "docs" / "protocol.md").read_text().partition("### What a worker may do")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \| (.*?) ?\|$", text, re.MULTILINE)
    return {attempt: Row(may, holder) for attempt, may, holder in rows if attempt != "a worker tries to"}


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[dict[str, object]]:
    """What the worker attacks, in this process and another one."""
    store, state = tmp_path / "store", tmp_path / "state"
    (store / "ab").mkdir(parents=True)
    state.mkdir()
    chunk, key, unix = store / "ab" / ("ab" * 32), state / "home.key", state / "socket"
    chunk.write_text("weights of another model")
    key.write_text("secret")
    column = system_calls._MACHINES.get(platform.machine(), (0, 0))[1]
    refused = system_calls._REFUSED.items()
    numbers = [each[column] for name, each in refused if name not in STARTS_PROCESSES and each[column] >= 0]
    with ExitStack() as stack:
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        stack.callback(victim.kill)
        peer, control, *free = (stack.enter_context(socket.socket()) for _ in range(4))
        for each in (peer, control, *free):
            each.bind(("127.0.0.1", 0))
        peer.listen()
        control.listen()
        own_port, other_port = (each.getsockname()[1] for each in free)
        for each in free:
            each.close()
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(unix))
        listener.listen()
        found = {
            "chunk": str(chunk), "key": str(key), "socket": str(unix), "pid": victim.pid, "system_calls": numbers,
            "peer_port": peer.getsockname()[1], "control_port": control.getsockname()[1], "own_port": own_port,
            "other_port": other_port,
        }  # fmt: skip
        (store / "targets.json").write_text(json.dumps(found))
        yield found


def test_table_of_the_protocol_has_every_attempt() -> None:
    assert list(documented()) == list(ATTEMPTS)


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
@pytest.mark.parametrize("spare_worker", ["auto", "off"], ids=["forked", "fresh"])
async def test_worker_may_do_what_the_protocol_says(
    spare_worker: str, compute_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: dict[str, object]
) -> None:
    if "calls" not in (supported := confinement()):
        pytest.skip("this system has no filter of system calls, and a worker that starts a program reports nothing")
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import sys\nimport support.red_team\nsys.modules['agent.worker.graph.runtime'] = support.red_team\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), str(ROOT / "tests"), str(ROOT), *sys.path]))
    monkeypatch.setenv("HOME", str(tmp_path))
    load = START.load.model_copy(update={"data_ports": ((targets["peer_port"],) * 2,)})
    changes = {"ports": (targets["own_port"],) * 2, "compute_device": compute_device, "load": load}
    spawner = Spawner(spare_worker, lambda num_bytes: True)
    with zmq_context() as context:
        worker = WorkerProcess(context, "kitchen", spawner)
        try:
            await worker.start(START.model_copy(update={"store_path": str(tmp_path / "store"), **changes}))
            (written,) = (tmp_path / "store").glob("scratch-*/outcomes.json")
            outcomes = json.loads(written.read_text())
        finally:
            await worker.stop()
            await spawner.close()
    expected = {
        attempt: {"only on a GPU": "yes" if compute_device == "cuda" else "no"}.get(row.may, row.may)
        for attempt, row in documented().items()
        if not row.holder or row.holder in supported
    }
    assert {attempt: outcomes[attempt] for attempt in expected} == expected
    assert (tmp_path / "store" / "ab" / ("ab" * 32)).read_text() == "weights of another model"
    if missing := sorted({row.holder for row in documented().values()} - {"", *supported}):
        pytest.skip(f"all but what this kernel does not have: {', '.join(missing)}")
