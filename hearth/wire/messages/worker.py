"""Messages to and from a deployment's workers: from the coordinator through the agent, and between workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import Field, StringConstraints, model_validator

from hearth.plan.common import ValueFormatName
from hearth.plan.kept_caches import CacheBlock, CacheTransfer
from hearth.plan.kernels import KernelChoice
from hearth.plan.phases import Phase, Work
from hearth.plan.plan import Plan, is_graph_plan
from hearth.protocol import MAX_PAYLOAD_FRAMES
from hearth.wire.messages.agent import ChunkRef, Profile
from hearth.wire.messages.base import (
    MAX_LIST_ITEMS,
    Bytes,
    ComputeDevice,
    DeploymentCommand,
    Hash,
    Message,
    Name,
    PlanCommand,
    Port,
    PublicKey,
    Sampling,
    Shape,
    StepNumber,
    TensorName,
    Text,
    WireModel,
)

# Of the KV caches that a worker reports after a change of plan, all together: 1 MiB in a message of at most 4 MiB.
MAX_KEPT_TOKENS = 1 << 18
MAX_DRAFTED_TOKENS = 64  # of a sequence in one step
MAX_KEPT_BLOCKS = 1 << 12  # of the prefix cache: 64 KiB of keys
PREFIX_KEY_BYTES = 16  # of a block's key
KeyBytes = Annotated[bytes, Field(max_length=PREFIX_KEY_BYTES * MAX_KEPT_BLOCKS)]  # keys of blocks, one after the other
TokenBytes = Annotated[bytes, Field(max_length=4 * MAX_KEPT_TOKENS)]  # token ids as int32, little-endian


def split_keys(keys: bytes) -> list[bytes]:
    """The keys of `KeyBytes`."""
    return [keys[start : start + PREFIX_KEY_BYTES] for start in range(0, len(keys), PREFIX_KEY_BYTES)]


# ---- loading ------------------------------------------------------------------------------------------------------


class ArrayChunks(WireModel):
    """An initialiser whose bytes (raw, little-endian) are the concatenation of the chunks."""

    name: TensorName
    dtype: Name  # name in numpy or ml_dtypes
    shape: Shape
    chunks: tuple[Hash, ...] = Field(min_length=1, max_length=4096, fail_fast=True)


class SegmentFiles(WireModel):
    """The chunks of one segment. `graph` is its ONNX protobuf, in which `initializers` are external data."""

    graph: tuple[Hash, ...] = Field(min_length=1, max_length=4096, fail_fast=True)
    initializers: tuple[ArrayChunks, ...] = Field(default=(), max_length=50_000, fail_fast=True)


class ShardParts(WireModel):
    """The chunks of one rank's shard of a transformer, and the kernels that were measured to be the fastest there."""

    kind: Literal["shard"] = "shard"
    chunks: tuple[ChunkRef, ...] = Field(max_length=50_000, fail_fast=True)
    kernels: tuple[KernelChoice, ...] = Field(default=(), max_length=256)  # empty: the defaults of the worker
    vocabulary: Hash | None = None  # a chunk with the tokens, for grammars (`hearth.grammars.Vocabulary`)
    draft_chunks: tuple[ChunkRef, ...] = Field(default=(), max_length=50_000, fail_fast=True)  # of the draft model

    @property
    def hashes(self) -> tuple[Hash, ...]:
        """The chunks of the shard and of the draft model, in the order in which they are loaded, and that of the vocabulary."""
        hashes = tuple(chunk.hash for chunk in (*self.chunks, *self.draft_chunks))
        return hashes if self.vocabulary is None else (*hashes, self.vocabulary)


class SegmentParts(WireModel):
    """The files of one rank's segments of a graph, in the plan's order."""

    kind: Literal["segments"] = "segments"
    files: tuple[SegmentFiles, ...] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_in_flight: Annotated[int, Field(ge=1, le=4096)] = 16  # requests; a further one gets QueueFull

    @property
    def hashes(self) -> tuple[Hash, ...]:
        """The distinct chunks that the segments need."""
        chunks = [chunk for each in self.files for chunk in each.graph]
        chunks += [chunk for each in self.files for weight in each.initializers for chunk in weight.chunks]
        return tuple(dict.fromkeys(chunks))


PortRanges = Annotated[tuple[tuple[Port, Port], ...], Field(max_length=256)]  # first and last of each


class Load(DeploymentCommand):
    """Load this rank of the plan, in the deployment's worker that runs, or in a new one.

    Its chunks must already be in the agent's store. A worker that goes on keeps its port and key, and the weights that both
    plans need.
    The answer is `WorkerBound`. The next request is `ConnectPeers`.
    """

    plan: Plan
    rank: Annotated[int, Field(ge=0)]
    parts: ShardParts | SegmentParts = Field(discriminator="kind")
    encrypt_data_plane: bool = True
    # Begins every tile header; without encryption it is the only authentication of a tile.
    plan_token: Annotated[bytes, Field(min_length=16, max_length=16)]
    data_ports: PortRanges = ()  # that workers of the plan's devices bind; empty: any, or not known

    @model_validator(mode="after")
    def _of_one_kind(self) -> Load:
        if is_graph_plan(self.plan) != isinstance(self.parts, SegmentParts):
            raise ValueError(f"parts of the kind {self.parts.kind} are not for this kind of plan")
        return self


class HeldRows(WireModel):
    """The first rows of one block of a sequence's KV cache."""

    block: CacheBlock
    num_rows: Annotated[int, Field(ge=1, le=MAX_KEPT_TOKENS)]


class HeldCache(WireModel):
    """What a worker has kept of a stream's KV cache: its own and, if the plan made one, the copy for another rank."""

    stream: Name
    token_ids: TokenBytes
    parts: tuple[HeldRows, ...] = Field(max_length=16, fail_fast=True)


class HeldPrefixes(WireModel):
    """What a worker has kept of the prefix cache: blocks of tokens by key, least recently used first, and what of each."""

    block: CacheBlock
    keys: KeyBytes


class WorkerBound(Message):
    """The worker has loaded its weights and bound its data-plane port."""

    port: Port
    public_key: PublicKey  # ephemeral, used for this plan only
    num_bytes_loaded: Bytes
    weight_error: Annotated[float, Field(ge=0)] = 0.0  # relative RMS error of the matrices due to their weight format
    # KV caches of the worker's earlier plans; None: this worker cannot take rows of such caches from its peers.
    caches: Annotated[tuple[HeldCache, ...], Field(max_length=4096, fail_fast=True)] | None = None
    prefixes: HeldPrefixes | None = None


class Peer(WireModel):
    """Another rank of the plan, and the address of its data-plane socket."""

    rank: Annotated[int, Field(ge=0)]
    host: Name
    port: Port
    public_key: PublicKey
    bytes_per_second: Annotated[float, Field(gt=0)]  # measured rate of the link to this peer


class KeptCache(WireModel):
    """The KV cache of a stream of earlier plans, with which it continues on this one.

    `transfers` bring every rank its block of the first `num_rows` rows, within about `transfer_seconds`. Until then, all that
    the ranks have kept takes no more memory than `reserved_tokens` tokens in the plan's own KV caches.
    """

    stream: Name
    token_ids: TokenBytes
    num_rows: Annotated[int, Field(ge=1, le=MAX_KEPT_TOKENS)]
    transfers: tuple[CacheTransfer, ...] = Field(max_length=1 << 16, fail_fast=True)
    transfer_seconds: Annotated[float, Field(ge=0)]
    reserved_tokens: Annotated[int, Field(ge=0)]


class KeptPrefixes(WireModel):
    """Blocks of the prefix cache of earlier plans, least recently used first.

    `transfers` bring every rank its part of all of them, within about `transfer_seconds`.
    """

    keys: KeyBytes
    transfers: tuple[CacheTransfer, ...] = Field(max_length=1 << 16, fail_fast=True)
    transfer_seconds: Annotated[float, Field(ge=0)]


class ConnectPeers(PlanCommand):
    """Connect the worker's data plane to all other ranks. KV caches that are not listed are freed."""

    peers: tuple[Peer, ...] = Field(max_length=256)
    caches: tuple[KeptCache, ...] = Field(default=(), max_length=4096, fail_fast=True)
    prefixes: KeptPrefixes | None = None


class Unload(PlanCommand):
    """Stop the worker of this plan."""


# ---- running ------------------------------------------------------------------------------------------------------


class Run(PlanCommand):
    """Run one request; sent to every rank of the plan. Payload: this rank's input arrays `names`, two frames each.

    A transformer takes `token_ids` [T] int32 and `cumulative_lengths` [N+1] int32 of packed sequences, and runs one
    request at a time. An ONNX graph takes its inputs, and runs several requests concurrently. Step numbers increase.
    """

    step: StepNumber
    names: tuple[TensorName, ...] = Field(default=(), max_length=MAX_PAYLOAD_FRAMES // 2)
    # Transformer: timeout of each wait for a peer. Graph: timeout of the whole request on this rank.
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)]
    trace: bool = False
    # Transformers only. `output`: rows, or their sum per sequence (for mean pooling). `values`: value format of activations
    # in this step; None: the plan's.
    output: Literal["hidden", "mean"] = "hidden"
    values: ValueFormatName | None = None


class TraceEvent(WireModel):
    """One event of a timeline, in seconds of the worker's monotonic clock.

    `compute` events have a duration. `send` and `receive` are instants: the transport took over a tile, or a tile arrived.
    Both ends of a transfer record the same kind, layer and tile, and each other's rank as `peer`; `hearth.trace` pairs them.
    """

    lane: Literal["compute", "send", "receive"]
    kind: Work | Phase
    layer: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None  # ONNX graph: the number of the segment or tensor
    tile: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    peer: Annotated[int, Field(ge=0, lt=1 << 16)] | None = None  # see `coordinator.plan.simulator.Task`
    tensor: Annotated[str, StringConstraints(max_length=64)] = ""  # ONNX graph: the end of the tensor's name
    start_seconds: float
    end_seconds: float
    num_bytes: Bytes = 0


class WireStats(WireModel):
    """Codec counters of one device's outgoing links."""

    num_tiles: int = 0
    raw_bytes: Bytes = 0
    sent_bytes: Bytes = 0
    lz4_tiles: int = 0

    @classmethod
    def sum(cls, parts: Iterable[WireStats]) -> WireStats:
        """The counters of several devices or links together."""
        parts = list(parts)
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in cls.model_fields})


class RunDone(Message):
    """This rank has run the request. Payload: the output arrays `names`, two frames each.

    Transformer: float32, `hidden` (this rank's rows [s,H]) or `mean` (sums over this rank's rows of each sequence [N,H]).
    ONNX graph: the graph's outputs that this rank has computed.
    """

    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    began_seconds: float  # on the worker's monotonic clock, like the trace
    ended_seconds: float
    # Compute time of each segment of this rank, without waits for tiles; a transformer's shard counts as one segment.
    compute_seconds: tuple[Annotated[float, Field(ge=0)], ...] = Field(max_length=4096, fail_fast=True)
    wire: WireStats  # since the plan was loaded
    dropped_messages: int
    trace: tuple[TraceEvent, ...] = Field(default=(), max_length=MAX_LIST_ITEMS, fail_fast=True)


class Abort(PlanCommand):
    """Abort one request, or all (step None), because it failed on another rank or a peer is lost."""

    step: StepNumber | None = None
    reason: Text


# ---- generation ---------------------------------------------------------------------------------------------------


MAX_TOP_LOG_PROBS = 20  # as in OpenAI's API
FinishReason: TypeAlias = Literal["stop", "length"]


class GenerateTokens(PlanCommand):
    """Ask rank 0 of a plan to continue a prompt. Payload: token ids [T] int32.

    The answer is a stream of `TokensGenerated` that ends with `GenerationEnded`. `first_index` is the number of prompt
    tokens that an earlier, lost plan has generated: sampling continues at that index. `stream` is the same on all plans on
    which the answer continues; rows of its KV cache that the ranks have kept are not computed again. A sequence of the same
    stream, with equal tokens and settings, goes on as it is, even if its request was cancelled in the last 30 s, or has
    ended in the last 10 s.

    `logits`: rank 0 keeps the logits of every sampled token until a request without this field comes, or compares them with
    those kept after the same tokens. That needs `top_p` below 1, with which all logits reach rank 0.
    """

    stream: Name = ""  # empty: its KV cache ends with the plan
    caller: Name = ""  # the key that asks: keys share what there is of running sequences and memory
    prefix_scope: Name = ""  # requests with the same one share KV caches of equal prefixes; empty: this one shares none

    sampling: Sampling = Sampling()
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)]
    stop_ids: tuple[int, ...] = Field(default=(), max_length=256)  # each ends the sequence and is passed on
    first_index: Annotated[int, Field(ge=0)] = 0
    timeout_seconds: Annotated[float, Field(gt=0, le=90000)] = 600.0  # timeout of the first token
    max_drafted: Annotated[int, Field(ge=0, le=MAX_DRAFTED_TOKENS)] = 0  # of one step; 0: no speculative decoding
    grammar: Text = ""  # that the answer follows; empty: it is free
    values: ValueFormatName | None = None  # format of tiles while this request is the newest; None: the plan's
    logits: Literal["", "keep", "compare"] = ""
    # The number of most likely tokens to report for each token of the answer; None: no log-probabilities.
    top_log_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None


class LogProb(WireModel):
    """The logarithm of the probability that the model gives a token, and the token's bytes (empty between workers)."""

    token_id: Annotated[int, Field(ge=0)]
    value: float
    piece: Annotated[bytes, Field(max_length=1 << 16)] = b""


class TokenLogProbs(WireModel):
    """A token's log-probability and those of the most likely tokens in its place, the most likely first.

    They are of the model itself: before penalties, temperature and grammar.
    """

    chosen: LogProb
    top: tuple[LogProb, ...] = Field(default=(), max_length=MAX_TOP_LOG_PROBS)


class TokensGenerated(Message):
    """New tokens of an answer, with their log-probabilities if these were asked for."""

    token_ids: tuple[int, ...] = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)
    log_probs: tuple[TokenLogProbs, ...] = Field(default=(), max_length=MAX_LIST_ITEMS, fail_fast=True)


class GenerationEnded(Message):
    """The end of an answer. `prefill_seconds`: from the first step to the first token; `decode_seconds`: all later ones."""

    reason: FinishReason
    num_prompt_tokens: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    queued_seconds: Annotated[float, Field(ge=0)]
    prefill_seconds: Annotated[float, Field(ge=0)]
    decode_seconds: Annotated[float, Field(ge=0)]
    num_kept_rows: Annotated[int, Field(ge=0)] = 0  # of the prompt's rows: computed for another request, or plan
    num_drafted: Annotated[int, Field(ge=0)] = 0  # tokens that were guessed before they were computed
    num_accepted: Annotated[int, Field(ge=0)] = 0  # of these, tokens of the answer
    logit_error: Annotated[float, Field(ge=0)] | None = None  # largest relative error, if logits were compared


# ---- from an agent to its own child processes ---------------------------------------------------------------------


class Start(Message):
    """The settings of a worker process; the first message on its private socket."""

    load: Load
    store_path: Text
    scratch_path: Text = ""  # folder in the store for the worker's files; empty: the disk takes none
    bind_host: Name
    ports: tuple[int, int]  # first and last of the range to bind in; (0, 0): any
    num_threads: Annotated[int, Field(ge=1)]
    compute_device: ComputeDevice


class ReportProgress(Message):
    """Ask a worker for signs of life. The answer is a stream of `WorkerProgress` that ends with the worker."""

    interval_seconds: Annotated[float, Field(gt=0, le=60)]


class WorkerProgress(Message):
    """A sign of life of a worker, and the step that it computes; `step` is None while it has nothing to compute."""

    step: StepNumber | None = None
    step_seconds: Annotated[float, Field(ge=0)] = 0.0  # since the step began
    # Of these since the worker last sent or got a tile; 0 while it waits for one.
    busy_seconds: Annotated[float, Field(ge=0)] = 0.0
    limit_seconds: Annotated[float, Field(ge=0)] = 0.0  # the worker counts as hung once `busy_seconds` is that long
    # It waits for a tile of this rank, unusually long (`protocol.late_seconds`).
    late_rank: Annotated[int, Field(ge=0)] | None = None
    sent_bytes: tuple[Bytes, ...] = Field(default=(), max_length=256)  # to each rank since the plan was loaded


class ForkWorker(Message):
    """Ask the template of workers for a new worker process. The answer is `WorkerForked`, from that process.

    The process may use what is named here, and no more for as long as it lives.
    """

    endpoint: Name  # of the worker's private socket
    log_level: Name
    store: Text  # folder of the chunks, to be read
    scratch: Text  # folder to write in
    bind_ports: tuple[int, int]  # first and last; (0, 0): any that the system chooses
    connect_ports: PortRanges = ()  # empty: all
    compute_device: ComputeDevice


class WorkerForked(Message):
    """A forked worker runs, as a child of the agent."""

    pid: Annotated[int, Field(gt=0)]


class StartProfile(Message):
    """The settings of a profiler process. The answer is `Profiled` or `Failed`."""

    profile: Profile
    device: Name
    folder: Text  # for the profiler's files; the agent removes it. An ONNX graph is its file `graph.onnx`
    num_threads: Annotated[int, Field(ge=1)]
    compute_device: ComputeDevice


# ---- between workers: rank 0 announces the steps of a generation ----------------------------------------------------


class MovedCache(WireModel):
    """The first rows of a new sequence, which `transfers` take from what the ranks have kept of the stream's KV cache."""

    stream: Name
    token_ids: tuple[int, ...] = Field(min_length=1, max_length=MAX_KEPT_TOKENS, fail_fast=True)
    transfers: tuple[CacheTransfer, ...] = Field(max_length=1 << 16, fail_fast=True)
    transfer_seconds: Annotated[float, Field(ge=0)]


BlockNumber = Annotated[int, Field(ge=0, le=1 << 24)]  # of a block of the KV cache, the same on all ranks


class NewSequence(WireModel):
    """Properties of a sequence that every rank needs before its first rows."""

    # Blocks of its KV cache, for its first rows. The first of them hold the rows of `cached_tokens` already.
    blocks: tuple[BlockNumber, ...] = Field(min_length=1, max_length=MAX_LIST_ITEMS, fail_fast=True)
    cached_tokens: tuple[int, ...] = Field(default=(), max_length=MAX_LIST_ITEMS, fail_fast=True)
    num_prompt_tokens: Annotated[int, Field(ge=1)]
    sampling: Sampling
    first_index: Annotated[int, Field(ge=0)] = 0
    stream: Name = ""
    grammar: Text = ""
    top_log_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None
    moved: MovedCache | None = None


class SequenceRows(WireModel):
    """The rows of one sequence in a step; they follow the rows in its KV cache.

    The last `num_drafted` tokens are guesses, which the step verifies: it also samples a token after each row before them.
    """

    sequence: Annotated[int, Field(ge=0)]
    token_ids: tuple[int, ...] = Field(min_length=1, max_length=MAX_LIST_ITEMS, fail_fast=True)
    sample: bool  # whether to sample a token after the last row
    num_drafted: Annotated[int, Field(ge=0, le=MAX_DRAFTED_TOKENS)] = 0
    num_rejected: Annotated[int, Field(ge=0, le=MAX_DRAFTED_TOKENS)] = 0  # newest rows in the KV cache, dropped first
    # More of its KV cache:
    blocks: tuple[BlockNumber, ...] = Field(default=(), max_length=MAX_LIST_ITEMS, fail_fast=True)
    new: NewSequence | None = None


class AdoptedPrefixes(WireModel):
    """Kept blocks of the prefix cache that get the blocks of the plan's KV cache with these numbers; all others are dropped."""

    kept: KeptPrefixes
    blocks: tuple[BlockNumber, ...] = Field(max_length=MAX_KEPT_BLOCKS, fail_fast=True)


class PublishedBlock(NamedTuple):
    """A full block of the KV cache that sequences may find by its key, once the step has run."""

    block: BlockNumber
    key: Annotated[bytes, Field(min_length=PREFIX_KEY_BYTES, max_length=PREFIX_KEY_BYTES)]


class StepOrder(Message):
    """One step of a generation. `freed` sequences are dropped first, and so is what was kept of `dropped_streams`.

    Without rows, nothing is computed. `values` is the format of the step's tiles; None: the plan's.
    """

    kind: Literal["prefill", "decode"]
    rows: tuple[SequenceRows, ...] = Field(max_length=4096, fail_fast=True)
    freed: tuple[int, ...] = Field(default=(), max_length=4096, fail_fast=True)
    dropped_streams: tuple[Name, ...] = Field(default=(), max_length=4096, fail_fast=True)
    published: tuple[PublishedBlock, ...] = Field(default=(), max_length=MAX_LIST_ITEMS, fail_fast=True)
    adopted: AdoptedPrefixes | None = None
    values: ValueFormatName | None = None
