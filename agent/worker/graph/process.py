"""The worker process of a graph: `python -m agent.worker.graph.process SOCKET`, started by the daemon, one per deployed plan.

It loads onnxruntime and no torch. The main thread first loads the segments, then runs them for ever; requests come in by
the control thread, which the engine never keeps waiting.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.worker.allocator import keep_freed_buffers
from agent.worker.control import Control, become_a_worker
from agent.worker.graph.engine import GraphEngine
from agent.worker.graph.schedule import routes_of
from agent.worker.graph.sessions import SegmentSession, load_segment
from hearth.errors import BadRequest, HearthError, InternalError, StepFailed
from hearth.plan.plan import is_graph_plan
from hearth.platform.security import new_keypair
from hearth.transport.sockets import SocketTransport
from hearth.wire.codec import Codec
from hearth.wire.messages import (
    Abort,
    ConnectPeers,
    Done,
    Failed,
    Message,
    Run,
    SegmentParts,
    Start,
    WorkerBound,
)

log = logging.getLogger("hearth.worker")

_COPIED_BYTES = 256 << 10  # above, sending a tensor without a copy was measured to take less CPU


class GraphWorker:
    """One deployed plan: first bound, then connected, then running requests."""

    def __init__(self, start: Start) -> None:
        load = start.load
        assert is_graph_plan(load.plan)
        assert isinstance(load.parts, SegmentParts)
        self._load, self._plan, self._parts = load, load.plan, load.parts
        self._routes = routes_of(load.plan, load.rank)
        if len(load.parts.files) != len(self._routes.segments):
            raise BadRequest(
                reason=f"{len(load.parts.files)} segments for the {len(self._routes.segments)} of this rank"
            )
        self._sessions: list[SegmentSession] = []
        num_bytes = 0
        for segment, files in zip(self._routes.segments, load.parts.files, strict=True):
            name = f"segment {segment.number} on rank {load.rank}"
            session, loaded = load_segment(
                files, name, segment.inputs, segment.outputs, Path(start.store_path), start.num_threads,
                start.compute_device,
            )  # fmt: skip
            self._sessions.append(session)
            num_bytes += loaded
        keep_freed_buffers()  # from here on, tensors come and go in the same few sizes
        log.info("%d segments on %s", len(self._sessions), self._sessions[0].provider)
        self._transport = SocketTransport(
            load.rank,
            load.plan.num_ranks,
            start.bind_host,
            start.ports,
            new_keypair() if load.encrypt_data_plane else None,
            _COPIED_BYTES,
        )
        self.bound = WorkerBound(
            port=self._transport.port, public_key=self._transport.public_key, num_bytes_loaded=num_bytes
        )

    def connect(self, request: ConnectPeers, control: Control) -> GraphEngine:
        load = self._load
        self._transport.connect(request.peers)
        codecs = {
            peer.rank: Codec(self._plan.wire, peer.bytes_per_second, time.perf_counter) for peer in request.peers
        }  # fmt: skip
        engine = GraphEngine(
            self._routes, self._plan.epoch, load.plan_token, self._sessions, self._transport, codecs,
            self._parts.max_in_flight, self._plan.wait_seconds(), control.answer,
        )  # fmt: skip
        engine.start()
        return engine


class _Control(Control):
    engine: GraphEngine | None = None

    def urgent(self, request_id: bytes, message: Message, payload: list[bytes]) -> bool:
        """Once there is an engine, everything is for it."""
        if self.engine is None:
            return isinstance(message, Abort)
        try:
            if isinstance(message, Run):
                self.engine.run(request_id, message, payload)
            elif isinstance(message, Abort):
                self.engine.abort(message.step, message.reason)
            else:
                raise BadRequest(reason=f"the worker of a graph does not take {type(message).__name__}")
        except HearthError as error:
            self.answer(request_id, Failed.of(error), ())
        except Exception as error:
            self.answer(request_id, _fault(message, error), ())
        return True


def _prepare(control: _Control) -> GraphEngine:
    """Answer until the worker is loaded and connected."""
    worker: GraphWorker | None = None
    while True:
        request_id, message, _ = control.requests.get()
        answer: Message
        try:
            if isinstance(message, Start):
                worker = GraphWorker(message)
                answer = worker.bound
            elif isinstance(message, ConnectPeers) and worker is not None:
                control.engine = worker.connect(message, control)
                answer = Done()
            else:
                raise StepFailed(device="this device", reason=f"it is not ready for {type(message).__name__}")
        except HearthError as error:
            answer = Failed.of(error)
        except MemoryError as error:
            answer = Failed.of(StepFailed(device="this device", reason=f"out of memory: {error}"))
        except Exception as error:
            answer = _fault(message, error)
        control.answer(request_id, answer, ())
        if control.engine is not None:
            return control.engine


def _fault(message: Message, error: Exception) -> Failed:
    log.exception("%s failed", type(message).__name__)
    return Failed.of(InternalError(where="the worker", reason=f"{type(error).__name__}: {error}"))


def main(arguments: Sequence[str] | None = None) -> Any:
    become_a_worker()
    address, *_ = arguments or sys.argv[1:]
    _prepare(_Control(address)).compute()


if __name__ == "__main__":
    main()
