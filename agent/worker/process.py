"""The worker process: `python -m agent.worker.process SOCKET`, started by the daemon, one per deployed plan.

A control thread speaks with the daemon over a private ipc socket; the main thread computes; the communicator has its
own thread. When the daemon goes away, so does the worker.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from agent.worker.allocator import keep_freed_buffers
from agent.worker.communicator import Communicator, link_codecs
from agent.worker.engine import Engine
from agent.worker.generation import LEADER, Generation
from agent.worker.leader import Leader
from agent.worker.shard import load_shard
from agent.worker.staging import make_staging
from hearth.errors import BadRequest, HearthError, InternalError, StepFailed
from hearth.framing import pack_array, unpack_array
from hearth.messages import (
    AbortStep,
    Cancel,
    ConnectPeers,
    Done,
    Failed,
    GenerateTokens,
    Message,
    RunStep,
    StartWorker,
    WorkerBound,
    decode,
    encode,
)
from hearth.security import new_keypair
from hearth.transport.sockets import SocketTransport

log = logging.getLogger("hearth.worker")

_OOM_SCORE_ADJUST = "500"  # when memory runs out the kernel takes the worker, never the daemon
_PR_SET_PDEATHSIG = 1


class Worker:
    """One deployed plan: first bound, then connected, then running steps."""

    def __init__(self, start: StartWorker) -> None:
        load = start.load
        torch.set_num_threads(start.num_threads)
        staging = make_staging(start.compute_device)
        store = Path(start.store_path)
        shard = load_shard(load.plan, load.rank, load.chunks, lambda chunk: store / chunk[:2] / chunk, staging.device)
        self._load = load
        self._shard = shard
        self._staging = staging
        self._transport = SocketTransport(
            load.rank,
            load.plan.num_ranks,
            start.bind_host,
            start.ports,
            new_keypair() if load.encrypt_data_plane else None,
        )
        self._communicator: Communicator | None = None
        self._engine: Engine | None = None
        self.leader: Leader | None = None
        self.follower: Generation | None = None
        self.bound = WorkerBound(
            port=self._transport.port,
            public_key=self._transport.public_key,
            num_bytes_loaded=shard.num_bytes(),
            weight_error=shard.weight_error(),
        )

    def connect(self, request: ConnectPeers) -> None:
        load = self._load
        self._transport.connect(request.peers)
        codecs = link_codecs(load.plan, load.rank, {peer.rank: peer.bytes_per_second for peer in request.peers})
        self._communicator = Communicator(self._transport, load.plan.epoch, load.plan_token, codecs)
        self._communicator.start()
        self._engine = Engine(load.plan, load.rank, self._shard, self._communicator, self._staging)
        if self.generates:
            generation = Generation(load.plan, load.rank, self._shard, self._communicator, self._staging)
            if load.rank == LEADER:
                self.leader = Leader(load.plan, generation)
            else:
                self.follower = generation

    @property
    def generates(self) -> bool:
        """Whether this plan is for a decoder: then rank 0 leads and the others follow."""
        return self._load.plan.generation is not None

    def run(self, request: RunStep, payload: list[bytes]) -> tuple[Message, list[Any]]:
        if self._engine is None:
            raise StepFailed(device=f"rank {self._load.rank}", reason="its peers are not connected yet")
        if len(payload) != 4:
            raise BadRequest(reason=f"a step takes two arrays, not {len(payload)} frames")
        done, output = self._engine.run(request, unpack_array(payload[:2]), unpack_array(payload[2:]))
        return done, pack_array(np.ascontiguousarray(output))

    def abort(self, reason: str) -> None:
        if self._communicator is not None:
            self._communicator.abort(StepFailed(device=f"rank {self._load.rank}", reason=reason))

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
        else:
            self._transport.close()


class _Control:
    """The control thread: requests from the daemon into a queue, answers from the main thread back to the daemon."""

    def __init__(self, address: str) -> None:
        self.requests: queue.SimpleQueue[tuple[bytes, Message, list[bytes]]] = queue.SimpleQueue()
        self.worker: Worker | None = None
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._answers = self._context.socket(zmq.PAIR)
        self._answers.bind("inproc://answers")
        self._address = address
        threading.Thread(target=self._loop, name="control", daemon=True).start()

    def answer(self, request_id: bytes, message: Message, payload: list[Any]) -> None:
        self._answers.send_multipart([request_id, encode(message), *payload])

    def _loop(self) -> None:
        daemon = self._context.socket(zmq.PAIR)
        daemon.connect(self._address)
        answers = self._context.socket(zmq.PAIR)
        answers.connect("inproc://answers")
        poller = zmq.Poller()
        poller.register(daemon, zmq.POLLIN)
        poller.register(answers, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if answers in ready:
                daemon.send_multipart(answers.recv_multipart())
            if daemon in ready:
                request_id, body, *payload = daemon.recv_multipart()
                message = decode(body)
                if isinstance(message, AbortStep):
                    if self.worker is not None:
                        self.worker.abort(message.reason)
                else:
                    self.requests.put((request_id, message, payload))


def _handle(control: _Control, message: Message, payload: list[bytes]) -> tuple[Message, list[Any]]:
    if isinstance(message, StartWorker):
        control.worker = Worker(message)
        return control.worker.bound, []
    if control.worker is None:
        raise BadRequest(reason="the worker was not started")
    if isinstance(message, ConnectPeers):
        control.worker.connect(message)
        return Done(), []
    if isinstance(message, RunStep):
        if control.worker.generates:
            raise BadRequest(reason="the plan is for a model that generates: it takes GenerateTokens")
        return control.worker.run(message, payload)
    raise BadRequest(reason=f"a worker does not take {type(message).__name__}")


def _answer(control: _Control, message: Message, payload: list[bytes]) -> tuple[Message, list[Any]]:
    try:
        return _handle(control, message, payload)
    except HearthError as error:
        return Failed.of(error), []
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Failed.of(StepFailed(device="this device", reason=f"out of memory: {error}")), []
    except Exception as error:
        log.exception("%s failed", type(message).__name__)
        return Failed.of(InternalError(where="the worker", reason=f"{type(error).__name__}: {error}")), []


def _lead(control: _Control, leader: Leader) -> None:
    """Serve requests for ever: those that came are taken in between two steps."""
    while True:
        try:
            request_id, message, payload = control.requests.get(block=leader.idle)
        except queue.Empty:
            for answered, answer in leader.step():
                control.answer(answered, answer, [])
            continue
        try:
            if isinstance(message, GenerateTokens):
                leader.submit(request_id, message, payload)
            elif isinstance(message, Cancel):
                leader.cancel(message.request)
            else:
                control.answer(request_id, *_answer(control, message, payload))
        except HearthError as error:
            control.answer(request_id, Failed.of(error), [])


def _follow(generation: Generation) -> None:
    """Execute orders until one fails: rank 0 learns of it when nothing comes, or was told already what failed first."""
    try:
        while True:
            generation.follow()
    except HearthError as error:
        log.warning("following rank %d has ended: %s", LEADER, error)


def _die_with_the_daemon() -> None:
    """Linux sends SIGKILL when the parent dies; if it died before we asked, leave at once."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    _die_with_the_daemon()
    keep_freed_buffers()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the daemon, which ends us in order
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    try:
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJUST)
    except OSError as error:
        log.info("oom_score_adj was not raised: %s", error)
    control = _Control(sys.argv[1])
    while True:
        request_id, message, payload = control.requests.get()
        control.answer(request_id, *_answer(control, message, payload))
        worker = control.worker
        if worker is not None and worker.leader is not None:
            _lead(control, worker.leader)
        if worker is not None and worker.follower is not None:
            following, worker.follower = worker.follower, None
            _follow(following)


if __name__ == "__main__":
    main()
