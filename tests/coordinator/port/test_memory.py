"""The client port's process ends connections while it takes too much memory: which ones, and when."""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import suppress

import pytest

from coordinator.port.process import MemoryGuard, heaviest, resident_bytes
from hearth.platform.connections import end_connection, received_bytes

MEGABYTE = 1 << 20
LIMIT = 100 * MEGABYTE


class Process:
    """A process with connections, and a guard of its memory."""

    def __init__(self) -> None:
        self.resident = 0
        self.received: dict[int, int] = {}
        self.ended: list[int] = []
        self.guard = MemoryGuard(LIMIT, lambda: self.resident, lambda: dict(self.received), self.ended.append)


def test_connection_that_receives_most_ends_once_the_memory_is_short() -> None:
    process = Process()
    process.resident, process.received = 60 * MEGABYTE, {1: 900 * MEGABYTE, 2: 30 * MEGABYTE}
    assert process.guard.look(0.0) == 0
    process.resident, process.received = 110 * MEGABYTE, {1: 901 * MEGABYTE, 2: 80 * MEGABYTE}
    assert process.guard.look(0.05) == 0  # not yet time for the next look
    assert process.guard.look(0.1) == 1
    assert process.ended == [2]
    process.resident = 20 * MEGABYTE
    assert process.guard.look(0.2) == 0


def test_all_that_receive_as_much_as_the_heaviest_are_ended() -> None:
    assert sorted(heaviest({}, {1: 64 * MEGABYTE, 2: 60 * MEGABYTE, 3: 20 * MEGABYTE})) == [1, 2]


def test_without_growth_those_end_that_have_received_most_before() -> None:
    held = {1: 64 * MEGABYTE, 2: 60 * MEGABYTE, 3: 2 * MEGABYTE}
    assert sorted(heaviest(held, {**held, 3: held[3] + 5000})) == [1, 2]
    assert heaviest({}, {}) == []


def test_bytes_of_each_connection_are_counted_and_one_can_be_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
            sender.sendall(bytes(5000))
            assert receiver.recv(5000, socket.MSG_WAITALL)
            counted = received_bytes()
            assert counted[receiver.fileno()] == 5000
            assert counted[sender.fileno()] == 0
            assert server.fileno() not in counted
            sender.sendall(bytes(5000))
            end_connection(receiver.fileno())
            with pytest.raises(OSError, match="Errno"):  # what has arrived is dropped
                receiver.recv(1)
            with suppress(ConnectionResetError):
                assert sender.recv(1) == b""
        end_connection(server.fileno() + 1000)  # a descriptor of nothing
        assert os.fstat(server.fileno())


def test_memory_of_this_process_is_known() -> None:
    before = resident_bytes()
    held = mmap.mmap(-1, 20 * MEGABYTE)  # the heap may have as much to spare
    held.write(bytes(20 * MEGABYTE))
    assert resident_bytes() - before > 15 * MEGABYTE
    assert len(held) == 20 * MEGABYTE
