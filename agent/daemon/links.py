"""Requests between agents: link measurements and chunk transfers, on a port that admits a peer for a limited time.

Bandwidth and round trip are measured over CURVE-encrypted sockets, as the data plane uses: the measuring agent sends bursts of
frames from a DEALER to the other agent's ROUTER, whose short answer marks the end of each burst. Bursts are repeated until the
rate is stable, within limits of time and bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from hearth.errors import ChunkCorrupt, HearthError, WrongKey
from hearth.platform.asyncio_tools import all_or_first_error, loop_time
from hearth.platform.curve import Gatekeeper, KeyPair
from hearth.platform.network import bracketed
from hearth.platform.security import Access
from hearth.transport.base import Buffer
from hearth.wire.messages import Done, FetchChunks, GetChunk, LinkMeasured, MeasureLink, Message, OpenLinkProbe
from hearth.wire.rpc import Caller, Policy, Reply, RpcClient, RpcServer

log = logging.getLogger(__name__)

ZAP_DOMAIN = "link"
_FRAME_BYTES = 64 << 10  # about one tile; smaller frames would measure per-frame overhead
_PINGS = 7  # empty bursts, whose median is the round trip: three of them may be disturbed
_MIN_BURST_SECONDS = 0.03  # a shorter burst measures scheduling, not the link
# Round trips that a burst takes at least: over a radio link its end is late by jitter, or by a packet that was sent again, and
# both are of that order.
_BURST_ROUND_TRIPS = 4
_RATE_TOLERANCE = 0.05  # fraction within which the last bursts must agree; a smaller one would take many more bursts
_AGREEING_BURSTS = 3  # bursts; two could agree by chance
# A peer that takes longer to accept a connection is too slow for a plan; a recovery waits for this.
_HANDSHAKE_SECONDS = 1.5
_BURST_MARGIN_SECONDS = 2.0  # added to the measurement's time limit: the last burst may begin just before it
_CHUNKS_IN_FLIGHT = 4  # requests; enough to hide the round trip, few enough to limit the memory
_MAX_FRAMES_PER_BURST = 60  # a burst is one message, for which the rpc layer allows 64 frames


class LinkServer(RpcServer):
    """The server side: always bound, but admits a peer only for the time that `OpenLinkProbe` grants."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        gatekeeper: Gatekeeper,
        bind_host: str,
        port: int,
        keypair: KeyPair,
        read_chunk: Callable[[str], Awaitable[bytes]],
    ) -> None:
        self._read_chunk = read_chunk
        self._open_until: dict[str, float] = {}
        gatekeeper.admit(ZAP_DOMAIN, self._admits)
        policy = Policy({kind.tag: kind for kind in (Done, GetChunk)}, self._authorise)
        super().__init__(context, bind_host, port, keypair, ZAP_DOMAIN, self._answer, "--link-port", policy)

    def open(self, request: OpenLinkProbe) -> None:
        """Admit a peer for the requested time."""
        now = loop_time()
        self._open_until = {key: end for key, end in self._open_until.items() if end > now}
        self._open_until[request.peer_public_key] = now + request.seconds

    def _admits(self, public_key: str) -> bool:
        return loop_time() < self._open_until.get(public_key, 0.0)

    def _authorise(self, public_key: str, kind: type[Message]) -> None:
        if not self._admits(public_key):
            raise WrongKey(endpoint="the link port")

    async def _answer(self, caller: Caller, message: Message, payload: object) -> Message | Reply:
        if isinstance(message, GetChunk):
            return Reply(Done(), [await self._read_chunk(message.hash)])
        return Done()  # the burst has arrived


async def fetch_chunks(
    request: FetchChunks, own_keypair: KeyPair, store_chunk: Callable[[str, Buffer], Awaitable[None]]
) -> tuple[str, ...]:
    """Fetch chunks from another agent and pass each to `store_chunk`. Returns the hashes of missing and of damaged chunks.

    Raises the errors of `store_chunk`, except ChunkCorrupt.
    """
    missing: list[str] = []
    in_flight = asyncio.Semaphore(_CHUNKS_IN_FLIGHT)
    deadline = loop_time() + request.seconds
    async with _link_client(request, own_keypair) as client:

        async def fetch(chunk: str) -> None:
            async with in_flight:
                remaining = max(deadline - loop_time(), 0.001)
                try:
                    payload = (await client.call(GetChunk(hash=chunk), timeout_seconds=remaining)).payload
                except HearthError as error:  # whatever the cause, this chunk did not arrive
                    return mark_missing(chunk, str(error))
                if len(payload) != 1:
                    return mark_missing(chunk, f"it came as {len(payload)} frames")
                try:
                    await store_chunk(chunk, payload[0])
                except ChunkCorrupt as error:
                    mark_missing(chunk, str(error))

        def mark_missing(chunk: str, reason: str) -> None:
            log.info("the chunk %s did not arrive from %s: %s", chunk[:12], request.host, reason)
            missing.append(chunk)

        await all_or_first_error(map(fetch, request.hashes))
    return tuple(missing)


async def measure_link(request: MeasureLink, own_keypair: KeyPair) -> LinkMeasured:
    """Measure the link from this device to the requested one. Raises Unreachable, WrongKey or DeadlineExceeded."""
    async with _link_client(request, own_keypair) as client:
        return await _measure_rate(client, request)


@asynccontextmanager
async def _link_client(request: FetchChunks | MeasureLink, own_keypair: KeyPair) -> AsyncIterator[RpcClient]:
    """A client of another agent's link port."""
    context = zmq.asyncio.Context()
    access = Access(own_keypair, request.peer_public_key)
    client = RpcClient(context, f"tcp://{bracketed(request.host)}:{request.port}", access, name="link")
    try:
        yield client
    finally:
        await client.close()
        context.destroy(linger=0)


async def _measure_rate(client: RpcClient, request: MeasureLink) -> LinkMeasured:
    async def burst(num_frames: int, seconds: float = request.max_seconds + _BURST_MARGIN_SECONDS) -> float:
        start = loop_time()
        await client.call(Done(), [frame] * num_frames, timeout_seconds=seconds)
        return loop_time() - start

    frame = os.urandom(_FRAME_BYTES)  # random, so that compression on the link does not change the measured rate
    await burst(0, _HANDSHAKE_SECONDS)
    round_trip = statistics.median([await burst(0) for _ in range(_PINGS)])
    least = max(_MIN_BURST_SECONDS, _BURST_ROUND_TRIPS * round_trip)
    deadline = loop_time() + request.max_seconds
    rates: list[float] = []
    num_frames, sent = 4, 0
    while True:
        seconds = await burst(num_frames)
        burst_bytes = num_frames * _FRAME_BYTES
        sent += burst_bytes
        transfer = max(seconds - round_trip, 1e-6)
        if transfer >= least or num_frames == _MAX_FRAMES_PER_BURST:
            rates.append(burst_bytes / transfer)
        last = rates[-_AGREEING_BURSTS:]
        stable = len(last) == _AGREEING_BURSTS and max(last) - min(last) <= _RATE_TOLERANCE * max(last)
        if transfer < least:
            num_frames = min(num_frames * 2, _MAX_FRAMES_PER_BURST)
        if stable or loop_time() + seconds > deadline or sent + num_frames * _FRAME_BYTES > request.max_bytes:
            break
    # Of fewer bursts the fastest: TCP begins slowly, and over radio the first one may take most of the time.
    rate = statistics.median(last) if len(last) == _AGREEING_BURSTS else max(last, default=burst_bytes / transfer)
    return LinkMeasured(bytes_per_second=rate, round_trip_seconds=round_trip, num_bytes=sent, stable=stable)
