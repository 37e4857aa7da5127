"""The worker runtime for ONNX graphs: one rank's segments in onnxruntime sessions. Does not import torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from agent.worker.data_plane import bind_transport
from agent.worker.graph.engine import GraphEngine
from agent.worker.graph.schedule import OwnSegment, routes_for
from agent.worker.graph.sessions import SegmentSession, WeightFiles, copied_bytes, load_segment
from agent.worker.runtime import LoadGivenUp
from agent.worker.server import SendAnswer
from hearth.errors import BadRequest, StoreFailed
from hearth.plan.graph import weights_stay_in_place
from hearth.plan.plan import is_graph_plan
from hearth.platform.machine import keep_freed_buffers
from hearth.transport.sockets import SocketTransport
from hearth.wire import messages as wire
from hearth.wire.codec import Codec

log = logging.getLogger("hearth.worker")

_COPIED_BYTES = 256 << 10  # larger tensors are sent without a copy, which was measured to take less CPU


class _LoadedSegment(NamedTuple):
    """A segment in memory, and the bytes that it was loaded from.

    `copied_bytes` are those of weights if each operator has a copy. `in_place`: they are read where they are mapped.
    """

    files: wire.SegmentFiles
    session: SegmentSession
    num_bytes: int
    copied_bytes: int
    in_place: bool

    def used_as(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> _LoadedSegment:
        """The same segment in another plan."""
        return self._replace(session=self.session.used_as(name, inputs, outputs))


class GraphRuntime:
    """See `agent.worker.runtime.Runtime`. Requests run concurrently; the control thread passes them to the engine."""

    _loaded: list[_LoadedSegment]  # from `load` on
    _transport: SocketTransport

    def __init__(self, start: wire.Start, answer: SendAnswer, previous: GraphRuntime | None = None) -> None:
        plan, parts = start.load.plan, start.load.parts
        assert is_graph_plan(plan)
        assert isinstance(parts, wire.SegmentParts)
        self._start, self._plan, self._parts = start, plan, parts
        self._answer = answer
        self._previous = previous
        self._engine: GraphEngine | None = None  # from `connect` on
        self._routes = routes_for(plan, start.load.rank)

    def load(self, is_given_up: Callable[[], bool]) -> wire.WorkerBound:
        load, segments = self._start.load, self._routes.segments
        if len(self._parts.files) != len(segments):
            reason = f"files of {len(self._parts.files)} segments for a rank with {len(segments)} segments"
            raise BadRequest(reason=reason)
        if not self._start.scratch_path:
            raise StoreFailed(device="this device", reason="its disk takes no temporary files")
        previous, self._previous = self._previous, None
        held: dict[wire.SegmentFiles, _LoadedSegment] = {}
        if previous is None:
            self._transport = bind_transport(self._start, _COPIED_BYTES)
        else:
            held = previous._give_up(self._parts.files)
            self._transport = previous._transport
            self._transport.leave(load.rank, load.plan.num_ranks)
        self._loaded = list(held.values())
        if is_given_up():
            raise LoadGivenUp
        copies = [self._copied_bytes(*each, held) for each in zip(segments, self._parts.files, strict=True)]
        in_place = weights_stay_in_place(load.plan.devices[load.rank].memory.weights, sum(copies))
        held = {files: each for files, each in held.items() if each.in_place == in_place}
        self._loaded = []
        with WeightFiles(Path(self._start.scratch_path)) if in_place else nullcontext() as shared:
            for segment, files, num_copied in zip(segments, self._parts.files, copies, strict=True):
                if is_given_up():
                    self._loaded += held.values()
                    raise LoadGivenUp
                self._loaded.append(
                    held[files].used_as(_name(segment, load.rank), segment.inputs, segment.outputs)
                    if files in held
                    else self._load_segment(segment, files, num_copied, shared)
                )
        keep_freed_buffers()  # from here on, buffers have the same few sizes
        log.info("%d segments on %s, %d of them kept", len(segments), self._loaded[0].session.provider, len(held))
        return wire.WorkerBound(
            port=self._transport.port,
            public_key=self._transport.public_key,
            num_bytes_loaded=sum(each.num_bytes for each in self._loaded),
        )

    def _copied_bytes(
        self, segment: OwnSegment, files: wire.SegmentFiles, held: Mapping[wire.SegmentFiles, _LoadedSegment]
    ) -> int:
        if files in held:
            return held[files].copied_bytes
        return copied_bytes(files, _name(segment, self._start.load.rank), Path(self._start.store_path))

    def _load_segment(
        self, segment: OwnSegment, files: wire.SegmentFiles, num_copied: int, in_place: WeightFiles | None
    ) -> _LoadedSegment:
        start = self._start
        session, num_bytes = load_segment(
            files, _name(segment, start.load.rank), segment.inputs, segment.outputs,
            Path(start.scratch_path), start.num_threads, start.compute_device, in_place,
        )  # fmt: skip
        return _LoadedSegment(files, session, num_bytes, num_copied, in_place is not None)

    def _give_up(self, wanted: Sequence[wire.SegmentFiles]) -> dict[wire.SegmentFiles, _LoadedSegment]:
        """Release the transport, and return the loaded segments that the next plan wants. `run` has returned."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        loaded, self._loaded = self._loaded, []
        return {each.files: each for each in loaded if each.files in wanted}

    def connect(self, request: wire.ConnectPeers) -> None:
        self._transport.connect(request.peers)
        codecs = {peer.rank: Codec(self._plan.wire, peer.bytes_per_second, time.perf_counter) for peer in request.peers}
        self._engine = GraphEngine(
            self._routes, self._start.load.plan_token, [each.session for each in self._loaded], self._transport, codecs,
            self._parts.max_in_flight, self._answer,
        )  # fmt: skip
        self._engine.start()

    def run(self) -> None:
        self._running.compute()

    def handle(self, request: bytes, message: wire.Message, payload: list[bytes]) -> None:
        if not isinstance(message, wire.Run):
            raise BadRequest(reason=f"the worker of a graph does not accept {type(message).__name__}")
        self._running.run(request, message, payload)

    def progress(self) -> wire.WorkerProgress:
        return self._running.progress()

    def abort(self, step: int | None, reason: str) -> None:
        self._running.abort(step, reason)

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        return self._transport.sent_bytes_by_rank

    def end(self) -> None:
        self._running.end()

    @property
    def _running(self) -> GraphEngine:
        assert self._engine is not None
        return self._engine


def _name(segment: OwnSegment, rank: int) -> str:
    """A segment's name in error messages."""
    return f"segment {segment.number} on rank {rank}"
