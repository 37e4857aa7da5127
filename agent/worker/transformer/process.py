"""The worker process of a transformer: `python -m agent.worker.transformer.process SOCKET LOG_LEVEL`, started by the daemon.

A control thread speaks with the daemon; the main thread computes; the communicator has its own thread.
"""

from __future__ import annotations

import logging
import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent.worker.allocator import keep_freed_buffers
from agent.worker.control import Control, become_a_worker
from agent.worker.transformer.comm.communicator import Communicator, link_codecs
from agent.worker.transformer.comm.staging import make_staging
from agent.worker.transformer.engine import Engine
from agent.worker.transformer.generation.leader import Leader
from agent.worker.transformer.generation.steps import LEADER, Generation
from agent.worker.transformer.shard import load_shard
from hearth.errors import BadRequest, HearthError, InternalError, StepFailed
from hearth.plan.plan import is_transformer_plan
from hearth.platform.security import new_keypair
from hearth.transport.sockets import SocketTransport
from hearth.wire.framing import pack_array, unpack_arrays
from hearth.wire.messages import (
    Abort,
    Cancel,
    ConnectPeers,
    Done,
    Failed,
    GenerateTokens,
    Message,
    Run,
    ShardParts,
    Start,
    WorkerBound,
)

log = logging.getLogger("hearth.worker")


class Worker:
    """One deployed plan: first bound, then connected, then running steps."""

    def __init__(self, start: Start) -> None:
        load = start.load
        assert is_transformer_plan(load.plan)
        assert isinstance(load.parts, ShardParts)
        self._plan = load.plan
        torch.set_num_threads(start.num_threads)
        staging = make_staging(start.compute_device)
        store = Path(start.store_path)
        shard = load_shard(
            load.plan, load.rank, load.parts.chunks, lambda chunk: store / chunk[:2] / chunk, staging.device
        )
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
        load, plan = self._load, self._plan
        self._transport.connect(request.peers)
        codecs = link_codecs(plan, load.rank, {peer.rank: peer.bytes_per_second for peer in request.peers})
        self._communicator = Communicator(self._transport, plan.epoch, load.plan_token, codecs)
        self._communicator.start()
        self._engine = Engine(plan, load.rank, self._shard, self._communicator, self._staging)
        if self.generates:
            generation = Generation(plan, load.rank, self._shard, self._communicator, self._staging)
            if load.rank == LEADER:
                self.leader = Leader(plan, generation)
            else:
                self.follower = generation

    @property
    def generates(self) -> bool:
        """Whether this plan is for a decoder: then rank 0 leads and the others follow."""
        return self._plan.body.generation is not None

    def run(self, request: Run, payload: list[bytes]) -> tuple[Message, list[Any]]:
        if self._engine is None:
            raise StepFailed(device=f"rank {self._load.rank}", reason="its peers are not connected yet")
        arrays = unpack_arrays(request.names, payload)
        if arrays.keys() != {"token_ids", "cumulative_lengths"}:
            raise BadRequest(
                reason=f"a step takes token_ids and cumulative_lengths, not {', '.join(arrays) or 'nothing'}"
            )
        done, output = self._engine.run(request, arrays["token_ids"], arrays["cumulative_lengths"])
        return done, pack_array(np.ascontiguousarray(output))

    def abort(self, reason: str) -> None:
        if self._communicator is not None:
            self._communicator.abort(StepFailed(device=f"rank {self._load.rank}", reason=reason))

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
        else:
            self._transport.close()


class _Control(Control):
    worker: Worker | None = None

    def urgent(self, request_id: bytes, message: Message, payload: list[bytes]) -> bool:
        if isinstance(message, Abort) and self.worker is not None:
            self.worker.abort(message.reason)
        return isinstance(message, Abort)


def _handle(control: _Control, message: Message, payload: list[bytes]) -> tuple[Message, list[Any]]:
    if isinstance(message, Start):
        control.worker = Worker(message)
        return control.worker.bound, []
    if control.worker is None:
        raise BadRequest(reason="the worker was not started")
    if isinstance(message, ConnectPeers):
        control.worker.connect(message)
        return Done(), []
    if isinstance(message, Run):
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


def main() -> None:
    become_a_worker()
    keep_freed_buffers()
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
