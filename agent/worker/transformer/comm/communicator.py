"""The communication thread: receives tiles, forwards them around the ring, and passes on the tiles that this rank needs.

Forwarding must not wait for a GEMM on this rank, because peers wait for the tile. So this thread runs both rings: it forwards
gathered tiles on arrival (`forward_target`), without decoding them if possible, and it adds an arriving partial sum to
this rank's and sends the result as soon as both are there. The compute thread waits only for tiles whose destination is this
rank.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from agent.worker.data_plane import DataPlane
from agent.worker.tracing import Recorder, TransferEvent
from agent.worker.transformer.comm.small_tiles import Broadcast, SmallTiles
from agent.worker.transformer.comm.staging import TorchCasts
from hearth.errors import BadMessage, HearthError, StepFailed
from hearth.plan.common import EXACT, ValueFormatName
from hearth.plan.phases import Phase, Route, forward_target
from hearth.plan.plan import TransformerPlan
from hearth.protocol import hung_step_seconds, late_seconds
from hearth.transport.base import Buffer, Received, Transport
from hearth.wire.codec import Array, Codec, Conversions
from hearth.wire.framing import TileHeader, TileKey, decode_body, encode_tile, read_header
from hearth.wire.messages import WorkerProgress

log = logging.getLogger(__name__)


# Tiles of this many future steps are kept. A peer is at most one step ahead, since the coordinator starts a step when the
# previous one has ended; with several steps in flight, see `allow_steps_ahead`.
STEPS_AHEAD = 2
_RECEIVE_SLICE_SECONDS = 0.5  # longest wait before the thread checks whether to stop, if closing did not wake it
_INLINE_SLICE_SECONDS = 0.1  # longest wait before the compute thread checks whether the step was aborted
# Interval at which the compute thread tries to take over receiving: short compared with a step.
_HANDOVER_SECONDS = 0.005
_CASTS = TorchCasts()


def link_codecs(plan: TransformerPlan, rank: int, peers: Mapping[int, float]) -> dict[int, Codec]:
    """The codecs of a rank's outgoing links. `peers` maps each other rank to the rate of the link to it, in bytes/s."""
    return {
        peer: Codec(plan.wire_on(rank, peer), bytes_per_second, time.perf_counter, _CASTS)
        for peer, bytes_per_second in peers.items()
    }


def link_formats(plan: TransformerPlan, rank: int, values: ValueFormatName | None) -> dict[int, ValueFormatName] | None:
    """The formats of a rank's outgoing links for steps in the format `values`; None: the plan's."""
    if values is None:
        return None
    return {peer: plan.body.values_on(rank, peer, values) for peer in range(plan.num_ranks) if peer != rank}


@dataclass(eq=False)
class _Wait:
    """A thread waits until one of these sets of missing tiles is empty. `since`: monotonic time; inf: nobody is late."""

    missing: list[set[TileKey]]
    since: float


class Communicator(DataPlane[Callable[[], None]]):
    """Sends and receives the tiles of one plan for one rank. Sends that wait for a GPU copy go through `_outgoing`.

    `start()` starts it; `close()` ends both threads and leaves the transport open. `receive` and `receive_first` raise
    StepFailed if a tile does not arrive in time, or the abort's error if the step was aborted.
    """

    def __init__(self, transport: Transport, epoch: int, token: bytes, codecs: Mapping[int, Codec]) -> None:
        super().__init__(transport, epoch, token, codecs)
        self.rank = transport.rank
        self.num_ranks = transport.num_ranks
        self.waited_seconds = 0.0  # time for which the compute thread waited for tiles in this step
        # The compute thread and the communication thread both send to the next rank.
        self._codec_locks = {peer: threading.Lock() for peer in codecs}
        self._previous = (self.rank - 1) % self.num_ranks
        self._next = (self.rank + 1) % self.num_ranks
        self.step = self._oldest_step = 0  # the number of the step that began last; the oldest in flight
        self._step_began = 0.0  # monotonic clock
        self._progressed_at = 0.0  # when this rank last sent a tile, or ended a wait for one; monotonic clock
        self._awaits_order = False
        self._steps_ahead = STEPS_AHEAD
        self._timeout_seconds = 1.0
        self._recorder = Recorder(enabled=False)
        # Transfers of steps that this rank has not begun yet; they become part of these steps' traces.
        self._early_events: list[TransferEvent] = []
        self._arrived: dict[TileKey, Array] = {}
        self._partials: dict[TileKey, Array] = {}  # this rank's, waiting for the sum from the previous rank
        self._waits: list[_Wait] = []
        self._inline_wait: tuple[float, TileKey] | None = None  # of the compute thread when it receives: since when
        self._changed = threading.Condition()
        self._failure: HearthError | None = None
        self._has_deferred = False  # whether sends may wait for GPU copies
        self._values: Mapping[int, ValueFormatName] | None = None
        self._keep_copy: Callable[[int, int, Array], None] | None = None
        self._small_tiles = SmallTiles(token)  # of the compute thread, as the next one
        self._broadcasts: dict[tuple[int, tuple[int, ...]], Broadcast] = {}  # of the running step, by phase and shape
        self._inline = False
        self._resume = threading.Event()  # cleared: the communication thread pauses
        self._resume.set()
        self._receiver_lock = threading.Lock()  # held by the thread that receives
        self._holds_receiver = False  # the compute thread holds it; other threads can then only abort

    def end(self) -> None:
        """Make this and all later steps fail. Thread-safe, and returns at once."""
        self._closing = True
        self._resume.set()
        self.abort(StepFailed(device="this device", reason="the plan was unloaded"))

    def close(self) -> None:
        """End both threads. No step may be running."""
        self.end()
        self._release_receiver()
        self._stop()

    # ---- the step, from the compute thread ------------------------------------------------------------------------

    def allow_steps_ahead(self, num_steps: int) -> None:
        """Keep the tiles of up to `num_steps` future steps: as many as peers can be ahead."""
        self._steps_ahead = max(num_steps, STEPS_AHEAD)

    def keep_copies(self, keep: Callable[[int, int, Array], None]) -> None:
        """Pass the rows of another rank's KV caches to `keep(sequence, first row, rows)`, which must be thread-safe."""
        self._keep_copy = keep

    def bytes_per_second_to(self, peer: int) -> float:
        """The measured rate of the link to a peer."""
        return self._codecs[peer].link_bytes_per_second

    def extend_timeout(self, seconds: float) -> None:
        """Allow each further wait for a tile of this step `seconds` more."""
        self._timeout_seconds += seconds

    def begin_step(
        self,
        step: int,
        timeout_seconds: float,
        recorder: Recorder,
        values: Mapping[int, ValueFormatName] | None = None,
        clear_failure: bool = True,
        oldest_step: int | None = None,
    ) -> None:
        """Begin a step and drop the tiles of steps that have ended; `timeout_seconds` bounds each wait for a tile.

        `values` is the value format of this step's tiles for each peer; None: the plan's. `clear_failure`: clear an earlier
        abort; if false, it stays in effect. Steps from `oldest_step` on are still in flight (None: only this one).
        """
        self._wait_for_sends()  # partial sums of the step before still need tiles that are dropped here
        self.set_values(values)
        self._step_began = time.monotonic()
        self.waited_seconds = 0.0
        with self._changed:
            self.step = step
            self._oldest_step = oldest = step if oldest_step is None else oldest_step
            self._timeout_seconds = timeout_seconds
            self._recorder = recorder
            for event in self._early_events:
                if event.key.step == step:
                    recorder.transfer(event)
            self._early_events = [event for event in self._early_events if event.key.step > step]
            if clear_failure and not self._closing:
                self._failure = None
            self._arrived = {key: tile for key, tile in self._arrived.items() if key.step >= oldest}
            self._partials = {}

    def set_values(self, values: Mapping[int, ValueFormatName] | None) -> None:
        """Set the value format of the running step's tiles for each peer; None: the plan's."""
        if values != self._values:
            self._wait_for_deferred()  # tiles of the step before, in its format
        self._values = values
        for peer, codec in self._codecs.items():
            codec.set_values(values[peer] if values is not None else None)
        self._broadcasts = {}

    def progress(self, since: float) -> WorkerProgress:
        """The step that began last, unless this rank waits for its order. Thread-safe.

        `since` is the time at which the compute thread began to work, on the monotonic clock.
        """
        if self._awaits_order:
            return WorkerProgress()
        now = time.monotonic()
        began = max(self._step_began, since)
        waits = self._inline_wait is not None or bool(self._waits)
        return WorkerProgress(
            step=self.step,
            step_seconds=now - began,
            busy_seconds=0.0 if waits else max(now - max(began, self._progressed_at), 0.0),
            limit_seconds=hung_step_seconds(self._timeout_seconds, self.num_ranks),
            late_rank=self._late_rank(now),
        )

    def _late_rank(self, now: float) -> int | None:
        """The rank that should have sent the tile for which this rank waits unusually long."""
        limit, inline = late_seconds(self._timeout_seconds), self._inline_wait
        if inline is not None and now - inline[0] >= limit:
            return self._sender(inline[1])
        with self._changed:
            missing = [wait.missing[0] for wait in self._waits if now - wait.since >= limit and wait.missing[0]]
        return self._sender(min(missing[0])) if missing else None

    def _sender(self, key: TileKey) -> int:
        """The rank from which this rank gets a tile; around a ring, that is not the rank whose rows it holds."""
        return key.source if key.phase.route is Route.DIRECT else self._previous

    def abort(self, error: HearthError) -> None:
        """Make all waits for tiles raise `error`, until a step begins with `clear_failure`."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def key(self, layer: int, phase: Phase, tile: int, source: int, chunk: int = 0, step: int | None = None) -> TileKey:
        """The key of a tile of the running step, or of another step in flight."""
        return TileKey(self._epoch, self.step if step is None else step, layer, phase, tile, source, chunk)

    def send(self, target: int, key: TileKey, tile: Array, converted: Conversions | None = None) -> None:
        """Encode a tile for the link to `target` and queue it. The array must not change afterwards. See `encode_tile`."""
        with self._codec_locks[target]:
            frames = encode_tile(self._token, key, tile, self._codecs[target], converted)
        self._record("send", key, target, frames)
        self._transport.send(target, frames, background=key.phase is Phase.CACHE_COPY)
        self._progressed_at = time.monotonic()

    def send_to_all(self, keys: Mapping[int, TileKey], tile: Array) -> None:
        """Send the same tile to several ranks, each with its own key. The array must not change afterwards."""
        converted: Conversions = {}
        for target, key in keys.items():
            self.send(target, key, tile, converted)

    def exchanges_inline(self, rows: Tensor) -> bool:
        """Whether the compute thread may exchange tiles of this shape by `broadcast_inline` and `receive_inline`."""
        return self._inline and SmallTiles.fit(rows) and not self._recorder.enabled and self._acquire_receiver()

    def broadcast_inline(self, layer: int, phase: Phase, rows: Tensor) -> bool:
        """Send few rows to all peers in prepared messages; False if a link needs others, and nothing was sent."""
        form = int(phase), rows.shape
        if (broadcast := self._broadcasts.get(form)) is None:
            broadcast = self._small_tiles.broadcast(phase, rows, self._codecs)
            if broadcast is None:
                return False
            self._broadcasts[form] = broadcast
        if not broadcast.write(rows):
            return False
        for target, tile, codec in broadcast.peers:
            self._transport.send(target, (tile.message(self.key(layer, phase, target, self.rank)),))
            codec.count(rows.nbytes, tile.values.nbytes)
        self._progressed_at = time.monotonic()
        return True

    def receive_inline(self, keys: Mapping[int, TileKey], shape: tuple[int, ...]) -> dict[int, Array]:
        """Wait for one tile of each source, and return their values; `keys` are by source. Raises as `receive`.

        The values are valid until the next call, and read-only.
        Each message is first compared with the tile that is expected of its source; others are processed as ever.
        """
        began = time.monotonic()
        found: dict[int, Array] = {}
        for source, key in keys.items():
            while source not in found:
                if key in self._arrived:
                    found[source] = self._arrived.pop(key)
                    break
                received = self._receive_awaiting(key, began)
                if received is None:
                    continue
                expected = keys.get(received.source) if received.source not in found else None
                tile = self._small_tiles.read(expected, shape, received.frames) if expected is not None else None
                if tile is None:
                    self._accept_or_drop(received)
                else:
                    found[received.source] = tile
        self._end_inline_wait(began)
        return found

    def reduce(self, key: TileKey, partial: Array) -> None:
        """Add this rank's partial sum to the one from the previous rank, and send the result once both are there.

        `key.source` is the previous rank. `partial` is overwritten with the sum.
        """
        with self._changed:
            received = self._arrived.pop(key, None)
            if received is None:
                self._partials[key] = partial
                return
        self._reduce_and_send(key, received, partial)

    def when_ready(self, ready: Callable[[], Array] | Array, then: Callable[[Array], None]) -> None:
        """Call `then(array)`: at once, or in the sending thread if `ready` waits for a GPU copy, so as not to delay compute."""
        if callable(ready):
            self._has_deferred = True
            self._outgoing.put(lambda: then(ready()))
        else:
            then(ready)

    def finish_sends(self) -> None:
        """Wait until all tiles of this step are sent. Raises StepFailed, or the abort's error.

        So a step has ended when its rank has done its part: what it records is complete, and the time it took is right.
        """
        if not self._wait_for_sends():
            reason = f"it could not send all its tiles within {self._timeout_seconds:.1f} s"
            raise self._failure or StepFailed(device=f"rank {self.rank}", reason=reason)

    def _wait_for_sends(self) -> bool:
        """Wait until what other ranks need of this step is sent. False if the step fails meanwhile, or takes too long."""
        return self._wait_for_deferred() and self._wait_for_sums()

    def _wait_for_sums(self) -> bool:
        """Wait until the partial sums that lack the previous rank's are sent, by the communication thread. False as above."""
        if not self._partials:
            return True
        with self._changed:
            wait = _Wait([set(self._partials)], time.monotonic())
            self._waits.append(wait)
            self._changed.wait_for(lambda: not wait.missing[0] or self._failure is not None, self._timeout_seconds)
            self._waits.remove(wait)
            return not wait.missing[0]

    def _wait_for_deferred(self) -> bool:
        """Wait for the sending thread to have sent all that it has to. False if the step fails meanwhile, or takes too long."""
        if self._has_deferred:
            sent, deadline = threading.Event(), time.monotonic() + self._timeout_seconds
            self._outgoing.put(sent.set)
            while not sent.wait(_RECEIVE_SLICE_SECONDS):
                if self._failure is not None or self._closing or time.monotonic() > deadline:
                    return False
            self._has_deferred = False
        return True

    def set_inline_receiving(self, on: bool) -> None:
        """Set whether the compute thread receives by itself while it waits.

        For few, small tiles, as in decoding, switching threads costs more than overlap saves. Tiles are then not forwarded
        while this rank computes, so ring collectives should not be used.
        """
        self._inline = on
        if on:
            self._resume.clear()
        else:
            self._release_receiver()
            self._resume.set()

    def has_arrived(self, keys: Sequence[TileKey]) -> bool:
        """Whether all of `keys` have arrived; does not wait."""
        num_arrived = -1
        while self._inline and num_arrived != len(self._arrived):
            num_arrived = len(self._arrived)
            self._receive_one_inline((), 0.0)
        with self._changed:
            return all(key in self._arrived for key in keys)

    def receive(self, keys: Sequence[TileKey]) -> list[Array]:
        """Wait for all of `keys` and return their tiles in order."""
        if self._inline and self._acquire_receiver():
            return self._receive_inline(keys)
        return self.receive_first([keys])[1]

    def receive_first(self, groups: Sequence[Sequence[TileKey]]) -> tuple[int, list[Array]]:
        """Wait for any group of keys to be complete; return its index and tiles. If several are, take the first one."""
        now = time.monotonic()
        return self._receive_first(groups, now + self._timeout_seconds, now)

    def receive_order(self, key: TileKey) -> Array:
        """Wait for the next step order, without a timeout: with nothing to do, none is sent."""
        self._awaits_order = True
        try:
            return self._receive_first([[key]], math.inf, math.inf)[1][0]
        finally:
            self._step_began, self.waited_seconds = time.monotonic(), 0.0
            self._awaits_order = False

    def _receive_first(
        self, groups: Sequence[Sequence[TileKey]], deadline: float, since: float
    ) -> tuple[int, list[Array]]:
        with self._changed:
            awaited = [{key for key in group if key not in self._arrived} for group in groups]
            wait = _Wait(awaited, since)
            self._waits.append(wait)
        try:
            return self._wait_for_group(groups, awaited, deadline)
        finally:
            self._progressed_at = time.monotonic()
            with self._changed:
                self._waits = [other for other in self._waits if other is not wait]

    def _wait_for_group(
        self, groups: Sequence[Sequence[TileKey]], awaited: list[set[TileKey]], deadline: float
    ) -> tuple[int, list[Array]]:
        while True:
            with self._changed:
                if self._failure is not None:
                    self._release_receiver()
                    raise self._failure
                for index, missing in enumerate(awaited):
                    if not missing:
                        return index, [self._arrived.pop(key) for key in groups[index]]
                now = time.monotonic()
                if deadline <= now:
                    raise self._timeout_error(min(awaited[0]))
                if not self._inline:
                    self._changed.wait(min(deadline - now, _RECEIVE_SLICE_SECONDS))
            if self._inline:
                self._receive_one_inline(awaited, min(deadline - now, _INLINE_SLICE_SECONDS))
            self.waited_seconds += time.monotonic() - now

    def _receive_inline(self, keys: Sequence[TileKey]) -> list[Array]:
        """As `receive`, if only this thread receives: without locks, since decoding waits here twice per layer and token."""
        began = time.monotonic()
        for key in keys:
            while key not in self._arrived:
                self._accept_or_drop(self._receive_awaiting(key, began))
        self._end_inline_wait(began)
        return [self._arrived.pop(key) for key in keys]

    def _receive_awaiting(self, key: TileKey, began: float) -> Received | None:
        """Receive a message in this thread, which has waited for a tile since `began`; None after a slice of the timeout."""
        self._inline_wait = began, key
        remaining = began + self._timeout_seconds - time.monotonic()
        if remaining <= 0 or self._failure is not None:
            self._inline_wait = None
            self._release_receiver()
            raise self._failure or self._timeout_error(key)
        return self._transport.receive(min(remaining, _INLINE_SLICE_SECONDS))

    def _end_inline_wait(self, began: float) -> None:
        self._inline_wait, self._progressed_at = None, time.monotonic()
        self.waited_seconds += self._progressed_at - began

    def _timeout_error(self, key: TileKey) -> StepFailed:
        return StepFailed(
            device=f"rank {self.rank}",
            reason=f"the {key.phase.name} tile {key.tile} of layer {key.layer} did not arrive from rank {self._sender(key)} "
            f"within {self._timeout_seconds:.1f} s",
            peer=f"rank {self._sender(key)}",
        )

    def _receive_one_inline(self, awaited: Sequence[set[TileKey]], timeout_seconds: float) -> None:
        """Receive one message in the compute thread, unless the communication thread is still in its last `receive`."""
        if self._acquire_receiver():
            self._accept_or_drop(self._transport.receive(timeout_seconds))
            return
        with self._changed:
            if all(awaited):
                self._changed.wait(_HANDOVER_SECONDS)

    def _acquire_receiver(self) -> bool:
        """Try to take over receiving from the communication thread; False while it is still in its last `receive`."""
        if not self._holds_receiver:
            self._holds_receiver = self._receiver_lock.acquire(blocking=False)
        return self._holds_receiver

    def _release_receiver(self) -> None:
        if self._holds_receiver:
            self._holds_receiver = False
            self._receiver_lock.release()

    # ---- the two threads ------------------------------------------------------------------------------------------

    def _receive_loop(self) -> None:
        while not self._closing:
            self._resume.wait()
            if not self._receiver_lock.acquire(timeout=_RECEIVE_SLICE_SECONDS):
                continue
            try:
                received = self._transport.receive(_RECEIVE_SLICE_SECONDS)
            finally:
                self._receiver_lock.release()
            self._accept_or_drop(received)

    def _accept(self, received: Received) -> None:
        header = read_header(self._token, received.frames)
        key = header.key
        if key.phase is Phase.CACHE_COPY:
            self._accept_copy(header, received)
            return
        if key.epoch != self._epoch or not self._oldest_step <= key.step <= self.step + self._steps_ahead:
            self._drop(f"a tile of epoch {key.epoch}, step {key.step}")
            return
        if received.source != self._sender(key) or key.source >= self.num_ranks or key.tile >= self.num_ranks:
            self._drop(f"{key} came from rank {received.source}")
            return
        if key.phase.route is Route.GATHER:
            self._forward(header, received)
        tile = decode_body(header, received.frames, _CASTS)
        self._record("receive", key, received.source, received.frames)
        with self._changed:
            partial = self._partials.get(key)
            if partial is None:
                self._arrived[key] = tile
                self._end_waits(key)
        if partial is not None:
            self._reduce_and_send(key, tile, partial)
            with self._changed:
                self._partials.pop(key, None)
                self._end_waits(key)

    def _end_waits(self, key: TileKey) -> None:
        """Note that a tile has arrived, or that the sum that waited for it has been sent; wake who waited for it."""
        for missing in (each for wait in self._waits for each in wait.missing):
            missing.discard(key)
            if not missing:
                self._changed.notify_all()

    def _accept_copy(self, header: TileHeader, received: Received) -> None:
        """Pass on rows of a KV cache, of whatever step: the sender may be ahead of this rank, or send them later."""
        key = header.key
        if key.epoch != self._epoch or received.source != self._previous or self._keep_copy is None:
            self._drop(f"rows of a KV cache of epoch {key.epoch} from rank {received.source}")
            return
        self._keep_copy(key.tile, key.chunk, decode_body(header, received.frames, _CASTS))

    def _forward(self, header: TileHeader, received: Received) -> None:
        key = header.key
        following = forward_target(self.num_ranks, self.rank, key.tile)
        if following is None:
            return
        if header.form.values is EXACT and self._codecs[following].is_lossy:  # the next link is lossy
            self.send(following, key, decode_body(header, received.frames, _CASTS))
            return
        self._record("send", key, following, received.frames)
        self._transport.send(following, received.frames)

    def _record(self, lane: Literal["send", "receive"], key: TileKey, peer: int, frames: Sequence[Buffer]) -> None:
        if not self._recorder.enabled and key.step <= self.step:
            return
        event = TransferEvent.now(lane, key, peer, frames)
        with self._changed:
            if key.step <= self.step:
                self._recorder.transfer(event)
            else:
                self._early_events.append(event)

    def _reduce_and_send(self, key: TileKey, received: Array, partial: Array) -> None:
        if received.shape != partial.shape:
            raise BadMessage(reason=f"a tile has the shape {received.shape}, {partial.shape} was expected")
        np.add(received, partial, out=partial)
        self.send(self._next, key._replace(source=self.rank), partial)

    def _send_one(self, item: Callable[[], None]) -> None:
        try:
            item()
        except HearthError as error:
            self.abort(error)
        except Exception as error:  # such as a CUDA error in the copy: fail the step now, not at its timeout
            log.exception("a deferred send failed")
            self.abort(StepFailed(device=f"rank {self.rank}", reason=f"sending failed: {error}"))
