"""Link measurements and chunks between agents."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")

from support.contexts import zmq_context

from agent.daemon import links
from agent.daemon.links import LinkServer, fetch_chunks, measure_link
from agent.daemon.store import ShardStore
from hearth.errors import WrongKey
from hearth.platform.curve import KeyPair, new_keypair
from hearth.platform.loop_gatekeeper import LoopGatekeeper
from hearth.transport.base import Buffer
from hearth.wire import messages as wire


async def no_chunk(chunk: str) -> bytes:
    return b""


@asynccontextmanager
async def link_server(keys: KeyPair, read: Callable[[str], Awaitable[bytes]]) -> AsyncIterator[LinkServer]:
    with zmq_context() as context:
        gatekeeper = LoopGatekeeper(context)
        server = LinkServer(context, gatekeeper, "127.0.0.1", 0, keys, read)
        gatekeeper.start()
        try:
            yield server
        finally:
            await server.close()
            await gatekeeper.close()


async def test_link_is_measured_within_limits_for_authorised_peers() -> None:
    mine, theirs = new_keypair(), new_keypair()
    async with link_server(theirs, no_chunk) as server:
        request = wire.MeasureLink(
            host="127.0.0.1", port=server.port, peer_public_key=theirs.public, max_bytes=8 << 20, max_seconds=1.0
        )
        with pytest.raises(WrongKey):
            await measure_link(request, mine)
        server.open(wire.OpenLinkProbe(peer_public_key=mine.public, seconds=30.0))
        measured = await asyncio.wait_for(measure_link(request, mine), 20)
        assert measured.bytes_per_second > 1e6
        assert measured.round_trip_seconds > 0
        assert measured.num_bytes <= 8 << 20
        with pytest.raises(WrongKey):
            await measure_link(request, new_keypair())


async def test_chunks_are_fetched_from_an_authorising_peer(tmp_path: Path) -> None:
    """Absent, damaged and unauthorised chunks are reported as missing, so that they can be fetched elsewhere."""
    contents = [bytes([index]) * 1000 for index in range(10)]
    hashes = [hashlib.sha256(content).hexdigest() for content in contents]
    theirs, ours = ShardStore(tmp_path / "theirs", 1 << 30, "peer"), ShardStore(tmp_path / "ours", 1 << 30, "here")
    for digest, content in zip(hashes[:8], contents, strict=False):
        theirs.put(digest, content)
    theirs.path_of(hashes[3]).write_bytes(b"damaged")

    async def read(chunk: str) -> bytes:
        return theirs.path_of(chunk).read_bytes()

    async def store(chunk: str, data: Buffer) -> None:
        ours.put(chunk, data)

    mine, peer = new_keypair(), new_keypair()
    async with link_server(peer, read) as server:
        request = wire.FetchChunks(
            holder="c", host="127.0.0.1", port=server.port, peer_public_key=peer.public, hashes=tuple(hashes),
            seconds=10.0,
        )  # fmt: skip
        refused = await fetch_chunks(request.model_copy(update={"seconds": 1.0}), mine, store)
        assert sorted(refused) == sorted(hashes)
        server.open(wire.OpenLinkProbe(peer_public_key=mine.public, seconds=30.0))
        missing = await asyncio.wait_for(fetch_chunks(request, mine, store), 20)
    assert sorted(missing) == sorted([hashes[3], *hashes[8:]])
    assert sorted(ours.missing(tuple(hashes))) == sorted(missing)


def measured_rate(link: Any) -> wire.LinkMeasured:
    request = wire.MeasureLink(host="a", port=1, peer_public_key="k" * 40, max_bytes=64 << 20, max_seconds=1.0)
    return asyncio.run(links._measure_rate(link, request))


@pytest.mark.parametrize(
    ("round_trip", "bytes_per_second", "late"),
    [(0.0005, 110e6, 0.001), (0.012, 12e6, 0.01), (0.04, 3.75e6, 0.03)],
    ids=["Ethernet", "Wi-Fi", "busy Wi-Fi"],
)
def test_bursts_are_long_against_what_delays_their_last_packet(
    monkeypatch: pytest.MonkeyPatch, round_trip: float, bytes_per_second: float, late: float
) -> None:
    now = [0.0]

    class Link:
        """Answers a burst after its transfer and a round trip; every burst is `late`, as by a packet that is sent again."""

        async def call(self, message: wire.Message, payload: Sequence[bytes], timeout_seconds: float) -> None:
            num_bytes = sum(map(len, payload))
            now[0] += round_trip + (num_bytes / bytes_per_second + late if num_bytes else 0.0)

    monkeypatch.setattr(links, "loop_time", lambda: now[0])
    measured = measured_rate(Link())
    assert measured.round_trip_seconds == pytest.approx(round_trip)
    assert 0.75 * bytes_per_second < measured.bytes_per_second <= bytes_per_second
    assert now[0] < 1.5


@pytest.mark.parametrize("round_trip", [0.0005, 0.012, 0.043], ids=["Ethernet", "Wi-Fi", "busy Wi-Fi"])
def test_the_slow_start_of_a_connection_is_not_its_rate(monkeypatch: pytest.MonkeyPatch, round_trip: float) -> None:
    now, bytes_per_second = [0.0], 3.2e6

    class Link:
        """A connection whose window begins with ten packets, and doubles with each round trip until the link is full."""

        window = 14_600.0

        async def call(self, message: wire.Message, payload: Sequence[bytes], timeout_seconds: float) -> None:
            left = float(sum(map(len, payload)))
            now[0] += round_trip
            while left > 0:
                sent = min(self.window, left)
                is_full = self.window >= bytes_per_second * round_trip
                now[0] += sent / bytes_per_second if is_full or sent == left else round_trip
                self.window *= 1 if is_full else 2
                left -= sent

    monkeypatch.setattr(links, "loop_time", lambda: now[0])
    measured = measured_rate(Link())
    assert 0.9 * bytes_per_second < measured.bytes_per_second <= 1.01 * bytes_per_second
