"""Messages that concern the worker of a deployment, from the coordinator by way of the agent, and between workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints, model_validator

from hearth.plan.phases import Phase, Work
from hearth.plan.plan import Plan, is_graph_plan
from hearth.plan.value_formats import Values
from hearth.protocol import MAX_PAYLOAD_FRAMES
from hearth.wire.messages.agent import ChunkRef, Profile
from hearth.wire.messages.base import (
    Bytes,
    Command,
    ComputeDevice,
    Hash,
    Message,
    Name,
    PlanCommand,
    Port,
    PublicKey,
    Shape,
    Step,
    TensorName,
    Text,
    WireModel,
)

# ---- loading ------------------------------------------------------------------------------------------------------


class ArrayChunks(WireModel):
    """An initialiser whose bytes (raw, little-endian) are the chunks one after the other."""

    name: TensorName
    dtype: Name  # numpy's, or ml_dtypes'
    shape: Shape
    chunks: tuple[Hash, ...] = Field(min_length=1, max_length=4096)


class SegmentFiles(WireModel):
    """The parts of a segment. `graph`: chunks of its ONNX protobuf, in which `initializers` are external data."""

    graph: tuple[Hash, ...] = Field(min_length=1, max_length=4096)
    initializers: tuple[ArrayChunks, ...] = Field(default=(), max_length=50_000)


class ShardParts(WireModel):
    """The chunks of one rank's shard of a transformer."""

    kind: Literal["shard"] = "shard"
    chunks: tuple[ChunkRef, ...] = Field(max_length=50_000)

    @property
    def hashes(self) -> tuple[Hash, ...]:
        return tuple(chunk.hash for chunk in self.chunks)


class SegmentParts(WireModel):
    """The files of one rank's segments of a graph, in the plan's order."""

    kind: Literal["segments"] = "segments"
    files: tuple[SegmentFiles, ...] = Field(min_length=1, max_length=4096)
    max_in_flight: Annotated[int, Field(ge=1, le=4096)] = 16  # requests; one more is answered with QueueFull

    @property
    def hashes(self) -> tuple[Hash, ...]:
        """Every chunk that the segments need, once."""
        chunks = [chunk for each in self.files for chunk in each.graph]
        chunks += [chunk for each in self.files for weight in each.initializers for chunk in weight.chunks]
        return tuple(dict.fromkeys(chunks))


class Load(Command):
    """Start a worker for this rank of the plan; its chunks must be in the store already.

    The answer is `WorkerBound`; `ConnectPeers` comes next.
    """

    plan: Plan
    rank: Annotated[int, Field(ge=0)]
    parts: ShardParts | SegmentParts = Field(discriminator="kind")
    encrypt_data_plane: bool = True
    plan_token: Annotated[bytes, Field(min_length=16, max_length=16)]  # opens every data-plane message

    @model_validator(mode="after")
    def _of_one_kind(self) -> Load:
        if is_graph_plan(self.plan) != isinstance(self.parts, SegmentParts):
            raise ValueError(f"parts of the kind {self.parts.kind} are not for this kind of plan")
        return self


class WorkerBound(Message):
    port: Port
    public_key: PublicKey  # ephemeral, of this plan only
    num_bytes_loaded: Bytes
    weight_error: Annotated[float, Field(ge=0)] = 0.0  # of the matrices, for their format: relative, root mean square


class Peer(WireModel):
    rank: Annotated[int, Field(ge=0)]
    host: Name
    port: Port
    public_key: PublicKey
    bytes_per_second: Annotated[float, Field(gt=0)]  # of the link to this peer, as measured


class ConnectPeers(PlanCommand):
    peers: tuple[Peer, ...] = Field(max_length=256)


class Unload(PlanCommand):
    """Stop the worker of this plan."""


# ---- running ------------------------------------------------------------------------------------------------------


class Run(PlanCommand):
    """One request, to every rank of the plan. Payload: the arrays `names` that this rank takes, in two frames each.

    A transformer takes `token_ids` [T] int32 and `cumulative_lengths` [N+1] int32 of packed sequences and runs one
    request at a time; a graph takes its inputs and runs several side by side. Steps count up.
    """

    step: Step
    names: tuple[TensorName, ...] = Field(default=(), max_length=MAX_PAYLOAD_FRAMES // 2)
    # Of a transformer: each wait for a peer. Of a graph: until all of the request has run on this rank.
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)]
    trace: bool = False
    # For transformers only: rows, or their sum per sequence (for mean pooling); and the format of activations on the
    # wire in this step (None: as the plan says).
    output: Literal["hidden", "mean"] = "hidden"
    values: Values | None = None


class TraceEvent(WireModel):
    """One bar of a timeline, in seconds of the worker's monotonic clock.

    `send` and `receive` are instants: a tile was handed to the transport, a tile arrived. Both ends of a transfer give it
    the same kind, layer and tile, and each other's rank as `peer`, so that `hearth.trace` can pair them.
    """

    lane: Literal["compute", "send", "receive"]
    kind: Work | Phase
    layer: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None  # in a graph: the number of the segment or tensor
    tile: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    peer: Annotated[int, Field(ge=0, lt=1 << 16)] | None = None  # see `coordinator.plan.simulator.Task`
    tensor: Annotated[str, StringConstraints(max_length=64)] = ""  # in a graph: the end of the tensor's name
    start_seconds: float
    end_seconds: float
    num_bytes: Bytes = 0


class WireStats(WireModel):
    """Counters of the codec on one device's outgoing links."""

    num_tiles: int = 0
    raw_bytes: Bytes = 0
    sent_bytes: Bytes = 0
    lz4_tiles: int = 0

    @classmethod
    def sum(cls, parts: Iterable[WireStats]) -> WireStats:
        parts = list(parts)
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in cls.model_fields})


class RunDone(Message):
    """This rank has run the request. Payload: the arrays `names`, in two frames each, float32 for transformers:

    `hidden`, this rank's rows [s,H], or `mean`, sums over its rows of each sequence [N,H]; of a graph the outputs that
    this rank made.
    """

    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    began_seconds: float  # on the worker's monotonic clock, like the trace
    ended_seconds: float
    # Busy time without waits for tiles, of each segment of this rank; a transformer's shard counts as one.
    compute_seconds: tuple[Annotated[float, Field(ge=0)], ...] = Field(max_length=4096)
    wire: WireStats  # since the plan was loaded
    dropped_messages: int
    trace: tuple[TraceEvent, ...] = ()


class Abort(PlanCommand):
    """Give up one request, or all that run (step None): it failed elsewhere, or a peer is gone."""

    step: Step | None = None
    reason: Text


# ---- generation ---------------------------------------------------------------------------------------------------


class Sampling(WireModel):
    """How the next token is chosen. Temperature 0: the likeliest (greedy), and nothing else matters.

    In this order, as `transformers` has it: repetition penalty, temperature, top-k, top-p, min-p.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=0, le=1 << 24)] = 0  # sample from the k likeliest tokens; 0 disables
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


FinishReason: TypeAlias = Literal["stop", "length"]


class GenerateTokens(PlanCommand):
    """Ask rank 0 of a plan to continue a prompt. Payload: token ids [T] int32.

    The answer is a stream of `TokensGenerated` that ends with `GenerationEnded`. `first_index` is the number of prompt
    tokens that were generated before (by a plan that was lost): sampling goes on where it was.
    """

    sampling: Sampling = Sampling()
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)]
    stop_ids: tuple[int, ...] = Field(default=(), max_length=256)  # one of these ends the sequence, and is passed on
    first_index: Annotated[int, Field(ge=0)] = 0
    timeout_seconds: Annotated[float, Field(gt=0, le=90000)] = 600.0  # for the wait for the first token


class TokensGenerated(Message):
    token_ids: tuple[int, ...]


class GenerationEnded(Message):
    """`prefill_seconds` from the start of the first step to the first token; `decode_seconds` for all later ones."""

    reason: FinishReason
    num_prompt_tokens: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    queued_seconds: Annotated[float, Field(ge=0)]
    prefill_seconds: Annotated[float, Field(ge=0)]
    decode_seconds: Annotated[float, Field(ge=0)]


# ---- from an agent to its own child processes ---------------------------------------------------------------------


class Start(Message):
    """Everything that a worker process must know; the first message on its private socket."""

    load: Load
    store_path: Text
    bind_host: Name
    ports: tuple[int, int]  # first and last that may be bound; (0, 0): any
    num_threads: Annotated[int, Field(ge=1)]
    compute_device: ComputeDevice


class StartProfile(Message):
    """Everything that a profiler process must know. The answer is `Profiled` or `Failed`."""

    profile: Profile
    device: Name
    folder: Text  # for files of the profiler, which the agent removes; a graph is in its file `graph.onnx`
    num_threads: Annotated[int, Field(ge=1)]
    compute_device: ComputeDevice


# ---- between workers: rank 0 announces the steps of a generation ----------------------------------------------------


class NewSequence(WireModel):
    """The facts that every rank must know of a sequence before its first rows."""

    capacity: Annotated[int, Field(ge=1, le=1 << 24)]  # tokens that its KV cache will hold at most
    num_prompt_tokens: Annotated[int, Field(ge=1)]
    sampling: Sampling
    first_index: Annotated[int, Field(ge=0)] = 0


class SequenceRows(WireModel):
    """The rows of one sequence in a step: they follow those that its KV cache holds."""

    sequence: Annotated[int, Field(ge=0)]
    token_ids: tuple[int, ...] = Field(min_length=1)
    sample: bool  # whether the last row's next token is wanted
    new: NewSequence | None = None


class StepOrder(Message):
    """One step of a generation; `freed` sequences are forgotten before it. With no rows, nothing is computed."""

    kind: Literal["prefill", "decode"]
    rows: tuple[SequenceRows, ...]
    freed: tuple[int, ...] = ()
