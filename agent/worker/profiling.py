"""What the profilers of both kinds of model share: input and output, timing of calls, and the CPU cost of communication."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hearth.errors import BadMessage, HearthError
from hearth.plan.common import VALUE_FORMAT_NAMES, ValueFormatName, WireFormat
from hearth.plan.phases import Phase
from hearth.plan.profile import BlockProfile, WireCost
from hearth.platform.confine import COMPILED_KERNELS, confine
from hearth.platform.connections import pace_connections
from hearth.platform.curve import new_keypair
from hearth.transport.sockets import SocketTransport
from hearth.wire.codec import Casts, Codec
from hearth.wire.framing import TileKey, decode_tile, encode_tile
from hearth.wire.messages import Failed, GraphProfile, Message, Peer, Profiled, StartProfile, decode, encode

# Tiles of 8 and 256 KiB: two sizes give a cost per message and per byte.
_SMALL_ROWS, _LARGE_ROWS, _ROW_VALUES = 4, 128, 512
_MESSAGES = 12  # per measurement: enough for a mean, few enough to take only a tenth of a second
# Rate of the connection that is measured: that of a home's fast links. What arrives in pieces wakes the receiver for each of
# them: on an idle AMD core a byte takes 0.7 to 0.8 ns at each end then, and 0.5 at full speed.
_BYTES_PER_SECOND = 30_000_000


def serve_one(measure: Callable[[StartProfile], BlockProfile | GraphProfile]) -> None:
    """Read the daemon's request and write the result of `measure`, or its HearthError."""
    answer: Message
    try:
        start = decode(sys.stdin.buffer.read())
        if not isinstance(start, StartProfile):
            raise BadMessage(reason=f"a profiler does not accept {type(start).__name__}")
        confine(readable=(), writable=(Path(start.folder), COMPILED_KERNELS))
        answer = Profiled(result=measure(start))
    except HearthError as error:
        answer = Failed.of(error)
    sys.stdout.buffer.write(encode(answer))


class Meter:
    """Times samples of at least `sample_seconds`, and measures the CPU time that this process gets per second.

    Under a CPU quota, a sample should span several quota periods (the kernel's default is 100 ms, the testbed's 4 ms),
    because shorter work could run on quota saved while idle. `synchronise` waits for the device to finish queued work.
    """

    def __init__(self, sample_seconds: float, synchronise: Callable[[], None] = lambda: None) -> None:
        self._sample_seconds = sample_seconds
        self._synchronise = synchronise
        self._cpu_seconds = self._wall_seconds = 0.0

    @property
    def cpu_per_second(self) -> float:
        """CPU seconds per second of wall time: the number of threads, or less under a quota or background load."""
        return max(self._cpu_seconds / self._wall_seconds, 0.01) if self._wall_seconds else 1.0

    def sample(self, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
        """Mean seconds per run in one sample, by `clock`."""
        self._synchronise()
        start, cpu, runs, elapsed = time.perf_counter(), time.process_time(), 0, 0.0
        began = clock()
        while elapsed < self._sample_seconds:
            run()
            runs += 1
            self._synchronise()
            elapsed = time.perf_counter() - start
        passed = clock() - began
        self._cpu_seconds += time.process_time() - cpu
        self._wall_seconds += elapsed
        return passed / runs


def measure_wire_cost(per_second: float, casts: Casts, beside_compute: bool) -> WireCost:
    """Measure the CPU cost of communication. `per_second` is the CPU time that the device provides per second.

    `beside_compute`: the device computes on its GPU.
    """
    encrypted, per_message = _socket_cost(encrypt=True)
    plain, _ = _socket_cost(encrypt=False)
    return WireCost(
        encrypted_seconds_per_byte=encrypted / per_second,
        plain_seconds_per_byte=plain / per_second,
        seconds_per_message=per_message / per_second,
        convert_seconds_per_value={values: _convert_cost(values, casts) / per_second for values in VALUE_FORMAT_NAMES},
        beside_compute=beside_compute,
    )


def _socket_cost(encrypt: bool) -> tuple[float, float]:
    """CPU seconds per byte and per message at one end: half of the cost of sending tiles to ourselves."""
    ends = [SocketTransport(rank, 2, "127.0.0.1", (0, 0), new_keypair() if encrypt else None) for rank in range(2)]
    try:
        for rank, end in enumerate(ends):
            other = ends[1 - rank]
            end.connect([Peer(rank=1 - rank, host="127.0.0.1", port=other.port, public_key=other.public_key,
                              bytes_per_second=1e9)])  # fmt: skip
        codec = Codec(WireFormat(lz4="off"), 1e9, time.perf_counter)

        def cpu_seconds(rows: int) -> float:
            tile = np.ones((rows, _ROW_VALUES), np.float32)
            start = time.process_time()
            for index in range(_MESSAGES):
                key = TileKey(0, index, 0, Phase.GATHER_MLP, 0, 0)
                ends[0].send(1, encode_tile(bytes(16), key, tile, codec))
                received = ends[1].receive(10.0)
                assert received is not None
                decode_tile(bytes(16), received.frames)
            return (time.process_time() - start) / _MESSAGES / 2

        cpu_seconds(_LARGE_ROWS)  # the handshake, and warm caches
        pace_connections(ends[1].port, _BYTES_PER_SECOND)
        small, large = cpu_seconds(_SMALL_ROWS), cpu_seconds(_LARGE_ROWS)
    finally:
        for end in ends:
            end.close()
            end.release()
    row_bytes = _ROW_VALUES * 4
    per_byte = max(large - small, 0.0) / ((_LARGE_ROWS - _SMALL_ROWS) * row_bytes)
    return per_byte, max(small - per_byte * _SMALL_ROWS * row_bytes, 0.0)


def _convert_cost(values: ValueFormatName, casts: Casts) -> float:
    """CPU seconds per value, for encoding and decoding together."""
    codec = Codec(WireFormat(values=values, lz4="off"), 1e9, time.perf_counter, casts)
    tile = np.random.default_rng(0).standard_normal((_LARGE_ROWS, _ROW_VALUES)).astype(np.float32)
    key = TileKey(0, 0, 0, Phase.GATHER_MLP, 0, 0)

    def once() -> None:
        decode_tile(bytes(16), [bytes(frame) for frame in encode_tile(bytes(16), key, tile, codec)])

    once()
    start = time.process_time()
    for _ in range(_MESSAGES):
        once()
    return (time.process_time() - start) / _MESSAGES / tile.size
