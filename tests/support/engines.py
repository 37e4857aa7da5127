"""A plan's workers in one process, over the in-memory transport: real chunks, real shards, real engines."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from agent.store import ShardStore
from agent.worker.communicator import Communicator, link_codecs
from agent.worker.engine import Engine
from agent.worker.shard import load_shard
from agent.worker.staging import make_staging
from hearth.messages import DeviceTrace, RunStep, StepDone
from hearth.model.checkpoint import Checkpoint
from hearth.model.sharding import chunk_bytes, chunks_for_rank, manifest
from hearth.plan import Plan
from hearth.transport.memory import MemoryHub

TOKEN = bytes(range(16))


class EngineCluster:
    """Context manager: all ranks of `plan`, each with only the chunks that its rank needs."""

    def __init__(
        self,
        model_dir: Path,
        plan: Plan,
        folder: Path,
        bytes_per_second: float | None = None,
        compute_device: str = "cpu",
    ) -> None:
        self.plan = plan
        self.hub = MemoryHub(plan.num_ranks, bytes_per_second)
        self.communicators: list[Communicator] = []
        self.engines: list[Engine] = []
        self._step = 0
        with Checkpoint(model_dir) as checkpoint:
            refs = manifest(checkpoint, plan.model)
            for rank in range(plan.num_ranks):
                store = ShardStore(folder / f"store{rank}", 1 << 40, f"device{rank}")
                chunks = chunks_for_rank(refs, plan, rank)
                for ref in chunks:
                    store.put(ref.hash, chunk_bytes(checkpoint, plan.model, ref.kind, ref.layer, ref.grain))
                staging = make_staging(compute_device)
                shard = load_shard(plan, rank, chunks, store.path_of, staging.device)
                rates = {peer: bytes_per_second or 1e9 for peer in range(plan.num_ranks) if peer != rank}
                codecs = link_codecs(plan, rank, rates)
                communicator = Communicator(self.hub.transport(rank), plan.epoch, TOKEN, codecs)
                communicator.start()
                self.communicators.append(communicator)
                self.engines.append(Engine(plan, rank, shard, communicator, staging))

    def __enter__(self) -> EngineCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for communicator in self.communicators:
            communicator.close()
        self.hub.close()

    def run(
        self,
        sequences: Sequence[Sequence[int]],
        output: str = "hidden",
        trace: bool = False,
        timeout: float = 30.0,
    ) -> tuple[np.ndarray[Any, Any], list[StepDone]]:
        """All rows [T,H] in order (or the sum over ranks), and each rank's answer."""
        self._step += 1
        request = RunStep(
            holder="test", epoch=self.plan.epoch, step=self._step, output=output, timeout_seconds=timeout, trace=trace
        )  # fmt: skip
        ids = np.concatenate([np.asarray(s, dtype=np.int32) for s in sequences])
        lengths = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
        with ThreadPoolExecutor(len(self.engines)) as pool:
            results = list(pool.map(lambda engine: engine.run(request, ids, lengths), self.engines))
        parts = [part for _, part in results]
        rows = np.concatenate(parts) if output == "hidden" else sum(parts[1:], parts[0])
        return rows, [done for done, _ in results]

    def traces(self, answers: Sequence[StepDone]) -> list[DeviceTrace]:
        """One clock for all: they share this process."""
        return [DeviceTrace(device=f"device{rank}", events=done.trace) for rank, done in enumerate(answers)]
