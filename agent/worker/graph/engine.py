"""Executes one rank's segments of a deployed ONNX graph, each as soon as its inputs are there, for several requests at once.

Four threads: the control thread passes requests in, the communication thread receives tensors of peers, the thread that calls
`compute` runs segments, and the sending thread sends results. They share the `GraphSchedule` under one lock, which is never
held while computing, sending or receiving.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agent.worker.data_plane import DataPlane
from agent.worker.graph.schedule import GraphSchedule, OverdueStep, ReadySegment, Routes
from agent.worker.graph.sessions import RunControl, SegmentSession, check_input
from agent.worker.server import SendAnswer
from agent.worker.tracing import Recorder, TransferEvent
from hearth.errors import BadRequest, FrameTooLarge, HearthError, StepFailed
from hearth.plan.phases import Phase, Work
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES, hung_step_seconds, late_seconds
from hearth.transport.base import Received, Transport
from hearth.wire.codec import Array, Codec
from hearth.wire.framing import TileKey, decode_body, encode_tile, pack_arrays, read_header, unpack_arrays
from hearth.wire.messages import Failed, Run, RunDone, WorkerProgress

log = logging.getLogger(__name__)


MAX_TRACE_EVENTS = 16_000  # as many as fit into one message
# Longest wait before a thread checks for the end and for deadlines; these are usually 5 s away.
_RECEIVE_SLICE_SECONDS = 0.5


class OutgoingTensor(NamedTuple):
    """A tensor to be sent to a peer."""

    step: int
    target: int
    name: str
    array: Array


@dataclass
class _Request:
    """The state of a step on this rank. Tensors of peers may arrive before the `request`."""

    recorder: Recorder
    values: dict[str, Array] = field(default_factory=dict)  # inputs that segments of this rank still need
    request_id: bytes = b""
    request: Run | None = None
    results: dict[str, Array] = field(default_factory=dict)
    compute_seconds: list[float] = field(default_factory=list)
    began: float = 0.0  # when the request had arrived, on the monotonic clock
    running: RunControl | None = None
    sending: int = 0  # tensors not yet passed to the transport
    has_run: bool = False


class GraphEngine(DataPlane[OutgoingTensor]):
    """Runs one plan's requests on one rank. `sessions` are those of `routes.segments`, in the same order.

    `answer` is called once for each request that `run` has accepted, from any thread, with `RunDone` or `Failed`.
    """

    def __init__(
        self,
        routes: Routes,
        token: bytes,
        sessions: Sequence[SegmentSession],
        transport: Transport,
        codecs: Mapping[int, Codec],
        max_in_flight: int,
        answer: SendAnswer,
    ) -> None:
        super().__init__(transport, routes.plan.epoch, token, codecs)
        self._routes = routes
        self._sessions = sessions
        self._early_seconds = routes.plan.peer_timeout_seconds()  # for how long tensors of an unknown request are kept
        self._answer = answer
        self._tensor_numbers = {name: number for number, name in enumerate(routes.sent_tensors)}
        self._schedule = GraphSchedule(routes, max_in_flight)
        self._requests: dict[int, _Request] = {}
        self._changed = threading.Condition()
        self._computing: tuple[int, float, float] | None = None  # the step whose segment runs, its begin, and its limit

    def end(self) -> None:
        """Fail the requests in flight and end `compute`. Thread-safe, and returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.abort(None, "the plan was unloaded")

    def close(self) -> None:
        """Fail the requests in flight and end all threads, including `compute`. The transport stays open."""
        self.end()
        self._stop()

    # ---- requests, from the control thread --------------------------------------------------------------------------

    def run(self, request_id: bytes, request: Run, payload: Sequence[Any]) -> None:
        """Accept a request. Raises BadRequest for missing, unknown or wrong inputs, QueueFull; it is then not answered."""
        inputs = self._read(request, payload)
        now = time.monotonic()
        with self._changed:
            late_at = now + late_seconds(request.timeout_seconds)
            self._schedule.open(request.step, now + request.timeout_seconds, late_at)
            state = self._requests.setdefault(request.step, _Request(Recorder(request.trace)))
            state.request_id, state.request, state.began = request_id, request, now
            state.compute_seconds = [0.0] * len(self._sessions)
            if not request.trace:
                state.recorder = Recorder(enabled=False)
            for name, array in inputs.items():
                if self._schedule.add_tensor(request.step, name, now):
                    state.values[name] = array
            self._changed.notify_all()

    def abort(self, step: int | None, reason: str) -> None:
        """Abort one request, or all (None): answer with StepFailed, and stop a segment that runs for it."""
        with self._changed:
            steps = [step] if step is not None else list(self._requests)
        for each in steps:
            self._fail(each, self._step_failed(reason))

    def progress(self) -> WorkerProgress:
        """The step whose segment runs, if one does. Thread-safe."""
        now = time.monotonic()
        with self._changed:
            late_rank = self._schedule.late_source(now)
        if (computing := self._computing) is None:
            return WorkerProgress(late_rank=late_rank)
        step, began, limit = computing
        seconds = now - began
        return WorkerProgress(
            step=step, step_seconds=seconds, busy_seconds=seconds, limit_seconds=limit, late_rank=late_rank
        )

    def _read(self, request: Run, payload: Sequence[Any]) -> dict[str, Array]:
        arrays = unpack_arrays(request.names, payload)
        if wrong := arrays.keys() ^ self._routes.graph_inputs:
            name = min(wrong)
            reason = f"the input {name} is {'not used by' if name in arrays else 'missing for'} this rank"
            raise BadRequest(reason=reason)
        for segment, session in zip(self._routes.segments, self._sessions, strict=True):
            for name in arrays.keys() & set(segment.inputs):
                check_input(session, name, arrays[name])
        return arrays

    # ---- computing --------------------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Run segments until `close` is called."""
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one segment. In its own function, so that its tensors are freed before the wait for the next one."""
        started = self._wait_for_segment()
        if started is None:
            return False
        ready, request, feeds = started
        segment = self._routes.segments[ready.segment]
        began = time.monotonic()
        timeout = request.request.timeout_seconds if request.request is not None else self._early_seconds
        self._computing = (ready.step, began, hung_step_seconds(timeout, self._routes.plan.num_ranks))
        try:
            with request.recorder.timed(Work.SEGMENT, segment.number):
                arrays = self._sessions[ready.segment].run(feeds, request.running)
            outputs = dict(zip(segment.outputs, arrays, strict=True))
            _check_sizes(self._routes, outputs)
        except HearthError as error:
            self._fail(ready.step, error)
        except MemoryError as error:
            self._fail(ready.step, self._step_failed(f"out of memory: {error}"))
        else:
            self._segment_done(ready, request, outputs, began, time.monotonic())
        finally:
            self._computing = None
        return True

    def _wait_for_segment(self) -> tuple[ReadySegment, _Request, dict[str, Array]] | None:
        with self._changed:
            while not self._closing:
                ready = self._schedule.start_next()
                if ready is not None:
                    request = self._requests[ready.step]
                    request.running = RunControl()
                    inputs = self._routes.segments[ready.segment].inputs
                    return ready, request, {name: request.values[name] for name in inputs}
                self._changed.wait(_RECEIVE_SLICE_SECONDS)
        return None

    def _segment_done(
        self, ready: ReadySegment, request: _Request, outputs: dict[str, Array], began: float, ended: float
    ) -> None:
        outgoing = [
            OutgoingTensor(ready.step, target, name, array)
            for name, array in outputs.items()
            for target in self._routes.targets.get(name, ())
        ]
        with self._changed:
            if self._requests.get(ready.step) is not request:
                return  # the request was aborted meanwhile
            request.running = None
            request.compute_seconds[ready.segment] = ended - began
            request.sending += len(outgoing)
            request.values.update(outputs)
            request.results.update((name, outputs[name]) for name in self._routes.graph_outputs if name in outputs)
            released, request.has_run = self._schedule.finish(ready)
            for name in released:
                del request.values[name]
        for each in outgoing:
            self._outgoing.put(each)
        if not outgoing:
            self._complete(ready.step, request)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _complete(self, step: int, request: _Request) -> None:
        """Answer the request if all segments have run and all tensors for peers have been sent."""
        with self._changed:
            if not request.has_run or request.sending or self._requests.get(step) is not request:
                return
            self._forget(step)
        done = RunDone(
            names=tuple(request.results),
            began_seconds=request.began,
            ended_seconds=time.monotonic(),
            compute_seconds=tuple(request.compute_seconds),
            wire=self.wire_stats(),
            dropped_messages=self.dropped,
            trace=request.recorder.events()[:MAX_TRACE_EVENTS],
        )
        self._answer(request.request_id, done, pack_arrays(request.results))

    def _fail(self, step: int, error: HearthError) -> None:
        with self._changed:
            request = self._requests.get(step)
            self._forget(step)
            if request is None:
                return
            if request.running is not None:
                request.running.terminate()
        if request.request is not None:
            self._answer(request.request_id, Failed.of(error), ())

    def _step_failed(self, reason: str, peer: str = "") -> StepFailed:
        return StepFailed(device=f"rank {self._routes.rank}", reason=reason, peer=peer)

    def _forget(self, step: int) -> None:
        self._schedule.end(step)
        self._requests.pop(step, None)

    def _fail_overdue(self) -> None:
        with self._changed:
            overdue = self._schedule.overdue(time.monotonic())
        for each in overdue:
            peer = f"rank {each.source}" if each.source is not None else ""
            self._fail(each.step, self._step_failed(self._overdue_reason(each), peer))

    def _overdue_reason(self, overdue: OverdueStep) -> str:
        request = self._requests.get(overdue.step)
        seconds = request.request.timeout_seconds if request is not None and request.request is not None else 0.0
        if overdue.tensor is None:
            return f"its segments had not all finished after {seconds:.1f} s, although all their inputs had arrived"
        return f"the tensor {overdue.tensor} had not arrived from rank {overdue.source} after {seconds:.1f} s"

    # ---- the wire ---------------------------------------------------------------------------------------------------

    def _receive_loop(self) -> None:
        while not self._closing:
            with self._changed:
                deadline = self._schedule.next_deadline
            remaining = _RECEIVE_SLICE_SECONDS if deadline is None else deadline - time.monotonic()
            received = self._transport.receive(min(max(remaining, 0.0), _RECEIVE_SLICE_SECONDS))
            self._accept_or_drop(received)
            self._fail_overdue()

    def _accept(self, received: Received) -> None:
        header = read_header(self._token, received.frames)
        key = header.key
        name = self._routes.sent_tensors[key.layer] if key.layer < len(self._routes.sent_tensors) else ""
        if key.epoch != self._epoch or key.phase is not Phase.TENSOR:
            self._drop(f"a {key.phase.name} tile of epoch {key.epoch}")
            return
        if not received.source == key.source == self._routes.sources.get(name):
            self._drop(f"tensor {name!r} from rank {received.source}")
            return
        with self._changed:
            if not self._schedule.accepts(key.step, name):
                self._drop(f"tensor {name} of step {key.step}")
                return
        array = decode_body(header, received.frames)
        if not array.flags.aligned:  # a small tensor that shares a frame with its header
            array = array.copy()
        event = TransferEvent.now("receive", key, received.source, received.frames)
        with self._changed:
            if not self._schedule.add_tensor(key.step, name, time.monotonic() + self._early_seconds):
                return
            request = self._requests.setdefault(key.step, _Request(Recorder(enabled=True)))
            request.values[name] = array
            request.recorder.transfer(event, name)
            self._changed.notify_all()

    def _send_one(self, outgoing: OutgoingTensor) -> None:
        request = self._requests.get(outgoing.step)
        if request is None:
            return  # the request was aborted
        try:
            self._send(outgoing, request.recorder)
        except Exception as error:
            log.exception("sending %s failed", outgoing.name)
            self._fail(outgoing.step, self._step_failed(f"sending {outgoing.name} to rank {outgoing.target}: {error}"))
            return
        with self._changed:
            request.sending -= 1
        self._complete(outgoing.step, request)

    def _send(self, outgoing: OutgoingTensor, recorder: Recorder) -> None:
        key = TileKey(
            self._epoch, outgoing.step, self._tensor_numbers[outgoing.name], Phase.TENSOR, 0, self._routes.rank
        )
        frames = encode_tile(self._token, key, outgoing.array, self._codecs[outgoing.target])
        recorder.transfer(TransferEvent.now("send", key, outgoing.target, frames), outgoing.name)
        self._transport.send(outgoing.target, frames)


def _check_sizes(routes: Routes, outputs: Mapping[str, Array]) -> None:
    """Raise FrameTooLarge for an output that must be sent but is too large for a frame."""
    for name, array in outputs.items():
        if array.nbytes > MAX_PAYLOAD_FRAME_BYTES and (name in routes.targets or name in routes.graph_outputs):
            raise FrameTooLarge(num_bytes=array.nbytes, cap_bytes=MAX_PAYLOAD_FRAME_BYTES)
