"""The testbed: rates, CPU shares and memory limits hold on this kernel, and everything is removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_for

from tools.testbed import EmulatedDevice, Scenario, Testbed
from tools.testbed.cluster import running_testbeds, start_ticks, what_is_missing
from tools.testbed.medium import Medium
from tools.testbed.scenario import NOMINAL_CORE_SECONDS

pytestmark = [pytest.mark.namespaces, pytest.mark.alone]

REPOSITORY = Path(__file__).parents[2]
PAIR = Scenario(
    name="test-pair",
    devices=(
        EmulatedDevice(name="one", cpu_share=0.5, core=min(os.sched_getaffinity(0)), mbit=50),
        EmulatedDevice(name="two", cpu_share=0.5, core=max(os.sched_getaffinity(0)), mbit=50, memory_bytes=128 << 20),
    ),
)

RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5001))
print("listening", flush=True)
while True:
    stream, _ = server.accept()
    while stream.recv(1 << 16):
        pass
    stream.close()
"""
SEND = """
import socket, sys, time
stream = socket.create_connection((sys.argv[1], 5001), timeout=10)
stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
size, chunk = int(sys.argv[2]), bytes(1 << 16)
began = time.monotonic()
for _ in range(size // len(chunk)):
    stream.sendall(chunk)
stream.shutdown(socket.SHUT_WR)
stream.recv(1)  # the other end closes when all has arrived
print(size * 8 / (time.monotonic() - began) / 1e6)
"""
CONNECT = """
import socket, sys, time
for _ in range(2):  # the first one also asks for the address
    began = time.monotonic()
    socket.create_connection((sys.argv[1], 5001), timeout=10).close()
print(time.monotonic() - began)
"""
WAIT = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def everything_is_removed() -> Iterator[None]:
    if reason := what_is_missing():
        pytest.skip(reason)
    before = traces()
    yield
    assert traces() == before


def slots_of_others() -> set[str]:
    return {f"ht{running.slot}" for running in running_testbeds() if running.owner_pid != os.getpid()}


def traces() -> dict[str, set[str]]:
    """Everything that the testbeds of this test could leave, without that of other processes."""
    others = slots_of_others()
    namespaces = {line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()}
    groups = {
        path.name.removeprefix("hearth-")
        for path in (*Path("/sys/fs/cgroup").glob("hearth-ht*"), *Path("/sys/fs/cgroup").glob("*/hearth-ht*"))
    }
    links = {link["ifname"] for link in json.loads(command("ip", "-json", "link", "show"))}
    others |= slots_of_others()  # also those that were started meanwhile
    return {
        "namespaces": {name for name in namespaces if name.split("-")[0] not in others},
        "cgroups": groups - others,
        "links": links,
        "processes": {child.name() for child in psutil.Process().children(recursive=True)},
    }


def command(*arguments: str) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=180).stdout


def python(testbed: Testbed, device: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    return testbed.popen(device, sys.executable, "-c", program, *arguments, stdout=subprocess.PIPE)


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def link_of(testbed: Testbed, device: str) -> tuple[float, bool]:
    """The rate in Mbit/s of a device's link, and whether it is cut."""
    port, switch = f"to-{device}", testbed.network.namespace("switch")
    bucket = json.loads(command("tc", "-n", switch, "-json", "qdisc", "show", "dev", port, "root"))
    link = json.loads(command("ip", "-n", switch, "-json", "link", "show", port))
    return bucket[0]["options"]["rate"] * 8 / 1e6, "UP" not in link[0]["flags"]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Testbed]:
    with Testbed(PAIR, tmp_path) as testbed:
        yield testbed


def test_link_rate_holds_and_can_change_during_a_transfer(pair: Testbed) -> None:
    receiver = python(pair, "two", RECEIVE, pair.address("two"))
    assert first_line(receiver) == "listening"

    def reaches(mbit: float, size: int) -> bool:
        """Other load makes a transfer slower, and nothing makes it faster than its link."""
        rate = float(first_line(python(pair, "one", SEND, pair.address("two"), str(size))))
        assert rate < 1.15 * mbit
        return rate > 0.85 * mbit

    wait_for("a transfer at the link's rate", lambda: reaches(50, 3 << 20))
    sender = python(pair, "one", SEND, pair.address("two"), str(12 << 20))
    pair.set_mbit(200)  # early in the transfer of 12 MiB, which takes 2 s at 50 Mbit/s
    assert float(first_line(sender)) > 60
    wait_for("a transfer at the new rate", lambda: reaches(200, 6 << 20))
    assert {link_of(pair, name) for name in ("one", "two")} == {(200.0, False)}


def test_cut_link_blocks_traffic_but_keeps_connections(pair: Testbed) -> None:
    receiver = python(pair, "two", RECEIVE, pair.address("two"))
    assert first_line(receiver) == "listening"
    sender = python(pair, "one", SEND, pair.address("two"), str(6 << 20))  # takes 1 s

    def connected() -> bool:
        return pair.address("two") in command("ip", "netns", "exec", pair.network.namespace("one"), "ss", "-Htn")

    wait_for("the connection", connected)
    pair.network.cut("two")
    assert link_of(pair, "two")[1]
    with pytest.raises(subprocess.TimeoutExpired):
        sender.wait(1.5)
    pair.network.mend("two")
    assert float(first_line(sender)) < 35  # 1 s at 50 Mbit/s, prolonged by the cut
    assert not link_of(pair, "two")[1]


@pytest.mark.thorough
def test_stations_share_their_medium_and_its_delay(tmp_path: Path) -> None:
    """Between stations everything crosses the air twice; to a wired device once. Each crossing takes 5 ms."""
    names = {"one": "wifi", "two": "wifi", "wired": None}
    devices = tuple(EmulatedDevice(name=name, cpu_share=0.5, mbit=500, medium=medium) for name, medium in names.items())
    air = Medium(name="wifi", mbit=40, delay_ms=5)
    with Testbed(Scenario(name="test-air", media=(air,), devices=devices), tmp_path) as testbed:
        receivers = [python(testbed, name, RECEIVE, testbed.address(name)) for name in ("two", "wired")]
        assert {first_line(receiver) for receiver in receivers} == {"listening"}

        def seconds(target: str) -> float:
            return float(first_line(python(testbed, "one", CONNECT, testbed.address(target))))

        wait_for("a handshake over two crossings each way", lambda: 0.020 <= seconds("two") < 0.028)
        wait_for("a handshake over one crossing each way", lambda: 0.010 <= seconds("wired") < 0.018)
        size = str(2 << 20)
        senders = [python(testbed, "one", SEND, testbed.address(target), size) for target in ("two", "wired")]
        rates = [float(first_line(sender)) for sender in senders]
        assert 2 * rates[0] + rates[1] < 1.25 * 40  # the first to end leaves its share to the other
        testbed.network.cut("one")
        with pytest.raises(subprocess.TimeoutExpired):
            python(testbed, "one", CONNECT, testbed.address("wired")).wait(1.0)


def test_link_rates_scale_with_device_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Testbed, "_core_seconds", lambda testbed: NOMINAL_CORE_SECONDS / 3)
    with Testbed(PAIR.model_copy(update={"name": "scaled", "scale_links": True}), tmp_path) as testbed:
        assert testbed.link_scale == pytest.approx(3.0)
        assert link_of(testbed, "one")[0] == pytest.approx(150, rel=1e-4)
        testbed.set_mbit(40)
        assert link_of(testbed, "one")[0] == pytest.approx(40, rel=1e-4)


@pytest.mark.thorough
def test_device_speed_is_measured(tmp_path: Path) -> None:
    """Under the CPU quota: with 0.9 of a core each, so that it takes little longer than on whole cores."""
    pytest.importorskip("torch")
    devices = tuple(device.model_copy(update={"cpu_share": 0.9}) for device in PAIR.devices)
    with Testbed(PAIR.model_copy(update={"devices": devices}), tmp_path) as testbed:
        assert 0.01 < testbed._core_seconds() < 30


def test_cpu_share_limits_a_loop(pair: Testbed) -> None:
    """CPU seconds per elapsed second: a busy machine may give less for a while, but never more."""
    busy = """
import sys, time
print("begun", flush=True)
sys.stdin.readline()
began, cpu = time.monotonic(), time.process_time()
while time.monotonic() < began + 1.5:
    pass
print((time.process_time() - cpu) / (time.monotonic() - began), flush=True)
"""
    pair.cgroups["one"].set_cpu_share(0.3)
    assert pair.cgroups["one"].cpu_share() == pytest.approx(0.3, abs=1e-3)

    def reaches_it() -> bool:
        loop = pair.popen("one", sys.executable, "-c", busy, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert first_line(loop) == "begun"
        assert loop.stdin is not None
        loop.stdin.write(b"\n")
        loop.stdin.flush()
        share = float(first_line(loop))
        assert share < 0.36
        return share > 0.24

    wait_for("a loop with its whole share", reaches_it)


def test_process_above_the_memory_limit_is_killed(pair: Testbed) -> None:
    fill = (
        "import sys; held = bytearray(int(sys.argv[1]) << 20); held[::4096] = bytes(len(held) // 4096); print('fits')"
    )
    assert python(pair, "two", fill, "300").wait(60) == -signal.SIGKILL
    assert python(pair, "two", fill, "50").wait(60) == 0
    assert python(pair, "one", fill, "300").wait(60) == 0  # no limit on this device


def test_agent_sees_the_memory_limit_of_its_device(pair: Testbed) -> None:
    look = "from agent.daemon.telemetry import memory; print(memory()[0])"
    assert first_line(python(pair, "two", look)) == str(128 << 20)


def test_orphaned_testbed_is_removed_by_the_next(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from tools.testbed import Scenario, Testbed
with Testbed(Scenario.model_validate_json(sys.argv[1]), Path(sys.argv[2])) as testbed:
    print(testbed.popen("one", sys.executable, "-c", {WAIT!r}).pid, flush=True)
    time.sleep(600)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program, PAIR.model_dump_json(), str(tmp_path / "orphan")],
        stdout=subprocess.PIPE, cwd=REPOSITORY,
    )  # fmt: skip
    inside = int(first_line(owner))
    owner.kill()
    owner.wait(30)
    assert start_ticks(inside) is not None  # it outlived its owner
    assert any(running.orphaned and running.owner_pid == owner.pid for running in running_testbeds())
    with Testbed(PAIR, tmp_path / "next"):
        assert start_ticks(inside) is None
        assert not any(running.owner_pid == owner.pid for running in running_testbeds())


def test_concurrent_testbeds_use_different_slots(tmp_path: Path) -> None:
    with Testbed(PAIR, tmp_path / "first") as first, Testbed(PAIR, tmp_path / "second") as second:
        assert first.address("one") != second.address("one")
