"""Link measurements and chunks between agents."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from support.contexts import zmq_context

from agent.daemon.links import LinkServer, fetch_chunks, measure_link
from agent.daemon.store import ShardStore
from hearth.errors import (
    WrongKey,
)
from hearth.platform.authenticators import asyncio_gatekeeper
from hearth.platform.curve import new_keypair
from hearth.transport.base import Buffer
from hearth.wire.messages import (
    FetchChunks,
    MeasureLink,
    OpenLinkProbe,
)


async def no_chunk(chunk: str) -> bytes:
    return b""


def test_link_is_measured_within_limits_for_authorised_peers() -> None:
    async def scenario() -> None:
        with zmq_context() as context:
            gatekeeper = asyncio_gatekeeper(context)
            mine, theirs = new_keypair(), new_keypair()
            server = LinkServer(context, gatekeeper, "127.0.0.1", 0, theirs, no_chunk)
            gatekeeper.start()
            request = MeasureLink(
                host="127.0.0.1",
                port=server.port,
                peer_public_key=theirs.public,
                max_bytes=8 << 20,
                max_seconds=1.0,
            )
            try:
                with pytest.raises(WrongKey):
                    await measure_link(request, mine)
                server.open(OpenLinkProbe(peer_public_key=mine.public, seconds=30.0))
                measured = await asyncio.wait_for(measure_link(request, mine), 20)
                assert measured.bytes_per_second > 1e6
                assert measured.round_trip_seconds > 0
                assert measured.num_bytes <= 8 << 20
                with pytest.raises(WrongKey):
                    await measure_link(request, new_keypair())
            finally:
                await server.close()
                gatekeeper.stop()

    asyncio.run(scenario())


def test_chunks_are_fetched_from_an_authorising_peer(tmp_path: Path) -> None:
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

    async def scenario() -> None:
        with zmq_context() as context:
            gatekeeper = asyncio_gatekeeper(context)
            mine, peer = new_keypair(), new_keypair()
            server = LinkServer(context, gatekeeper, "127.0.0.1", 0, peer, read)
            gatekeeper.start()
            request = FetchChunks(
                holder="c",
                host="127.0.0.1",
                port=server.port,
                peer_public_key=peer.public,
                hashes=tuple(hashes),
                seconds=10.0,
            )
            try:
                refused = await fetch_chunks(request.model_copy(update={"seconds": 1.0}), mine, store)
                assert sorted(refused) == sorted(hashes)
                server.open(OpenLinkProbe(peer_public_key=mine.public, seconds=30.0))
                missing = await asyncio.wait_for(fetch_chunks(request, mine, store), 20)
            finally:
                await server.close()
                gatekeeper.stop()
        assert sorted(missing) == sorted([hashes[3], *hashes[8:]])
        assert sorted(ours.missing(tuple(hashes))) == sorted(missing)

    asyncio.run(scenario())
