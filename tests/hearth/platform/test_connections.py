"""The kernel's options of this process's connections, over loopback."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hearth.platform import connections
from hearth.platform.connections import pace_connections, use_bbr_on_radio

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closed:
        yield closed


def connect(stack: ExitStack) -> tuple[socket.socket, socket.socket, int]:
    """A client, the server's end, and the server's port."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = stack.enter_context(socket.create_connection(server.getsockname(), timeout=5))
    accepted, _ = server.accept()
    return client, stack.enter_context(accepted), server.getsockname()[1]


def pace(end: socket.socket) -> int:
    return end.getsockopt(socket.SOL_SOCKET, MAX_PACING_RATE) & 0xFFFFFFFF


def test_both_ends_of_a_ports_connections_are_paced_and_no_others(stack: ExitStack) -> None:
    client, accepted, port = connect(stack)
    other_client, other_accepted, _ = connect(stack)
    pace_connections(port, 1_000_000)
    assert (pace(client), pace(accepted)) == (1_000_000, 1_000_000)
    assert (pace(other_client), pace(other_accepted)) == (0xFFFFFFFF, 0xFFFFFFFF)
    client.sendall(b"still open")
    assert accepted.recv(10) == b"still open"


def congestion_control(end: socket.socket) -> str:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def has_bbr() -> bool:
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return available.is_file() and "bbr" in available.read_text().split()


@pytest.mark.skipif(not has_bbr(), reason="the kernel's module tcp_bbr is not loaded")
def test_bbr_sends_where_round_trips_are_too_long_for_a_wire(stack: ExitStack) -> None:
    client, accepted, _ = connect(stack)
    for end in (client, accepted):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # which every kernel has
    use_bbr_on_radio()
    assert [congestion_control(end) for end in (client, accepted)] == ["reno"] * 2
    use_bbr_on_radio(wire_seconds=0.0)
    assert [congestion_control(end) for end in (client, accepted)] == ["bbr"] * 2
    client.sendall(b"still open")
    assert accepted.recv(10) == b"still open"


def test_a_system_without_bbr_keeps_its_congestion_control(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = connect(stack)
    before = congestion_control(client)
    monkeypatch.setattr(connections, "_BBR", b"no-such-module")
    use_bbr_on_radio(wire_seconds=0.0)
    assert congestion_control(client) == before
