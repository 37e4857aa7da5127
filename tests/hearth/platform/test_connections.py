"""The kernel's options of this process's connections, over loopback."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hearth.platform.connections import pace_connections

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
