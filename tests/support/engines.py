"""A plan's workers in one process, over the in-memory transport: real chunks, real shards, real engines."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.memory_transport import MemoryHub
from support.waiting import PATIENCE

from agent.daemon.store import ShardStore
from agent.worker.transformer.comm.communicator import Communicator, link_codecs
from agent.worker.transformer.comm.staging import make_staging
from agent.worker.transformer.engine import EncoderEngine
from agent.worker.transformer.generation.leader import Leader, Replies
from agent.worker.transformer.generation.local_draft import LocalDraft
from agent.worker.transformer.generation.speculation import Speculation, StepTimes
from agent.worker.transformer.generation.steps import StepExecutor
from agent.worker.transformer.loading import load_shard
from agent.worker.transformer.shard import Shard
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.sharding import build_manifest, chunk_bytes
from hearth.errors import HearthError
from hearth.grammars import Grammars, Vocabulary
from hearth.plan.kernels import KernelChoice
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan, draft_plan
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array

TOKEN = bytes(range(16))

torch.set_num_threads(1)  # the ranks are threads of this process; further threads of torch would only wait for a core


@cache
def _store() -> tuple[ShardStore, tempfile.TemporaryDirectory[str]]:
    """One store for all clusters of this process: chunks are named by their content."""
    folder = tempfile.TemporaryDirectory(prefix="hearth-chunks-")
    return ShardStore(Path(folder.name), 1 << 40, "all devices"), folder


@cache
def _stored_chunks(model_dir: Path, spec: ModelSpec) -> dict[wire.ChunkRef, Path]:
    """Every chunk of a model, cut once: clusters differ in the distribution of chunks."""
    store, _ = _store()
    return store_chunks(model_dir, spec, store)


def store_chunks(model_dir: Path, spec: ModelSpec, store: ShardStore) -> dict[wire.ChunkRef, Path]:
    """Cut a checkpoint into chunks; return the file of each in `store`."""
    checkpoint = Checkpoint(model_dir)
    refs = build_manifest(checkpoint, spec)
    for ref in refs:
        store.put(ref.hash, chunk_bytes(checkpoint, spec, ref.kind, ref.layer, ref.grain))
    return {ref: store.path_of(ref.hash) for ref in refs}


class EngineCluster:
    """Context manager: all ranks of `plan`, each with only the chunks that its rank needs.

    `chunks`: those of `store_chunks`. By default, the model is cut once and its chunks stay until this process ends.
    """

    def __init__(
        self,
        model_dir: Path,
        plan: TransformerPlan,
        *,
        bytes_per_second: float | None = None,
        compute_device: str = "cpu",
        chunks: Mapping[wire.ChunkRef, Path] | None = None,
        vocabulary: Vocabulary | None = None,
        kernels: Sequence[KernelChoice] = (),
    ) -> None:
        self.plan = plan
        self.hub = MemoryHub(plan.num_ranks, bytes_per_second)
        self.shards: list[Shard] = []
        self.communicators: list[Communicator] = []
        self.engines: list[EncoderEngine] = []
        self.executors: list[StepExecutor] = []
        self._step = 0
        stored = _stored_chunks(model_dir, plan.model) if chunks is None else chunks
        for rank in range(plan.num_ranks):
            needed = chunks_for_rank(tuple(stored), plan, rank)
            own = {ref.hash: stored[ref] for ref in needed}  # access to any other chunk is a KeyError
            staging = make_staging(compute_device)
            shard = load_shard(plan, rank, needed, own.__getitem__, staging.device, kernels=kernels)
            rates = {peer: bytes_per_second or 1e9 for peer in range(plan.num_ranks) if peer != rank}
            codecs = link_codecs(plan, rank, rates)
            communicator = Communicator(self.hub.transport(rank), plan.epoch, TOKEN, codecs)
            communicator.start()
            self.shards.append(shard)
            self.communicators.append(communicator)
            self.engines.append(EncoderEngine(plan, rank, shard, communicator, staging))
            if plan.body.generation is not None:
                grammars = Grammars(vocabulary) if vocabulary is not None else None
                self.executors.append(StepExecutor(plan, rank, shard, communicator, staging, None, grammars))

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
        timeout: float = 30.0 * PATIENCE,
    ) -> tuple[np.ndarray[Any, Any], list[wire.RunDone]]:
        """All rows [T,H] in order (or the sum over ranks), and each rank's answer."""
        self._step += 1
        request = wire.Run(
            holder="test", epoch=self.plan.epoch, step=self._step, output=output, timeout_seconds=timeout, trace=trace
        )  # fmt: skip
        ids = np.concatenate([np.asarray(s, dtype=np.int32) for s in sequences])
        lengths = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
        with ThreadPoolExecutor(len(self.engines)) as pool:
            results = list(pool.map(lambda engine: engine.run(request, ids, lengths), self.engines))
        parts = [part for _, part in results]
        self.rows_by_rank = [len(part) for part in parts]
        rows = np.concatenate(parts) if output == "hidden" else sum(parts[1:], parts[0])
        return rows, [done for done, _ in results]

    def traces(self, answers: Sequence[wire.RunDone]) -> list[wire.DeviceTrace]:
        """Traces with one clock, since all ranks share this process."""
        return [
            wire.DeviceTrace(device=f"device{rank}", rank=rank, events=done.trace) for rank, done in enumerate(answers)
        ]


def local_draft(model_dir: Path, plan: TransformerPlan) -> LocalDraft:
    """The draft model of a plan, whose weights are in `model_dir`."""
    alone = draft_plan(plan)
    stored = _stored_chunks(model_dir, alone.model)
    by_hash = {ref.hash: path for ref, path in stored.items()}
    staging = make_staging("cpu")
    shard = load_shard(alone, 0, tuple(stored), by_hash.__getitem__, staging.device)
    return LocalDraft(alone, shard, plan.model.vocab_size, staging.device)


class GenerationCluster:
    """Generation on all ranks of a cluster: rank 0 leads in the caller's thread, the others follow in theirs."""

    def __init__(self, cluster: EngineCluster, speculation: Speculation | None = None) -> None:
        self.leader = Leader(cluster.plan, cluster.executors[0], speculation=speculation)
        self.answers: dict[bytes, list[int]] = {}
        self.log_probs: dict[bytes, list[wire.TokenLogProbs]] = {}
        self.ended: dict[bytes, wire.GenerationEnded] = {}
        self.refused: list[bytes] = []  # requests that failed alone
        self.chosen: list[bytes] = []  # the request of every token, in the order in which tokens were chosen
        self._followers = [
            threading.Thread(target=self._follow, args=(executor,), daemon=True) for executor in cluster.executors[1:]
        ]
        for thread in self._followers:
            thread.start()

    def submit(
        self, prompt: Sequence[int], max_tokens: int, sampling: wire.Sampling | None = None, **fields: Any
    ) -> bytes:
        request = wire.GenerateTokens(
            holder="test", epoch=1, max_tokens=max_tokens, sampling=sampling or wire.Sampling(), **fields
        )  # fmt: skip
        request_id = len(self.answers).to_bytes(8, "little")
        self.answers[request_id], self.log_probs[request_id] = [], []
        payload = [bytes(frame) for frame in pack_array(np.asarray(prompt, dtype=np.int32))]
        self._take(self.leader.submit(request_id, request, payload))
        return request_id

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: wire.Sampling | None = None, **fields: Any
    ) -> list[list[int]]:
        """The answers to all prompts at once, once everything has been answered."""
        requests = [self.submit(prompt, max_tokens, sampling, **fields) for prompt in prompts]
        self.run()
        return [self.answers[request] for request in requests]

    def step(self) -> None:
        self._take(self.leader.step())

    def _take(self, replies: Replies) -> None:
        for request_id, message in replies:
            if isinstance(message, wire.TokensGenerated):
                self.answers[request_id] += message.token_ids
                self.log_probs[request_id] += message.log_probs
                self.chosen += [request_id] * len(message.token_ids)
            elif isinstance(message, wire.GenerationEnded):
                self.ended[request_id] = message
            elif isinstance(message, wire.Failed):
                if message.error().scope != "request":
                    raise message.error()
                self.refused.append(request_id)

    def run(self) -> None:
        while not self.leader.idle:
            self.step()

    @staticmethod
    def _follow(executor: StepExecutor) -> None:
        try:
            while True:
                executor.execute_next()
        except HearthError:
            return


def speculative_answers(
    model_dir: Path,
    plan: TransformerPlan,
    prompts: Sequence[Sequence[int]],
    speculation: Speculation,
    sampling: wire.Sampling,
    **fields: Any,
) -> tuple[list[list[int]], int, int]:
    """The answers of 20 tokens to all prompts at once, and the number of drafted and of accepted tokens."""
    with EngineCluster(model_dir, plan) as cluster:
        home = GenerationCluster(cluster, speculation)
        answers = home.answer(prompts, 20, sampling, prefix_scope="app", **fields)
        assert cluster.executors[0].num_sequences == 0
    ends = home.ended.values()
    return answers, sum(end.num_drafted for end in ends), sum(end.num_accepted for end in ends)


class FreeRows(StepTimes):
    """As if further rows cost nothing, so that everything is drafted."""

    def is_measured(self, num_rows: int) -> bool:
        return True

    def seconds(self, num_rows: int) -> float:
        return 1.0


def free_speculation(*settings: Any) -> Speculation:
    """Speculation that drafts everything; `settings` as for `Speculation`."""
    speculation = Speculation(*settings)
    speculation.times = FreeRows()
    return speculation
