"""What agents ask of each other, on a port where a peer is let in for a while: their links' rate, and chunks.

Bandwidth and round trip are measured over the data plane's kind of socket and security: the measuring side pushes bursts
through a CURVE-encrypted DEALER to the other agent's ROUTER, whose short answers mark the end of each burst. Repeated
until stable, bounded in time and bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from hearth.errors import ChunkCorrupt, HearthError, WrongKey
from hearth.platform.asyncio_tools import all_or_first_error
from hearth.platform.security import Access, Gatekeeper, KeyPair
from hearth.transport.base import Buffer
from hearth.wire.messages import Done, FetchChunks, GetChunk, LinkMeasured, MeasureLink, Message, OpenLinkProbe
from hearth.wire.rpc import Caller, Reply, RpcClient, RpcServer

log = logging.getLogger(__name__)

ZAP_DOMAIN = "link"
_FRAME_BYTES = 64 << 10  # about one tile; smaller frames would measure our own overhead
_PINGS = 7
_MIN_BURST_SECONDS = 0.03  # a shorter burst measures scheduling, not the link
_AGREE = 0.05  # the last bursts agree within this share: stable
_AGREEING_BURSTS = 3
_CHUNKS_IN_FLIGHT = 4  # hides the round trip, bounds the memory
_MAX_FRAMES_PER_BURST = 60  # of one message; the rpc layer allows 64


class LinkServer(RpcServer):
    """The measured side: always bound, admits a peer only between its probe's opening and its end."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        gatekeeper: Gatekeeper,
        bind_host: str,
        port: int,
        keypair: KeyPair,
        read_chunk: Callable[[str], bytes],
    ) -> None:
        self._read_chunk = read_chunk
        self._open_until: dict[str, float] = {}
        gatekeeper.admit(ZAP_DOMAIN, self._admits)
        super().__init__(context, bind_host, port, keypair, ZAP_DOMAIN, self._answer, port_setting="--link-port")

    def open(self, request: OpenLinkProbe) -> None:
        """Admit this peer for a while."""
        now = time.monotonic()
        self._open_until = {key: end for key, end in self._open_until.items() if end > now}
        self._open_until[request.peer_public_key] = now + request.seconds

    def _admits(self, public_key: str) -> bool:
        return time.monotonic() < self._open_until.get(public_key, 0.0)

    async def _answer(self, caller: Caller, message: Message, payload: object) -> Message | Reply:
        if not self._admits(caller.public_key):
            raise WrongKey(endpoint="the link port")
        if isinstance(message, GetChunk):
            return Reply(Done(), [await asyncio.to_thread(self._read_chunk, message.hash)])
        return Done()  # the burst has arrived


async def fetch_chunks(request: FetchChunks, own: KeyPair, keep: Callable[[str, Buffer], None]) -> tuple[str, ...]:
    """Get chunks from another agent and `keep` each. Returns the hashes of those that the peer did not send, or damaged.
    Raises what `keep` raises, except ChunkCorrupt."""
    missing: list[str] = []
    in_flight = asyncio.Semaphore(_CHUNKS_IN_FLIGHT)
    deadline = time.monotonic() + request.seconds
    async with _client(request, own) as client:

        async def fetch(chunk: str) -> None:
            async with in_flight:
                remaining = max(deadline - time.monotonic(), 0.001)
                try:
                    payload = (await client.call(GetChunk(hash=chunk), timeout_seconds=remaining)).payload
                except HearthError as error:  # whatever it is, the peer did not send this chunk
                    return lacks(chunk, str(error))
                if len(payload) != 1:
                    return lacks(chunk, f"it came as {len(payload)} frames")
                try:
                    await asyncio.to_thread(keep, chunk, payload[0])
                except ChunkCorrupt as error:
                    lacks(chunk, str(error))

        def lacks(chunk: str, reason: str) -> None:
            log.info("the chunk %s did not come from %s: %s", chunk[:12], request.host, reason)
            missing.append(chunk)

        await all_or_first_error(map(fetch, request.hashes))
    return tuple(missing)


async def measure_link(request: MeasureLink, own: KeyPair) -> LinkMeasured:
    """Measure from here to there. Raises Unreachable, WrongKey or DeadlineExceeded within the request's bounds."""
    async with _client(request, own) as client:
        return await _measure(client, request)


@asynccontextmanager
async def _client(request: FetchChunks | MeasureLink, own: KeyPair) -> AsyncIterator[RpcClient]:
    """Of another agent's port for peers."""
    context = zmq.asyncio.Context()
    host = f"[{request.host}]" if ":" in request.host else request.host
    access = Access(own, request.peer_public_key)
    client = RpcClient(context, f"tcp://{host}:{request.port}", access, name="link")
    try:
        yield client
    finally:
        await client.close()
        context.destroy(linger=0)


async def _measure(client: RpcClient, request: MeasureLink) -> LinkMeasured:
    deadline = time.monotonic() + request.max_seconds

    async def burst(num_frames: int) -> float:
        start = time.perf_counter()
        await client.call(Done(), [frame] * num_frames, timeout_seconds=request.max_seconds + 2.0)
        return time.perf_counter() - start

    frame = os.urandom(_FRAME_BYTES)  # incompressible: what a link's own compression saves is not its rate
    await burst(0)  # the handshake
    round_trip = statistics.median([await burst(0) for _ in range(_PINGS)])
    rates: list[float] = []
    num_frames, sent = 4, 0
    while True:
        seconds = await burst(num_frames)
        sent += num_frames * _FRAME_BYTES
        transfer = max(seconds - round_trip, 1e-6)
        if seconds >= _MIN_BURST_SECONDS or num_frames == _MAX_FRAMES_PER_BURST:
            rates.append(num_frames * _FRAME_BYTES / transfer)
        last = rates[-_AGREEING_BURSTS:]
        stable = len(last) == _AGREEING_BURSTS and max(last) - min(last) <= _AGREE * max(last)
        next_bytes = num_frames * _FRAME_BYTES
        if stable or time.monotonic() + seconds > deadline or sent + next_bytes > request.max_bytes:
            break
        if seconds < _MIN_BURST_SECONDS:
            num_frames = min(num_frames * 2, _MAX_FRAMES_PER_BURST)
    rate = statistics.median(last) if last else num_frames * _FRAME_BYTES / transfer
    return LinkMeasured(bytes_per_second=rate, round_trip_seconds=round_trip, num_bytes=sent, stable=stable)
