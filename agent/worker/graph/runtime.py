"""The worker runtime for ONNX graphs: one rank's segments in onnxruntime sessions. Does not import torch."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from agent.worker.allocator import keep_freed_buffers
from agent.worker.data_plane import bind_transport
from agent.worker.graph.engine import GraphEngine
from agent.worker.graph.schedule import routes_for
from agent.worker.graph.sessions import SegmentSession, load_segment
from agent.worker.server import SendAnswer
from hearth.errors import BadRequest
from hearth.plan.plan import is_graph_plan
from hearth.transport.sockets import SocketTransport
from hearth.wire.codec import Codec
from hearth.wire.messages import ConnectPeers, Message, Run, SegmentParts, Start, WorkerBound, WorkerProgress

log = logging.getLogger("hearth.worker")

_COPIED_BYTES = 256 << 10  # larger tensors are sent without a copy, which was measured to take less CPU


class GraphRuntime:
    """See `agent.worker.runtime.Runtime`. Requests run concurrently; the control thread passes them to the engine."""

    _sessions: list[SegmentSession]  # from `load` on
    _transport: SocketTransport
    _engine: GraphEngine  # from `connect` on

    def __init__(self, start: Start, answer: SendAnswer) -> None:
        plan, parts = start.load.plan, start.load.parts
        assert is_graph_plan(plan)
        assert isinstance(parts, SegmentParts)
        self._start, self._plan, self._parts = start, plan, parts
        self._answer = answer
        self._routes = routes_for(plan, start.load.rank)

    def load(self) -> WorkerBound:
        start, load, segments = self._start, self._start.load, self._routes.segments
        if len(self._parts.files) != len(segments):
            raise BadRequest(
                reason=f"files of {len(self._parts.files)} segments for a rank with {len(segments)} segments"
            )
        loaded = [
            load_segment(
                files, f"segment {segment.number} on rank {load.rank}", segment.inputs, segment.outputs,
                Path(start.store_path), start.num_threads, start.compute_device,
            )
            for segment, files in zip(segments, self._parts.files, strict=True)
        ]  # fmt: skip
        self._sessions = [session for session, _ in loaded]
        keep_freed_buffers()  # from here on, buffers have the same few sizes
        log.info("%d segments on %s", len(loaded), self._sessions[0].provider)
        self._transport = bind_transport(start, _COPIED_BYTES)
        return WorkerBound(
            port=self._transport.port,
            public_key=self._transport.public_key,
            num_bytes_loaded=sum(num_bytes for _, num_bytes in loaded),
        )

    def connect(self, request: ConnectPeers) -> None:
        self._transport.connect(request.peers)
        codecs = {peer.rank: Codec(self._plan.wire, peer.bytes_per_second, time.perf_counter) for peer in request.peers}
        self._engine = GraphEngine(
            self._routes, self._start.load.plan_token, self._sessions, self._transport, codecs,
            self._parts.max_in_flight, self._answer,
        )  # fmt: skip
        self._engine.start()

    def run(self) -> None:
        self._engine.compute()

    def handle(self, request: bytes, message: Message, payload: list[bytes]) -> None:
        if not isinstance(message, Run):
            raise BadRequest(reason=f"the worker of a graph does not accept {type(message).__name__}")
        self._engine.run(request, message, payload)

    def progress(self) -> WorkerProgress:
        return self._engine.progress()

    def abort(self, step: int | None, reason: str) -> None:
        self._engine.abort(step, reason)

    def close(self) -> None:
        self._engine.close()
