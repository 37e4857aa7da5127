"""Interfaces, units, discovery records, plans, traces, notifications, and what importing costs."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import BERT_LARGE, make_plan

from hearth.client import endpoint_of
from hearth.discovery import (
    AGENT_SERVICE,
    COORDINATOR_SERVICE,
    Advertiser,
    Browser,
    Found,
    find_coordinator,
    parse_static_peers,
)
from hearth.errors import BadPlan, BadSetting
from hearth.interfaces import Interface, choose, why_skipped
from hearth.messages import DeviceTrace, StepDone, TraceEvent, WireStats
from hearth.notify import Notifier
from hearth.plan import plan_from_json
from hearth.profile import LatencyCurve
from hearth.trace import chrome_trace, overlap_seconds, shift_to_common_clock, transfers
from hearth.units import format_bytes, format_rate, format_seconds, parse_bytes

# ---- importing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import hearth", ("torch", "onnxruntime", "numpy", "zeroconf", "transformers")),
        ("import hearth; hearth.connect", ("torch", "onnxruntime", "numpy", "zeroconf")),
        ("import hearth.framing", ("torch", "lz4", "zeroconf")),
        ("import agent.main, agent.daemon", ("torch", "onnxruntime", "numpy")),
        ("import coordinator.cli.app", ("torch", "onnxruntime", "transformers")),
    ],
)
def test_importing_loads_nothing_heavy(statement: str, forbidden: tuple[str, ...]) -> None:
    pytest.importorskip("psutil")
    code = f"{statement}\nimport sys\nprint([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_these() -> None:
    import hearth

    assert sorted(hearth.__all__) == [
        "AsyncHome",
        "HearthError",
        "Home",
        "__version__",
        "connect",
        "connect_async",
    ]
    assert all(getattr(hearth, name) for name in hearth.__all__)
    with pytest.raises(AttributeError):
        _ = hearth.nonsense


# ---- interfaces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "address", "is_up", "used"),
    [
        ("eth0", "192.168.1.5", True, True),
        ("wlan0", "10.0.0.3", True, True),
        ("enP8p1s0", "192.168.1.9", True, True),
        ("docker0", "172.17.0.1", True, False),
        ("br-1a2b3c", "172.18.0.1", True, False),
        ("veth12ab", "172.19.0.1", True, False),
        ("l4tbr0", "192.168.55.1", True, False),
        ("usb0", "192.168.55.1", True, False),
        ("rndis0", "192.168.55.1", True, False),
        ("wg0", "10.8.0.2", True, False),
        ("eth1", "169.254.3.4", True, False),
        ("eth1", "fe80::1%eth1", True, False),
        ("eth2", "192.168.2.5", False, False),
        ("lo", "127.0.0.1", True, False),
    ],
)
def test_which_interfaces_are_used(name: str, address: str, is_up: bool, used: bool) -> None:
    assert (why_skipped(name, address, is_up) == "") is used


def interface(name: str, address: str, wireless: bool = False, speed: int = 1000) -> Interface:
    return Interface(name, address, True, wireless, speed, why_skipped(name, address, True))


def test_wired_and_fast_come_first_and_the_user_has_the_last_word() -> None:
    found = [
        interface("docker0", "172.17.0.1", speed=10000),
        interface("wlan0", "192.168.1.7", wireless=True, speed=5000),
        interface("eth1", "192.168.1.8", speed=100),
        interface("eth0", "192.168.1.6"),
        interface("lo", "127.0.0.1"),
    ]
    assert choose(found, None).name == "eth0"
    assert choose(found, "wlan0").name == "wlan0"
    assert choose(found, "172.17.0.1").name == "docker0"
    assert choose([found[0], found[4]], None).name == "lo"
    with pytest.raises(BadSetting, match=r"no 'eth9'.*eth0 \(192.168.1.6\)"):
        choose(found, "eth9")


# ---- units ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("800M", 800_000_000), ("2GiB", 2 << 30), ("1.5 ki", 1536), ("12", 12), ("3 kb", 3000)],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-3", "2 bananas", "1e9", "2GiBi"])
def test_sizes_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


def test_figures_as_people_read_them() -> None:
    assert [format_bytes(n) for n in (12, 1536, 5 << 20, 3 << 40)] == [
        "12 B",
        "1.50 KiB",
        "5.00 MiB",
        "3.00 TiB",
    ]
    assert [format_seconds(s) for s in (2.5, 0.0352, 0.00018)] == ["2.50 s", "35.2 ms", "180 µs"]
    assert [format_rate(r) for r in (15.625e6, 1.25e8)] == ["125 Mbit/s", "1.00 Gbit/s"]


# ---- discovery ------------------------------------------------------------------------------------------------------


def test_static_peers_by_table() -> None:
    assert parse_static_peers("a, b:1234,[fe80::1]:5,[::1]") == (
        ("a", 47800),
        ("b", 1234),
        ("fe80::1", 5),
        ("::1", 47800),
    )
    assert endpoint_of("box") == "tcp://box:47830"
    for nonsense in ("", "a:b", "a:0", "a:99999", ":5", "two words"):
        with pytest.raises(BadSetting, match="address"):
            parse_static_peers(nonsense)


def test_services_are_found_over_mdns_and_show_nothing_more_than_they_must() -> None:
    async def scenario() -> None:
        found: asyncio.Queue[Found] = asyncio.Queue()
        browser = Browser(AGENT_SERVICE, found.put_nowait, ["127.0.0.1"])
        agent = Advertiser(AGENT_SERVICE, 4711, "f" * 16, "1234abcd", ["127.0.0.1"])
        boss = Advertiser(COORDINATOR_SERVICE, 4712, "e" * 16, "5678abcd", ["127.0.0.1"])
        await browser.start()
        await agent.start()
        await boss.start()
        try:
            first = await asyncio.wait_for(found.get(), 20)
            while first.id != "1234abcd":  # another agent may be on this machine
                first = await asyncio.wait_for(found.get(), 20)
            assert first == Found("1234abcd", ("127.0.0.1",), 4711, 1, "f" * 16)
            assert (await find_coordinator("e" * 16, 20, ["127.0.0.1"])).port == 4712  # type: ignore[union-attr]
            assert await find_coordinator("0" * 16, 0.3, ["127.0.0.1"]) is None
        finally:
            await browser.stop()
            await agent.stop()
            await boss.stop()

    asyncio.run(scenario())


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_plans_survive_json() -> None:
    plan = make_plan(BERT_LARGE, "hmp", (3, 1, 2))
    assert plan_from_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"heads": [8, 8, 1]}, "sum to 16"),
        ({"heads": [16]}, "1 shares for 3 devices"),
        ({"columns": [4095, 1, 0]}, "grains of 64"),
        ({"row_weights": [0, 0, 0]}, "not all zero"),
        ({"strategy": "local"}, "exactly one device"),
        ({"strategy": "magic"}, "strategy"),
    ],
)
def test_a_plan_that_was_edited_wrongly_says_where(change: dict, match: str) -> None:
    data = json.loads(make_plan(BERT_LARGE, "hmp", (1, 1, 0)).model_dump_json())
    data["body"].update(change)
    with pytest.raises(BadPlan, match=match):
        plan_from_json(json.dumps(data))
    with pytest.raises(BadPlan):
        plan_from_json("{")


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=6), st.floats(0, 3000))
def test_latency_curves_pass_through_their_points_and_never_below_zero(seconds: list[float], size: float) -> None:
    sizes = tuple(range(64, 64 * (len(seconds) + 1), 64))
    curve = LatencyCurve(sizes=sizes, seconds=tuple(seconds))
    assert [curve(s) for s in sizes] == pytest.approx(seconds)
    assert curve(size) >= 0
    assert curve(0) == 0


# ---- traces ---------------------------------------------------------------------------------------------------------


def event(name: str, lane: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(name=name, lane=lane, start_seconds=start, end_seconds=end, num_bytes=5)  # type: ignore[arg-type]


def test_transfers_are_drawn_from_send_to_arrival_and_their_overlap_is_counted() -> None:
    traces = [
        DeviceTrace(device="a", events=(event("tile 0->1", "send", 1.0, 1.0),)),
        DeviceTrace(device="b", events=(event("tile 0->1", "receive", 3.0, 3.0), event("qkv", "compute", 2.0, 5.0))),
    ]
    (transfer,) = transfers(traces)
    assert (transfer.sender, transfer.receiver, transfer.start_seconds, transfer.end_seconds) == (
        "a",
        "b",
        1.0,
        3.0,
    )
    assert overlap_seconds(traces) == pytest.approx(1.0)
    bars = [bar for bar in chrome_trace(traces)["traceEvents"] if bar["ph"] == "X"]
    assert {(bar["name"], bar["ts"], bar["dur"]) for bar in bars} == {
        ("qkv", 1e6, 3e6),
        ("tile 0->1", 0.0, 2e6),
    }


def test_clocks_are_brought_together_from_the_round_trip() -> None:
    done = StepDone(
        first_row=0, num_rows=1, began_seconds=100.0, ended_seconds=102.0, wire=WireStats(), dropped_messages=0,
        trace=(event("x", "compute", 101.0, 101.5),),
    )  # fmt: skip
    (shifted,) = shift_to_common_clock(done, sent_seconds=5.0, answered_seconds=8.0)  # half a second each way
    assert (shifted.start_seconds, shifted.end_seconds) == (6.5, 7.0)


# ---- systemd --------------------------------------------------------------------------------------------------------


def test_systemd_is_told_when_it_listens(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"})
        notifier.send("READY=1", "STATUS=fine")
        assert listener.recv(100) == b"READY=1\nSTATUS=fine"
        assert notifier.watchdog_seconds == 3.0
    Notifier({}).send("READY=1")
