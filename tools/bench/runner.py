"""One emulated device of a benchmark: the worker's real engine, for several plans that stay loaded at once.

`python -m tools.bench.runner ipc://PATH HOST`, inside the device's namespace and limits. Takes one JSON request at a
time. Only the plan whose step is asked for works; the others' threads wait in `poll`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from agent.worker.allocator import keep_freed_buffers
from agent.worker.communicator import Communicator
from agent.worker.engine import Engine
from agent.worker.shard import Shard, load_shard
from agent.worker.staging import CpuStaging
from hearth.codec import Codec
from hearth.messages import ChunkRef, Peer, RunStep
from hearth.plan import Plan, plan_from_json
from hearth.security import new_keypair
from hearth.transport.sockets import SocketTransport


@dataclass
class _Loaded:
    plan: Plan
    rank: int
    shard: Shard
    transport: SocketTransport
    communicator: Communicator | None = None
    engine: Engine | None = None
    step: int = 0


class Runner:
    def __init__(self, host: str) -> None:
        torch.set_num_threads(1)
        self._host = host
        self._loaded: dict[str, _Loaded] = {}

    def load(self, plan_id: str, plan: str, rank: int, chunks: list[Any], store: str, encrypt: bool) -> dict[str, Any]:
        refs = tuple(ChunkRef.model_validate(chunk) for chunk in chunks)
        parsed = plan_from_json(plan)
        shard = load_shard(parsed, rank, refs, lambda name: Path(store) / name[:2] / name, torch.device("cpu"))
        keypair = new_keypair() if encrypt else None
        transport = SocketTransport(rank, parsed.num_ranks, self._host, (0, 0), keypair)
        self._loaded[plan_id] = _Loaded(parsed, rank, shard, transport)
        return {"port": transport.port, "public_key": transport.public_key}

    def connect(self, plan_id: str, peers: list[Any]) -> dict[str, Any]:
        loaded = self._loaded[plan_id]
        known = [Peer.model_validate(peer) for peer in peers]
        loaded.transport.connect(known)
        codecs = {peer.rank: Codec(loaded.plan.wire, peer.bytes_per_second, time.perf_counter) for peer in known}
        loaded.communicator = Communicator(loaded.transport, loaded.plan.epoch, bytes(16), codecs)
        loaded.communicator.start()
        loaded.engine = Engine(loaded.plan, loaded.rank, loaded.shard, loaded.communicator, CpuStaging())
        return {}

    def run(self, plan_id: str, num_rows: int, trace: bool = False) -> dict[str, Any]:
        loaded = self._loaded[plan_id]
        assert loaded.engine is not None
        loaded.step += 1
        request = RunStep(
            holder="bench", epoch=loaded.plan.epoch, step=loaded.step, output="mean", timeout_seconds=60.0, trace=trace
        )
        ids = (np.arange(num_rows, dtype=np.int32) * 7919) % loaded.plan.model.vocab_size
        cpu = time.process_time()
        done, output = loaded.engine.run(request, ids, np.array([0, num_rows], dtype=np.int32))
        return {
            "began": done.began_seconds,
            "ended": done.ended_seconds,
            "cpu_seconds": time.process_time() - cpu,
            "wire": done.wire.model_dump(),
            "sums": output[0].astype(float).tolist(),
            "trace": [event.model_dump() for event in done.trace],
        }

    def unload(self, plan_id: str) -> dict[str, Any]:
        loaded = self._loaded.pop(plan_id)
        if loaded.communicator is not None:
            loaded.communicator.close()
        else:
            loaded.transport.close()
        return {}


def main() -> None:
    keep_freed_buffers()
    serve(sys.argv[1], Runner(sys.argv[2]))


def serve(address: str, target: object) -> None:
    """Answer requests `{"do": METHOD, ...}` for ever; the parent ends us."""
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        request = json.loads(socket.recv())
        try:
            answer = getattr(target, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        socket.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
