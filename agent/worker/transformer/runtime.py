"""The worker runtime for transformers: one rank's shard. An encoder runs one request at a time, a decoder several."""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from agent.worker.data_plane import bind_transport
from agent.worker.server import SendAnswer, failed_message
from agent.worker.transformer.comm.communicator import Communicator, link_codecs
from agent.worker.transformer.comm.staging import Staging, make_staging
from agent.worker.transformer.engine import EncoderEngine
from agent.worker.transformer.generation.leader import Leader
from agent.worker.transformer.generation.local_draft import LocalDraft
from agent.worker.transformer.generation.speculation import Speculation
from agent.worker.transformer.generation.steps import LEADER_RANK, StepExecutor
from agent.worker.transformer.kv_cache import KeptCaches
from agent.worker.transformer.loading import HeldWeights, held_weights, load_shard
from agent.worker.transformer.paged_cache import check_format
from agent.worker.transformer.shard import Shard
from hearth.errors import BadRequest, HearthError, StepFailed
from hearth.grammars import Grammars, Vocabulary
from hearth.plan.kept_caches import reserved_bytes
from hearth.plan.plan import DRAFT_RANK, TransformerPlan, draft_plan, is_transformer_plan
from hearth.platform.machine import give_back_freed_buffers, keep_freed_buffers
from hearth.transport.sockets import SocketTransport
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array, unpack_arrays

log = logging.getLogger("hearth.worker")


class TransformerRuntime:
    """See `agent.worker.runtime.Runtime`. Requests wait in a queue for the main thread; None ends it.

    For a decoder, rank 0 schedules the steps, and accepts requests between two steps; the other ranks follow its orders.
    """

    _shard: Shard  # from `load` on
    _draft: Shard | None = None  # the draft model, on the rank that has it
    _staging: Staging
    _transport: SocketTransport
    _communicator: Communicator  # from `connect` on
    _compute: Callable[[], None]

    def __init__(self, start: wire.Start, answer: SendAnswer, previous: TransformerRuntime | None = None) -> None:
        plan, parts = start.load.plan, start.load.parts
        assert is_transformer_plan(plan)
        assert isinstance(parts, wire.ShardParts)
        self._start, self._plan, self._parts = start, plan, parts
        self._rank = start.load.rank
        self._answer = answer
        self._previous = previous
        self._requests: queue.SimpleQueue[tuple[bytes, wire.Message, list[bytes]] | None] = queue.SimpleQueue()
        self._kept = KeptCaches()
        self._held: HeldWeights | None = None  # while it loads: of the previous plan, and what is loaded of this one
        self._grammars: Grammars | None = None  # None: the model's tokens have no texts
        self._draft_plan = draft_plan(plan) if self._rank == DRAFT_RANK else None
        self._executor: StepExecutor | None = None
        self._computing_since: float | None = None  # when the main thread began its work; None: it waits for requests

    def load(self, is_given_up: Callable[[], bool]) -> wire.WorkerBound:
        start = self._start
        is_first = self._previous is None
        if self._previous is None:
            keep_freed_buffers()
            torch.set_num_threads(start.num_threads)
            self._staging = make_staging(start.compute_device)
            self._transport = bind_transport(start)
            held, held_draft = HeldWeights(), HeldWeights()
        else:
            self._staging = self._previous._staging
            same_weights = self._previous._computes_with(self._plan, self._parts)
            self._transport, held, held_draft, kept = self._previous._give_up()
            self._previous = None
            if same_weights:
                self._kept = kept
            del kept
            self._kept.shrink(self._plan.model, reserved_bytes(self._plan.model, self._plan.body, self._rank))
            self._transport.leave(self._rank, self._plan.num_ranks)
        if self._plan.body.generation is not None:
            check_format(self._plan.model, self._staging.device)
        store = Path(start.store_path)

        def chunk_file(chunk: str) -> Path:
            return store / chunk[:2] / chunk

        self._held = held
        chunks, kernels = self._parts.chunks, self._parts.kernels
        self._shard = load_shard(
            self._plan, self._rank, chunks, chunk_file, self._staging.device, held, is_given_up, kernels
        )
        self._held = None
        if self._parts.vocabulary is not None:
            self._grammars = Grammars(Vocabulary.unpack(chunk_file(self._parts.vocabulary).read_bytes()))
        if self._draft_plan is not None:
            self._draft = load_shard(
                self._draft_plan, 0, self._parts.draft_chunks, chunk_file, self._staging.device, held_draft, is_given_up
            )
        if not is_first:
            give_back_freed_buffers()  # weights and caches that this plan does not need
            total = sum(chunk.num_bytes for chunk in self._parts.chunks)
            log.info("read %d of %d bytes of weights; the rest was in memory", held.num_bytes_read, total)
        return wire.WorkerBound(
            port=self._transport.port,
            public_key=self._transport.public_key,
            num_bytes_loaded=self._shard.num_bytes() + (self._draft.num_bytes() if self._draft is not None else 0),
            weight_error=self._shard.weight_error(),
            caches=self._kept.report(),
            prefixes=self._kept.report_prefixes(),
        )

    def connect(self, request: wire.ConnectPeers) -> None:
        self._transport.connect(request.peers)
        codecs = link_codecs(self._plan, self._rank, {peer.rank: peer.bytes_per_second for peer in request.peers})
        token = self._start.load.plan_token
        self._communicator = Communicator(self._transport, self._plan.epoch, token, codecs)
        self._communicator.start()
        self._kept.keep_only(kept.stream for kept in request.caches)
        if request.prefixes is None:
            self._kept.prefixes = None
        parts = (self._plan, self._rank, self._shard, self._communicator, self._staging)
        if self._plan.body.generation is None:
            self._compute = partial(self._run_steps, EncoderEngine(*parts))
            return
        self._executor = StepExecutor(*parts, self._kept, self._grammars)
        if self._rank == LEADER_RANK:
            speculation = Speculation(draft=self._draft_model())
            leader = Leader(self._plan, self._executor, request.caches, speculation, request.prefixes)
            self._compute = partial(self._lead, leader)
        else:
            self._compute = partial(self._follow, self._executor)

    def run(self) -> None:
        self._compute()

    def handle(self, request: bytes, message: wire.Message, payload: list[bytes]) -> None:
        self._requests.put((request, message, payload))

    def abort(self, step: int | None, reason: str) -> None:
        """Abort the running step. For a decoder this fails all requests, since a step belongs to all of them."""
        self._communicator.abort(StepFailed(device=f"rank {self._rank}", reason=reason))

    def progress(self) -> wire.WorkerProgress:
        since = self._computing_since
        return self._communicator.progress(since) if since is not None else wire.WorkerProgress()

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        return self._transport.sent_bytes_by_rank

    def end(self) -> None:
        self._communicator.end()
        self._requests.put(None)

    def _computes_with(self, plan: TransformerPlan, parts: wire.ShardParts) -> bool:
        """Whether a rank of that plan has the same weights, as far as both ranks have them."""
        held = {(chunk.kind, chunk.layer, chunk.grain): chunk.hash for chunk in self._parts.chunks}
        return self._plan.model == plan.model and all(
            held.get((chunk.kind, chunk.layer, chunk.grain), chunk.hash) == chunk.hash for chunk in parts.chunks
        )

    def _draft_model(self) -> LocalDraft | None:
        if self._draft_plan is None or self._draft is None:
            return None
        return LocalDraft(self._draft_plan, self._draft, self._plan.model.vocab_size, self._staging.device)

    def _give_up(self) -> tuple[SocketTransport, HeldWeights, HeldWeights, KeptCaches]:
        """Release the transport, the weights, those of the draft model, and the KV caches for the next plan.

        Frees the memory of all else.

        `run` has returned, or `load` was given up.
        """
        kept = self._kept
        if hasattr(self, "_communicator"):
            self._communicator.close()
            if self._executor is not None:
                kept = self._executor.keep_caches()
            del self._communicator, self._compute
        self._executor = None
        held, self._held = self._held, None
        if held is None:
            held = held_weights(self._plan, self._rank, self._parts.chunks, self._shard)
            del self._shard
        held_draft = HeldWeights()
        if self._draft_plan is not None and self._draft is not None:
            held_draft = held_weights(self._draft_plan, 0, self._parts.draft_chunks, self._draft)
        self._draft = None
        gc.collect()  # engines and caches refer to each other, and to the weights
        return self._transport, held, held_draft, kept

    # ---- in the main thread -----------------------------------------------------------------------------------------

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        self._computing_since = time.monotonic()
        try:
            yield
        finally:
            self._computing_since = None

    def _run_steps(self, engine: EncoderEngine) -> None:
        while (item := self._requests.get()) is not None:
            request, message, payload = item
            try:
                if not isinstance(message, wire.Run):
                    raise BadRequest(reason=f"an encoder does not accept {type(message).__name__}")
                arrays = unpack_arrays(message.names, payload)
                if arrays.keys() != {"token_ids", "cumulative_lengths"}:
                    raise BadRequest(reason=f"a step takes token_ids and cumulative_lengths, not {list(arrays)}")
                with self._in_step():
                    done, rows = engine.run(message, arrays["token_ids"], arrays["cumulative_lengths"])
            except Exception as error:
                self._answer(request, failed_message(type(message).__name__, error), ())
            else:
                self._answer(request, done, pack_array(np.ascontiguousarray(rows)))

    def _lead(self, leader: Leader) -> None:
        while True:
            try:
                item = self._requests.get(block=leader.idle, timeout=leader.seconds_until_due)
            except queue.Empty:
                with self._in_step():
                    replies = leader.step()
                for answered, answer in replies:
                    self._answer(answered, answer, ())
                continue
            if item is None:
                for answered, answer in leader.end(StepFailed(device="rank 0", reason="the plan was unloaded")):
                    self._answer(answered, answer, ())
                return
            request, message, payload = item
            try:
                if isinstance(message, wire.GenerateTokens):
                    for answered, answer in leader.submit(request, message, payload):
                        self._answer(answered, answer, ())
                elif isinstance(message, wire.Cancel):
                    leader.cancel(request, message.final)
                else:
                    raise BadRequest(reason=f"a decoder does not accept {type(message).__name__}")
            except Exception as error:
                self._answer(request, failed_message(type(message).__name__, error), ())

    def _follow(self, executor: StepExecutor) -> None:
        """Execute orders until one fails, then refuse all requests. Rank 0 notices by a timeout, or was aborted as well."""
        try:
            with self._in_step():  # a wait for an order counts as idle
                while True:
                    executor.execute_next()
        except HearthError as error:
            log.warning("following rank %d has ended: %s", LEADER_RANK, error)
        while (item := self._requests.get()) is not None:
            request, message, _ = item
            refusal = BadRequest(
                reason=f"rank {LEADER_RANK} accepts requests; this rank does not accept {type(message).__name__}"
            )
            self._answer(request, failed_message(type(message).__name__, refusal), ())
