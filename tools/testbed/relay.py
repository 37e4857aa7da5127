"""The relay of a shared medium: passes the frames of its stations on, each when the medium has carried it.

`python -m tools.testbed.relay MEDIUM STARTED STATIONS`, in the switch's namespace, with the medium and the interfaces of each
station as JSON; makes the file STARTED as soon as it passes frames on. Each station has two interfaces there: the outer end of
its own link, and the inner end of a link to the bridge. Frames are read from one and written to the other by packet sockets,
with the kernel's own offload header, so that large segments stay whole. It runs outside all devices' CPU quotas, until it is
killed.
"""

from __future__ import annotations

import heapq
import json
import select
import socket
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

from tools.testbed.medium import Air, Medium, Queues

_EVERY_PROTOCOL = 3  # ETH_P_ALL of linux/if_ether.h
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15  # each frame has a header with the state of its checksum and segmentation
_PACKET_IGNORE_OUTGOING = 23  # do not receive what this relay sends
_VNET_HEADER_BYTES = 10
_MOST_BYTES = (64 << 10) + 256  # the largest frame that the kernel hands over
_BUFFER_BYTES = 4 << 20
_BATCH = 64  # frames read from one socket before others have their turn


class _Way(NamedTuple):
    """One direction of a station's traffic."""

    station: str
    to_bridge: bool


class Relay:
    """Carries frames between pairs of packet sockets. `stations`: outer and inner interface by station."""

    def __init__(self, medium: Medium, stations: dict[str, tuple[str, str]], seed: int = 0) -> None:
        self._air = Air(medium, Random(seed), time.monotonic())
        self._queues = Queues()
        self._ways: dict[socket.socket, tuple[_Way, socket.socket]] = {}  # by the socket that receives
        for station, (outer, inner) in stations.items():
            ends = _packet_socket(outer), _packet_socket(inner)
            self._ways[ends[0]] = _Way(station, True), ends[1]
            self._ways[ends[1]] = _Way(station, False), ends[0]
        self._on_the_way: list[tuple[float, int, _Way, socket.socket, bytes]] = []
        self._numbers = count()  # frames that arrive at the same time keep their order

    def run_once(self) -> None:
        """Wait for frames or for the next arrival, and handle what is due."""
        wait = max(self._on_the_way[0][0] - time.monotonic(), 0.0) if self._on_the_way else None
        readable, _, _ = select.select(list(self._ways), [], [], wait)
        for source in readable:
            self._take(source)
        now = time.monotonic()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, _, way, target, frame = heapq.heappop(self._on_the_way)
            self._queues.leave(way, len(frame))
            with suppress(OSError):  # no buffer, or the link is cut: lost, as on a real link
                target.send(frame)

    def _take(self, source: socket.socket) -> None:
        way, target = self._ways[source]
        for _ in range(_BATCH):
            try:
                frame = source.recv(_MOST_BYTES)
            except OSError:  # no more frames, or the interface is down, while a device's link is cut
                return
            if not self._queues.enter(way, len(frame)):
                continue
            due = self._air.arrival(way, len(frame) - _VNET_HEADER_BYTES, time.monotonic())
            if due is None:
                self._queues.leave(way, len(frame))
            else:
                heapq.heappush(self._on_the_way, (due, next(self._numbers), way, target, frame))


def _packet_socket(interface: str) -> socket.socket:
    """A socket that receives all frames of an interface and sends frames as they are. Raises OSError."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    found.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        found.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    found.setblocking(False)
    found.bind((interface, _EVERY_PROTOCOL))
    return found


def main() -> None:
    """Carry frames until the process is killed."""
    medium, started, stations = sys.argv[1:]
    relay = Relay(Medium.model_validate_json(medium), json.loads(stations))
    Path(started).touch()
    while True:
        relay.run_once()


if __name__ == "__main__":
    main()
