"""CURVE sockets: what a peer cannot do to the process, and the trace that refused connections and messages leave in the log."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from hearth.platform.curve import Refusals, _Callback, fingerprint, new_keypair

BROKEN = """
import os, socket, struct, time
import zmq
from zmq.utils.monitor import recv_monitor_message
from hearth.platform.curve import harden

MESSAGES = 20_000  # more than any default limit, and than the kernel's buffers

def main():
    server_context, client_context = zmq.Context(), zmq.Context()
    server, client = server_context.socket(zmq.ROUTER), client_context.socket(zmq.DEALER)
    for each in (server, client):
        harden(each)
        each.setsockopt(zmq.HEARTBEAT_IVL, 20)
    client.sndhwm = 0
    monitor = client.get_monitor_socket(zmq.EVENT_CONNECTED)
    client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
    descriptor = recv_monitor_message(monitor)["value"]
    with socket.socket(fileno=os.dup(descriptor)) as connection:  # closing it is a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.disable_monitor()
    for _ in range(MESSAGES):
        client.send(b"a" * 100)
    time.sleep(0.5)
    client.close()
    client_context.destroy()
    time.sleep(0.3)  # 15 heartbeats
    received = 0
    while server.poll(200):
        received += len(server.recv_multipart()) == 2
    print(received, flush=True)
    server_context.destroy(linger=0)

main()
"""


def test_connection_that_breaks_while_its_messages_wait_harms_nobody() -> None:
    """With a limit of waiting messages, libzmq 4.3.5 would end the process at the next heartbeat."""
    ended = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert int(ended.stdout) > 1000


def test_refusals_are_logged_at_once_and_then_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    refusals = Refusals("messages", lambda: now)
    with caplog.at_level(logging.WARNING):
        refusals.note("the first")
        for _ in range(5000):
            refusals.note("a flood")
        now += 10.0
        refusals.note("the last")
    assert caplog.messages == [
        "messages refused: 1 more; the last: the first",
        "messages refused: 5001 more; the last: the last",
    ]
    assert refusals.count == 5002


def test_key_that_is_not_admitted_is_logged_with_its_fingerprint(caplog: pytest.LogCaptureFixture) -> None:
    stranger = new_keypair().public
    refusals = Refusals("connections")
    with caplog.at_level(logging.WARNING):
        assert not _Callback(lambda key: False, refusals).callback("a domain", stranger.encode())
    assert refusals.count == 1
    assert fingerprint(stranger) in caplog.text
    assert stranger not in caplog.text
