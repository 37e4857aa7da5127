"""One emulated device of a benchmark: the worker's engine, with several plans loaded at once.

`python -m tools.bench.runner ipc://PATH HOST`, inside the device's namespace and limits. Executes one JSON request at a
time. Threads of other loaded plans wait in `poll`.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from agent.worker.transformer.comm.collectives import Collectives
from agent.worker.transformer.comm.communicator import Communicator, link_codecs
from agent.worker.transformer.comm.staging import CpuStaging, WireTile
from agent.worker.transformer.engine import EncoderEngine
from agent.worker.transformer.generation.leader import Leader
from agent.worker.transformer.generation.local_draft import LocalDraft
from agent.worker.transformer.generation.sequence import SequenceState
from agent.worker.transformer.generation.speculation import Speculation
from agent.worker.transformer.generation.steps import LEADER_RANK, StepExecutor
from agent.worker.transformer.loading import load_shard
from agent.worker.transformer.profiler import profile_blocks
from agent.worker.transformer.shard import Shard
from coordinator.serve.state import DEFAULT_MAX_DRAFTED
from hearth.errors import StepFailed
from hearth.plan.kernels import KernelChoice
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan, draft_plan, plan_from_json
from hearth.platform.curve import new_keypair
from hearth.platform.machine import keep_freed_buffers
from hearth.transport.base import Transport
from hearth.transport.sockets import SocketTransport
from hearth.wire.codec import Array, Conversions
from hearth.wire.framing import TileKey, pack_array
from hearth.wire.messages import ChunkRef, Failed, GenerateTokens, GenerationEnded, Peer, Run, RunDone, TokensGenerated
from tools.bench.processes import serve
from tools.testbed.calibrate import Layers

_TOKEN = bytes(16)
_STEP_SECONDS = 60.0  # timeout of a step
# A link is measured with messages of a tile's size, with enough in flight to keep the link busy.
_MESSAGE_BYTES = 128 << 10
_WINDOW = 12  # messages in flight
_PINGS = 15  # round trips measured
_END = b"end"  # last message of a link measurement
_LINK_TIMEOUT_SECONDS = 30.0  # for a message of a link measurement
_MADE_UP = np.zeros(1, np.float32)  # stands for anything that a peer would send; tiles do not read it


class Oracle:
    """A proposer that knows the text, and is right about each token with the same probability."""

    def __init__(self, text: Sequence[int], right: float) -> None:
        self._text = text
        self._right = right
        self._chance = random.Random(len(text))

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        coming = self._text[len(tokens) : len(tokens) + count]
        return [token if self._chance.random() < self._right else token ^ 1 for token in coming]


class DraftOracle(LocalDraft):
    """A draft model that takes its time, and whose guesses are those of an oracle: its KV cache keeps the accepted ones."""

    oracle = Oracle((), 0.0)

    def next_token(self, sequence: SequenceState, tokens: Sequence[int], logits_V: np.ndarray[Any, Any]) -> int:
        super().next_token(sequence, tokens, logits_V)
        return self.oracle.propose(tokens, 1)[0]


# ---- steps of one rank without its peers: its computations, on made-up tiles that are there at once --------------------


def isolated_engine(
    plan: TransformerPlan, rank: int, shard: Shard, transport: Transport, epoch: int, token: bytes
) -> EncoderEngine:
    """An engine whose steps compute all that this rank computes in a step, exchange nothing, and wait for nothing.

    Their output is meaningless. Of `transport` only the ranks are used.
    """
    return EncoderEngine(plan, rank, shard, _NoPeers(transport, epoch, token, {}), CpuStaging(), _MadeUpTiles)


class _NoPeers(Communicator):
    """Sends nothing; `_MADE_UP` has arrived in place of everything that peers would send."""

    def send(self, target: int, key: TileKey, tile: Array, converted: Conversions | None = None) -> None:
        """Drop the tile."""

    def reduce(self, key: TileKey, partial: Array) -> None:
        """Drop the partial sum."""

    def has_arrived(self, keys: Sequence[TileKey]) -> bool:
        return True

    def receive(self, keys: Sequence[TileKey]) -> list[Array]:
        return [_MADE_UP] * len(keys)

    def receive_first(self, groups: Sequence[Sequence[TileKey]]) -> tuple[int, list[Array]]:
        return 0, self.receive(groups[0])


class _MadeUpTiles(Collectives):
    """Writes a tile's values as the staging would, but all are 1: what memory holds by chance can be slow to compute with."""

    def _write_tile(self, tile: WireTile, into: Tensor, add: bool = False) -> None:
        (into.add_ if add else into.fill_)(1.0)


# ---- the runner -------------------------------------------------------------------------------------------------------


@dataclass
class _Loaded:
    plan: TransformerPlan
    rank: int
    shard: Shard
    transport: SocketTransport
    communicator: Communicator = field(init=False)  # set by `connect`, as the next ones
    engine: EncoderEngine = field(init=False)
    isolated: EncoderEngine = field(init=False)  # computes the same steps without the other ranks
    generation: StepExecutor = field(init=False)  # of a decoder
    leader: Leader = field(init=False)  # of a decoder's first rank
    speculation: Speculation = field(init=False)  # of the leader
    oracle: Oracle = field(init=False)  # proposes the tokens of a request that guesses
    draft: DraftOracle | None = None  # instead, on the rank of the plan's draft model
    step: int = 0


class Runner:
    """The worker side of a device, driven by the benchmark: loads shards, connects, runs steps."""

    _link: SocketTransport  # of a link measurement, from `open_link` on

    def __init__(self, host: str) -> None:
        torch.set_num_threads(1)
        self._host = host
        self._loaded: dict[str, _Loaded] = {}
        self._shards: WeakValueDictionary[str, Shard] = WeakValueDictionary()  # of the loaded plans, by content
        self._busy = threading.Event()
        self._layers: Layers | None = None
        self._computing: threading.Thread | None = None

    # ---- plans ----------------------------------------------------------------------------------------------------

    def load(
        self,
        plan_id: str,
        plan: str,
        rank: int,
        chunks: list[Any],
        store: str,
        encrypt: bool,
        kernels: Sequence[Any] = (),
        draft: tuple[Sequence[Any], str] | None = None,
    ) -> dict[str, Any]:
        """Load a plan's shard. `kernels`: the measured choice; without, the worker's defaults.

        `draft`: chunks and store of its draft model.
        """
        parsed = plan_from_json(plan, TransformerPlan)
        shard = self._shard(parsed, rank, chunks, store, kernels)
        keypair = new_keypair() if encrypt else None
        transport = SocketTransport(rank, parsed.num_ranks, self._host, (0, 0), keypair)
        self._loaded[plan_id] = loaded = _Loaded(parsed, rank, shard, transport)
        if draft is not None and (alone := draft_plan(parsed)) is not None:
            whole = self._shard(alone, 0, *draft)
            loaded.draft = DraftOracle(alone, whole, parsed.model.vocab_size, torch.device("cpu"))
        return {"port": transport.port, "public_key": transport.public_key}

    def _shard(
        self, plan: TransformerPlan, rank: int, chunks: Sequence[Any], store: str, kernels: Sequence[Any] = ()
    ) -> Shard:
        """Load a shard. Plans that differ only in communication share their weights."""
        shares = plan.body.model_dump(mode="json", exclude={"overlap", "exact_links", "seq_len", "generation"})
        key = json.dumps([store, rank, shares, kernels], sort_keys=True)
        if (shard := self._shards.get(key)) is None:
            refs = tuple(map(ChunkRef.model_validate, chunks))
            choices = tuple(map(KernelChoice.model_validate, kernels))
            shard = self._shards[key] = load_shard(
                plan, rank, refs, lambda name: Path(store, name[:2], name), torch.device("cpu"), kernels=choices
            )
        return shard

    def connect(self, plan_id: str, peers: list[Any]) -> None:
        loaded = self._loaded[plan_id]
        known = [Peer.model_validate(peer) for peer in peers]
        loaded.transport.connect(known)
        codecs = link_codecs(loaded.plan, loaded.rank, {peer.rank: peer.bytes_per_second for peer in known})
        loaded.communicator = Communicator(loaded.transport, loaded.plan.epoch, _TOKEN, codecs)
        loaded.communicator.start()
        parts = (loaded.plan, loaded.rank, loaded.shard, loaded.communicator, CpuStaging())
        loaded.engine = EncoderEngine(*parts)
        loaded.isolated = isolated_engine(*parts[:3], loaded.transport, loaded.plan.epoch, _TOKEN)
        if loaded.plan.body.generation is not None:
            loaded.generation = StepExecutor(*parts)
            if loaded.rank == LEADER_RANK:
                loaded.speculation = Speculation(lambda: loaded.oracle, loaded.draft)
                loaded.leader = Leader(loaded.plan, loaded.generation, speculation=loaded.speculation)

    def run(self, plan_id: str, num_rows: int, trace: bool = False) -> dict[str, Any]:
        """Run one step. A step with a trace must not be timed."""
        loaded = self._loaded[plan_id]
        done, output = self._step(loaded, loaded.engine, num_rows, trace)
        return {
            "began": done.began_seconds,
            "ended": done.ended_seconds,
            "sums": output[0].astype(float).tolist(),
            "trace": [event.model_dump(mode="json") for event in done.trace],
        }

    def compute(self, plan_id: str, num_rows: int) -> dict[str, Any]:
        """Run the computations of one step without the other ranks, and trace them."""
        loaded = self._loaded[plan_id]
        done, _ = self._step(loaded, loaded.isolated, num_rows, trace=True)
        return {"trace": [event.model_dump(mode="json") for event in done.trace]}

    @staticmethod
    def _step(loaded: _Loaded, engine: EncoderEngine, num_rows: int, trace: bool) -> tuple[RunDone, Any]:
        loaded.step += 1
        request = Run(
            holder="bench", epoch=loaded.plan.epoch, step=loaded.step, output="mean", timeout_seconds=_STEP_SECONDS,
            trace=trace,
        )  # fmt: skip
        ids = (np.arange(num_rows, dtype=np.int32) * 7919) % loaded.plan.model.vocab_size
        return engine.run(request, ids, np.array([0, num_rows], dtype=np.int32))

    def begin_to_compute(self) -> None:
        """Run a dummy load of layers until `end_computing`."""
        self._layers = self._layers or Layers()
        self._busy.set()
        self._computing = threading.Thread(target=self._compute, args=(self._layers,), daemon=True)
        self._computing.start()

    def end_computing(self) -> None:
        self._busy.clear()
        if self._computing is not None:
            self._computing.join()

    def _compute(self, layers: Layers) -> None:
        while self._busy.is_set():
            layers.run()

    def generate(
        self,
        plan_id: str,
        prompt: list[int],
        num_tokens: int,
        text: Sequence[int] = (),
        right: float = 0.0,
        prefix_scope: str = "",
    ) -> dict[str, Any]:
        """Generate one greedy answer. Other ranks follow rank 0 until it has finished.

        `text`: prompt and answer, of which tokens are guessed, right with the probability `right`. `prefix_scope`: requests
        with the same one share KV caches of equal prefixes.
        """
        loaded = self._loaded[plan_id]
        found: dict[str, Any] = {"tokens": [], "times": []}
        if loaded.rank != LEADER_RANK:
            while loaded.generation.execute_next().rows:
                pass
        else:
            loaded.oracle = Oracle(text, right)
            if loaded.draft is not None:  # guesses alone
                loaded.draft.oracle, loaded.oracle = loaded.oracle, Oracle((), 0.0)
            most = DEFAULT_MAX_DRAFTED if text else 0
            request = GenerateTokens(
                holder="bench", epoch=loaded.plan.epoch, max_tokens=num_tokens, max_drafted=most,
                prefix_scope=prefix_scope,
            )  # fmt: skip
            payload = [bytes(frame) for frame in pack_array(np.asarray(prompt, np.int32))]
            found["submitted"] = time.monotonic()
            loaded.leader.submit(b"bench", request, payload)
            while not loaded.leader.idle:
                for _, message in loaded.leader.step():
                    if isinstance(message, Failed):
                        raise message.error()
                    if isinstance(message, TokensGenerated):
                        found["tokens"] += message.token_ids
                        found["times"] += [time.monotonic()] * len(message.token_ids)
                    if isinstance(message, GenerationEnded):
                        found |= {"prefill": message.prefill_seconds, "decode": message.decode_seconds}
                        found |= {"drafted": message.num_drafted, "accepted": message.num_accepted}
                        found["cached"] = message.num_kept_rows
            times = loaded.speculation.times
            measured = [times.seconds(count) for count in range(1, DEFAULT_MAX_DRAFTED + 2)]
            found["step_seconds"] = [seconds for seconds in measured if math.isfinite(seconds)]  # of 1, 2, ... rows
            found["draft_seconds"] = loaded.draft.seconds(1) if loaded.draft is not None else 0.0
        return found

    def unload(self, plan_id: str) -> None:
        loaded = self._loaded.pop(plan_id)
        loaded.communicator.close()
        loaded.transport.close()
        loaded.transport.release()

    # ---- the profile ----------------------------------------------------------------------------------------------

    def profile(self, model: Any, seq_len: int, num_threads: int) -> dict[str, Any]:
        """Profile one layer's blocks on this device with the agent's profiler."""
        spec = ModelSpec.model_validate(model)
        return {"blocks": profile_blocks(spec, seq_len, num_threads, "cpu").model_dump()}

    # ---- links ----------------------------------------------------------------------------------------------------

    def open_link(self, rank: int) -> dict[str, Any]:
        """Open one end of a link measurement: rank 0 measures, rank 1 answers."""
        self._link = SocketTransport(rank, 2, self._host, (0, 0), new_keypair())
        return {"port": self._link.port, "public_key": self._link.public_key}

    def connect_link(self, peer: Any) -> None:
        self._link.connect([Peer.model_validate(peer)])

    def close_link(self) -> None:
        self._link.close()
        self._link.release()

    def measure_link(self, seconds: float) -> dict[str, Any]:
        """Measure the link. Rate: confirmed bytes / time between the first and the last confirmation."""
        round_trips = [self._exchanged(b"ping") for _ in range(_PINGS)]
        message = bytes(_MESSAGE_BYTES)
        began = time.perf_counter()
        for _ in range(_WINDOW):
            self._link.send(1, [message])
        confirmed = [self._confirmed()]
        while confirmed[-1] < began + seconds or len(confirmed) < 2:
            self._link.send(1, [message])
            confirmed.append(self._confirmed())
        confirmed += [self._confirmed() for _ in range(_WINDOW - 1)]  # the messages in flight
        self._link.send(1, [_END])
        passed = confirmed[-1] - confirmed[0]
        return {
            "bytes_per_second": (len(confirmed) - 1) * _MESSAGE_BYTES / passed,
            "round_trip_seconds": statistics.median(round_trips),
        }

    def ping_link(self, num_bytes: int, count: int) -> dict[str, Any]:
        """Median seconds of half a round trip of messages of this size; the other end echoes them."""
        seconds = [self._exchanged(bytes(num_bytes)) / 2 for _ in range(count)]
        self._link.send(1, [_END])
        return {"seconds": statistics.median(seconds)}

    def answer_link(self, echo: bool = False) -> None:
        """The other end of `measure_link` and, with `echo`, of `ping_link`: answer every message until the last."""
        while (message := self._received())[: len(_END)] != _END:
            self._link.send(0, [message if echo else b"ok"])

    def _exchanged(self, message: bytes) -> float:
        """Seconds from sending a message to receiving the other end's."""
        began = time.perf_counter()
        self._link.send(1 - self._link.rank, [message])
        return self._confirmed() - began

    def _received(self) -> bytes:
        received = self._link.receive(_LINK_TIMEOUT_SECONDS)
        if received is None:
            raise StepFailed(device=self._host, reason="the measurement of a link has stalled")
        return bytes(received.frames[0])

    def _confirmed(self) -> float:
        """The time at which the next message has arrived."""
        self._received()
        return time.perf_counter()


def main() -> None:
    """Serve a `Runner` to the parent process."""
    keep_freed_buffers()
    serve(sys.argv[1], Runner(sys.argv[2]))


if __name__ == "__main__":
    main()
