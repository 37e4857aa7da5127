"""Every message, declared once: frozen, validated, in one tagged union, msgpack on the wire.

A request is imperative (`LoadShard`), an answer says what is so (`WorkerBound`). Tensors and chunk bytes travel as
payload frames beside a message, never inside it. Unknown fields are ignored; an unknown tag raises `UnknownMessage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgpack
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from hearth.errors import BadMessage, FrameTooLarge, HearthError, UnknownMessage, error_from_wire
from hearth.plan.model_spec import ModelSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.plan import GraphPlan, Plan, TransformerPlan
from hearth.plan.profile import BlockProfile, Link, WireCost
from hearth.plan.value_formats import Values
from hearth.protocol import MAX_MESSAGE_BYTES, MAX_PAYLOAD_FRAME_BYTES, MAX_PAYLOAD_FRAMES, PROTOCOL_VERSION
from hearth.validation import first_error

Name = Annotated[str, StringConstraints(max_length=256)]
Text = Annotated[str, StringConstraints(max_length=1 << 16)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # SHA-256
PublicKey = Annotated[str, StringConstraints(min_length=40, max_length=40)]  # Z85
Epoch = Annotated[int, Field(ge=0, lt=1 << 63)]
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Port = Annotated[int, Field(ge=1, le=65535)]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=1024)]  # as the ONNX file has it
Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], Field(max_length=8)]
ElementType: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64",
    "bool",
]  # fmt: skip


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


# ---- any peer -----------------------------------------------------------------------------------------------------


class Hello(_Message):
    t: Literal["hello"] = "hello"
    protocol: int = PROTOCOL_VERSION
    name: Name


class Done(_Message):
    t: Literal["done"] = "done"


class Failed(_Message):
    """The answer to a request that raised a `HearthError`."""

    t: Literal["failed"] = "failed"
    code: Name
    details: dict[Name, str | int | float | bool | None]

    @classmethod
    def of(cls, error: HearthError) -> Failed:
        return cls(code=error.code, details=error.details())

    def error(self) -> HearthError:
        return error_from_wire(self.code, self.details)


# ---- coordinator to agent -----------------------------------------------------------------------------------------


class AgentWelcome(_Message):
    """`device_id` is stable and bound to the hardware; `boot_id` tells apart runs of the same agent."""

    t: Literal["agent_welcome"] = "agent_welcome"
    protocol: int = PROTOCOL_VERSION
    version: Name
    device_id: Name
    boot_id: Name
    name: Name
    device_public_key: PublicKey
    link_port: Port


class GetTelemetry(_Message):
    t: Literal["get_telemetry"] = "get_telemetry"


class Gpu(_Message):
    name: Name
    kind: Literal["cuda", "tegra"]
    memory_total_bytes: Bytes
    memory_free_bytes: Bytes
    load_fraction: float | None = None


class Telemetry(_Message):
    t: Literal["telemetry"] = "telemetry"
    host_id: Name  # the same for agents on one machine
    cpu_model: Name
    num_cores: int
    load_1min: float
    frequency_mhz: float | None
    memory_total_bytes: Bytes
    memory_available_bytes: Bytes
    memory_budget_bytes: Bytes  # what a worker may hold: the user's limit, or what is free less a reserve
    disk_free_bytes: Bytes
    temperature_celsius: float | None
    gpu: Gpu | None
    num_threads: int  # that a worker will use
    compute_device: Literal["cpu", "cuda"]
    clock_unix_seconds: float
    python_version: Name


class AcquireLease(_Message):
    t: Literal["acquire_lease"] = "acquire_lease"
    holder: Name  # random, one per coordinator process
    holder_name: Name
    seconds: Annotated[float, Field(gt=0, le=60)]


class LeaseGranted(_Message):
    t: Literal["lease_granted"] = "lease_granted"
    last_epoch: Epoch  # the newest epoch this agent has seen; a new plan must be newer


class ReleaseLease(_Message):
    t: Literal["release_lease"] = "release_lease"
    holder: Name


class Heartbeat(_Message):
    """Renews the lease and asks how the worker is."""

    t: Literal["heartbeat"] = "heartbeat"
    holder: Name


WorkerState: TypeAlias = Literal["none", "loading", "bound", "ready", "failed"]


class AgentState(_Message):
    t: Literal["agent_state"] = "agent_state"
    boot_id: Name
    worker: WorkerState
    epoch: Epoch
    failure: Text
    worker_peak_bytes: Bytes = 0  # the most memory that the worker had resident so far


class OpenLinkProbe(_Message):
    """Let one peer measure the link to this device, or fetch chunks from it, for a while."""

    t: Literal["open_link_probe"] = "open_link_probe"
    peer_public_key: PublicKey
    seconds: Annotated[float, Field(gt=0, le=60)]


class MeasureLink(_Message):
    """Measure the link from this device to another, bounded in time and bytes."""

    t: Literal["measure_link"] = "measure_link"
    host: Name
    port: Port
    peer_public_key: PublicKey
    max_bytes: Annotated[int, Field(gt=0, le=1 << 30)]
    max_seconds: Annotated[float, Field(gt=0, le=30)]


class LinkMeasured(_Message):
    t: Literal["link_measured"] = "link_measured"
    bytes_per_second: Annotated[float, Field(gt=0)]
    round_trip_seconds: Annotated[float, Field(ge=0)]
    num_bytes: Bytes
    stable: bool


class ProfileBlocks(_Message):
    t: Literal["profile_blocks"] = "profile_blocks"
    model: ModelSpec
    seq_len: Annotated[int, Field(ge=1, le=1 << 20)]


class BlocksProfiled(_Message):
    t: Literal["blocks_profiled"] = "blocks_profiled"
    blocks: BlockProfile


class ChunkRef(_Message):
    """One hash-named piece of a checkpoint, and the grain it holds (see `coordinator.models.checkpoint.chunk_layout`)."""

    hash: Hash
    num_bytes: Annotated[int, Field(ge=0, le=MAX_PAYLOAD_FRAME_BYTES)]
    kind: Literal["qkv", "out", "mlp", "connective", "vocabulary", "head", "embedding"]
    layer: Annotated[int, Field(ge=0)]  # 0 for embeddings
    grain: Annotated[int, Field(ge=0)]  # 0 where the kind has one chunk per layer


class FindMissing(_Message):
    t: Literal["find_missing"] = "find_missing"
    holder: Name
    hashes: tuple[Hash, ...] = Field(max_length=50_000)


class ChunksMissing(_Message):
    t: Literal["chunks_missing"] = "chunks_missing"
    hashes: tuple[Hash, ...]


class PutChunk(_Message):
    """The chunk's bytes are the one payload frame."""

    t: Literal["put_chunk"] = "put_chunk"
    holder: Name
    hash: Hash


class FetchChunks(_Message):
    """Get chunks from another agent, which lets this one in for a while (`OpenLinkProbe`)."""

    t: Literal["fetch_chunks"] = "fetch_chunks"
    holder: Name
    host: Name
    port: Port
    peer_public_key: PublicKey
    hashes: tuple[Hash, ...] = Field(min_length=1, max_length=50_000)
    seconds: Annotated[float, Field(gt=0, le=60)]  # in all


class ChunksFetched(_Message):
    t: Literal["chunks_fetched"] = "chunks_fetched"
    missing: tuple[Hash, ...]  # that could not be had there in that time


class LoadShard(_Message):
    """Start a worker for this rank of the plan; its chunks must be in the store already."""

    t: Literal["load_shard"] = "load_shard"
    holder: Name
    plan: TransformerPlan
    rank: Annotated[int, Field(ge=0)]
    chunks: tuple[ChunkRef, ...] = Field(max_length=50_000)
    encrypt_data_plane: bool = True
    plan_token: Annotated[bytes, Field(min_length=16, max_length=16)]  # opens every data-plane message


class WorkerBound(_Message):
    t: Literal["worker_bound"] = "worker_bound"
    port: Port
    public_key: PublicKey  # ephemeral, of this plan only
    num_bytes_loaded: Bytes
    weight_error: Annotated[float, Field(ge=0)] = 0.0  # of the matrices, for their format: relative, root mean square


class Peer(_Message):
    rank: Annotated[int, Field(ge=0)]
    host: Name
    port: Port
    public_key: PublicKey
    bytes_per_second: Annotated[float, Field(gt=0)]  # of the link to this peer, as measured


class ConnectPeers(_Message):
    t: Literal["connect_peers"] = "connect_peers"
    holder: Name
    epoch: Epoch
    peers: tuple[Peer, ...] = Field(max_length=256)


class RunStep(_Message):
    """One forward pass over packed sequences. Payload: token ids [T] int32, cumulative lengths [N+1] int32."""

    t: Literal["run_step"] = "run_step"
    holder: Name
    epoch: Epoch
    step: Annotated[int, Field(ge=0, lt=1 << 32)]
    output: Literal["hidden", "mean"]  # rows, or their sum per sequence (for mean pooling)
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)]  # of each wait for a peer
    trace: bool = False
    values: Values | None = None  # on the wire in this step; None: as the plan says


class TraceEvent(_Message):
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


class WireStats(_Message):
    """What the codec did on one device's outgoing links."""

    num_tiles: int = 0
    raw_bytes: Bytes = 0
    sent_bytes: Bytes = 0
    lz4_tiles: int = 0

    @classmethod
    def sum(cls, parts: Iterable[WireStats]) -> WireStats:
        parts = list(parts)
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in cls.model_fields})


class StepDone(_Message):
    """Payload: `hidden`: this rank's rows [s,H]; `mean`: sums over its rows of each sequence [N,H]; float32."""

    t: Literal["step_done"] = "step_done"
    first_row: Annotated[int, Field(ge=0)]
    num_rows: Annotated[int, Field(ge=0)]
    began_seconds: float  # on the worker's monotonic clock, like the trace
    ended_seconds: float
    compute_seconds: Annotated[float, Field(ge=0)] = 0.0  # of the compute thread, without its waits for tiles
    wire: WireStats  # since the plan was loaded
    dropped_messages: int
    trace: tuple[TraceEvent, ...] = ()


# ---- coordinator to agent: graphs -----------------------------------------------------------------------------------


class ProfileGraph(_Message):
    """Time the operators of a graph. Payload: its ONNX protobuf in frames, one after the other.

    Initialisers whose bytes are left out (external data, at any location) are filled with random values.
    """

    t: Literal["profile_graph"] = "profile_graph"
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)]


class Kernel(_Message):
    """One node of the graph as onnxruntime runs it. `operators`: the nodes of the given graph that it stands for.

    They are found by name; where onnxruntime gave it another, by the tensors that it makes. None: a node of its own.
    """

    name: TensorName
    kind: Name
    provider: Name
    seconds: Annotated[float, Field(ge=0)]  # median of a run
    operators: tuple[TensorName, ...] = ()


class GraphProfiled(_Message):
    """The process with onnxruntime holds `process_bytes`, a loaded graph `load_bytes` more, running it `run_bytes` more.

    `peak_bytes` is the most that the whole process held while it loaded.
    """

    t: Literal["graph_profiled"] = "graph_profiled"
    kernels: tuple[Kernel, ...] = Field(max_length=100_000)
    run_seconds: Annotated[float, Field(gt=0)]  # median of a whole run, without the profiler
    provider: Name
    process_bytes: Bytes
    load_bytes: Bytes
    peak_bytes: Bytes
    run_bytes: Bytes
    wire: WireCost


class ArrayChunks(_Message):
    """An initialiser whose bytes (raw, little-endian) are the chunks one after the other."""

    name: TensorName
    dtype: Name  # numpy's, or ml_dtypes'
    shape: Shape
    chunks: tuple[Hash, ...] = Field(min_length=1, max_length=4096)


class SegmentFiles(_Message):
    """What a segment is made from. `graph`: chunks of its ONNX protobuf, in which `initializers` are external data."""

    graph: tuple[Hash, ...] = Field(min_length=1, max_length=4096)
    initializers: tuple[ArrayChunks, ...] = Field(default=(), max_length=50_000)


class LoadGraph(_Message):
    """Start a worker for this rank of a graph's plan; its chunks must be in the store already.

    `files`: of this rank's segments, in the plan's order. The answer is `WorkerBound`; `ConnectPeers` comes next.
    """

    t: Literal["load_graph"] = "load_graph"
    holder: Name
    plan: GraphPlan
    rank: Annotated[int, Field(ge=0)]
    files: tuple[SegmentFiles, ...] = Field(min_length=1, max_length=4096)
    max_in_flight: Annotated[int, Field(ge=1, le=4096)] = 16  # requests; one more is answered with QueueFull
    encrypt_data_plane: bool = True
    plan_token: Annotated[bytes, Field(min_length=16, max_length=16)]  # opens every data-plane message

    @property
    def hashes(self) -> tuple[Hash, ...]:
        """Every chunk that the segments need, once."""
        chunks = [chunk for each in self.files for chunk in each.graph]
        chunks += [chunk for each in self.files for weight in each.initializers for chunk in weight.chunks]
        return tuple(dict.fromkeys(chunks))


class RunGraph(_Message):
    """One request, to every rank of the plan. Payload: the graph inputs that this rank's segments take, in two frames each.

    Steps count up. Several may be in flight. `timeout_seconds`: from here until all of the request has run on this rank.
    """

    t: Literal["run_graph"] = "run_graph"
    holder: Name
    epoch: Epoch
    step: Annotated[int, Field(ge=0, lt=1 << 32)]
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)]
    names: tuple[TensorName, ...] = Field(default=(), max_length=MAX_PAYLOAD_FRAMES // 2)
    trace: bool = False


class GraphDone(_Message):
    """Every segment of this rank has run. Payload: the graph outputs that it made, in two frames each."""

    t: Literal["graph_done"] = "graph_done"
    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    began_seconds: float  # on the worker's monotonic clock, like the trace
    ended_seconds: float
    compute_seconds: tuple[Annotated[float, Field(ge=0)], ...] = Field(max_length=4096)  # of each segment of this rank
    wire: WireStats  # since the plan was loaded
    dropped_messages: int
    trace: tuple[TraceEvent, ...] = ()


class AbortGraph(_Message):
    """Give up one request: it failed elsewhere. `AbortStep` gives up all that are in flight."""

    t: Literal["abort_graph"] = "abort_graph"
    holder: Name
    epoch: Epoch
    step: Annotated[int, Field(ge=0, lt=1 << 32)]
    reason: Text


# ---- coordinator to agent: generation -------------------------------------------------------------------------------


class Sampling(_Message):
    """How a next token is chosen. Temperature 0: the likeliest (greedy), and nothing else matters.

    In this order, as `transformers` has it: repetition penalty, temperature, top-k, top-p, min-p.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=0, le=1 << 24)] = 0  # 0: all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


FinishReason: TypeAlias = Literal["stop", "length"]


class GenerateTokens(_Message):
    """Ask rank 0 of a plan to continue a prompt. Payload: token ids [T] int32.

    The answer is a stream of `TokensGenerated` that ends with `GenerationEnded`. `first_index` is the number of prompt
    tokens that were generated before (by a plan that was lost): sampling goes on where it was.
    """

    t: Literal["generate_tokens"] = "generate_tokens"
    holder: Name
    epoch: Epoch
    sampling: Sampling = Sampling()
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)]
    stop_ids: tuple[int, ...] = Field(
        default=(), max_length=256
    )  # a token of these ends the sequence, and is passed on
    first_index: Annotated[int, Field(ge=0)] = 0


class TokensGenerated(_Message):
    t: Literal["tokens_generated"] = "tokens_generated"
    token_ids: tuple[int, ...]


class GenerationEnded(_Message):
    """`prefill_seconds` from the start of the first step to the first token; `decode_seconds` for all later ones."""

    t: Literal["generation_ended"] = "generation_ended"
    reason: FinishReason
    num_prompt_tokens: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    queued_seconds: Annotated[float, Field(ge=0)]
    prefill_seconds: Annotated[float, Field(ge=0)]
    decode_seconds: Annotated[float, Field(ge=0)]


class Cancel(_Message):
    """End a stream early: the request of this caller that has this id. It is not answered."""

    t: Literal["cancel"] = "cancel"
    request: Annotated[bytes, Field(min_length=8, max_length=8)]


class AbortStep(_Message):
    """Give up the running step: a peer of it is gone."""

    t: Literal["abort_step"] = "abort_step"
    holder: Name
    epoch: Epoch
    reason: Text


class Unload(_Message):
    t: Literal["unload"] = "unload"
    holder: Name
    epoch: Epoch


# ---- agent to agent ---------------------------------------------------------------------------------------------


class GetChunk(_Message):
    """The answer is `Done`, with the chunk's bytes as its one payload frame."""

    t: Literal["get_chunk"] = "get_chunk"
    hash: Hash


# ---- daemon to its own worker -------------------------------------------------------------------------------------


class StartWorker(_Message):
    """All that a worker process must know; the first message on its private socket."""

    t: Literal["start_worker"] = "start_worker"
    load: LoadShard
    store_path: Text
    bind_host: Name
    ports: tuple[int, int]  # first and last that may be bound; (0, 0): any
    num_threads: Annotated[int, Field(ge=1)]
    compute_device: Literal["cpu", "cuda"]


class StartGraphWorker(_Message):
    """`StartWorker` for a graph."""

    t: Literal["start_graph_worker"] = "start_graph_worker"
    load: LoadGraph
    store_path: Text
    bind_host: Name
    ports: tuple[int, int]
    num_threads: Annotated[int, Field(ge=1)]
    compute_device: Literal["cpu", "cuda"]


# ---- worker to worker: rank 0 tells the others what a generation step does --------------------------------------


class NewSequence(_Message):
    """What every rank must know of a sequence before its first rows."""

    capacity: Annotated[int, Field(ge=1, le=1 << 24)]  # tokens that its KV cache will hold at most
    num_prompt_tokens: Annotated[int, Field(ge=1)]
    sampling: Sampling
    first_index: Annotated[int, Field(ge=0)] = 0


class SequenceRows(_Message):
    """The rows of one sequence in a step: they follow those that its KV cache holds."""

    sequence: Annotated[int, Field(ge=0)]
    token_ids: tuple[int, ...] = Field(min_length=1)
    sample: bool  # whether the last row's next token is wanted
    new: NewSequence | None = None


class StepOrder(_Message):
    """One step of a generation; `freed` sequences are forgotten before it. With no rows, nothing is computed."""

    t: Literal["step_order"] = "step_order"
    kind: Literal["prefill", "decode"]
    rows: tuple[SequenceRows, ...]
    freed: tuple[int, ...] = ()


# ---- client to coordinator ----------------------------------------------------------------------------------------


class CoordinatorWelcome(_Message):
    t: Literal["coordinator_welcome"] = "coordinator_welcome"
    protocol: int = PROTOCOL_VERSION
    version: Name
    name: Name


class GetReadiness(_Message):
    t: Literal["get_readiness"] = "get_readiness"


class Readiness(_Message):
    t: Literal["readiness"] = "readiness"
    ready: bool
    state: Text
    model: Name


class Embed(_Message):
    """Sentence embeddings, normalised. The answer is `Vectors` with payload [N,H] float32."""

    t: Literal["embed"] = "embed"
    texts: tuple[Text, ...] = Field(min_length=1, max_length=4096)
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    trace: bool = False


class GetHiddenStates(_Message):
    """Last hidden states of one sequence. Payload: token ids [T] int32. The answer's payload is [T,H] float32."""

    t: Literal["get_hidden_states"] = "get_hidden_states"
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0


class ChatMessage(_Message):
    role: Name
    content: Text


class SamplingChoice(_Message):
    """What a client says of sampling; what it leaves out comes from the model's generation_config.json, else `Sampling`."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 24)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None  # none: another one each time


class Generate(_Message):
    """Continue a prompt: a text, a chat, or token ids (payload [T] int32; exactly one of the three).

    The answer is a stream of `TextGenerated` that ends with `TextEnded`.
    """

    t: Literal["generate"] = "generate"
    prompt: Text | None = None
    messages: tuple[ChatMessage, ...] = Field(default=(), max_length=4096)
    sampling: SamplingChoice = SamplingChoice()
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None  # none: what generation_config.json says, or 512
    stop: tuple[Text, ...] = Field(default=(), max_length=16)  # texts that end the answer, and are no part of it
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0


class TextGenerated(_Message):
    """`text` is what these tokens add; empty while a character, or a possible stop text, is not complete."""

    t: Literal["text_generated"] = "text_generated"
    token_ids: tuple[int, ...]
    text: Text


class TextEnded(_Message):
    """`text` is what was held back. Seconds: the wait in the queue, to the first token without it, and for the others."""

    t: Literal["text_ended"] = "text_ended"
    text: Text
    reason: FinishReason
    num_prompt_tokens: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    queued_seconds: Annotated[float, Field(ge=0)]
    first_token_seconds: Annotated[float, Field(ge=0)]
    decode_seconds: Annotated[float, Field(ge=0)]


class DeviceTrace(_Message):
    """The events of one rank. Several of the same rank are of steps that ran one after the other."""

    device: Name
    rank: Annotated[int, Field(ge=0, lt=1 << 16)]
    events: tuple[TraceEvent, ...]


class Vectors(_Message):
    t: Literal["vectors"] = "vectors"
    latency_seconds: float  # from the start of the step to its last row, without the time in the queue
    num_tokens: int
    traces: tuple[DeviceTrace, ...] = ()


class GetModelInfo(_Message):
    t: Literal["get_model_info"] = "get_model_info"


class ArrayInfo(_Message):
    name: TensorName
    dtype: ElementType
    shape: Shape


class ModelInfo(_Message):
    """What the served graph takes and gives."""

    t: Literal["model_info"] = "model_info"
    name: Name
    inputs: tuple[ArrayInfo, ...]
    outputs: tuple[ArrayInfo, ...]


class Infer(_Message):
    """Run the served graph once. Payload: every input, in two frames each. The answer is `Inferred`."""

    t: Literal["infer"] = "infer"
    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    trace: bool = False


class Inferred(_Message):
    """Payload: the graph's outputs, in two frames each."""

    t: Literal["inferred"] = "inferred"
    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    latency_seconds: float  # from the start of the request to its last output, without the time in the queue
    traces: tuple[DeviceTrace, ...] = ()


class ListDevices(_Message):
    t: Literal["list_devices"] = "list_devices"


class DeviceInfo(_Message):
    device_id: Name
    name: Name
    host: Name
    state: Literal["alive", "suspect", "dead", "busy", "refused"]
    reason: Text = ""
    worker: WorkerState
    worker_peak_bytes: Bytes = 0
    telemetry: Telemetry | None


class DeviceList(_Message):
    t: Literal["device_list"] = "device_list"
    devices: tuple[DeviceInfo, ...]
    links: tuple[Link, ...]


class GetStatus(_Message):
    t: Literal["get_status"] = "get_status"


class Status(_Message):
    t: Literal["status"] = "status"
    name: Name
    version: Name
    state: Text
    model_path: Text
    plan: Plan | None
    queued_requests: int
    served_requests: int
    failed_requests: int
    last_error: Text
    last_latency_seconds: float | None
    wire: WireStats
    dropped_messages: int


class AddApp(_Message):
    t: Literal["add_app"] = "add_app"
    name: Name
    public_key: PublicKey


class RevokeApp(_Message):
    t: Literal["revoke_app"] = "revoke_app"
    name: Name


class ListApps(_Message):
    t: Literal["list_apps"] = "list_apps"


class AppList(_Message):
    t: Literal["app_list"] = "app_list"
    names: tuple[Name, ...]
    revoked: tuple[Name, ...]


Message: TypeAlias = (
    Hello
    | Done
    | Failed
    | AgentWelcome
    | GetTelemetry
    | Telemetry
    | AcquireLease
    | LeaseGranted
    | ReleaseLease
    | Heartbeat
    | AgentState
    | OpenLinkProbe
    | MeasureLink
    | LinkMeasured
    | ProfileBlocks
    | BlocksProfiled
    | FindMissing
    | ChunksMissing
    | PutChunk
    | FetchChunks
    | ChunksFetched
    | GetChunk
    | LoadShard
    | WorkerBound
    | ConnectPeers
    | RunStep
    | StepDone
    | Unload
    | StartWorker
    | AbortStep
    | ProfileGraph
    | GraphProfiled
    | LoadGraph
    | RunGraph
    | GraphDone
    | AbortGraph
    | StartGraphWorker
    | GenerateTokens
    | TokensGenerated
    | GenerationEnded
    | Cancel
    | StepOrder
    | CoordinatorWelcome
    | GetReadiness
    | Readiness
    | Embed
    | GetHiddenStates
    | Generate
    | TextGenerated
    | TextEnded
    | Vectors
    | GetModelInfo
    | ModelInfo
    | Infer
    | Inferred
    | ListDevices
    | DeviceList
    | GetStatus
    | Status
    | AddApp
    | RevokeApp
    | ListApps
    | AppList
)

MESSAGE_TYPES: tuple[type[BaseModel], ...] = get_args(Message)
_TAGS = frozenset(message_type.model_fields["t"].default for message_type in MESSAGE_TYPES)
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="t")])


def encode(message: Message) -> bytes:
    """The message's bytes. Raises FrameTooLarge rather than send what the peer must refuse."""
    data: bytes = msgpack.packb(message.model_dump(), use_bin_type=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise FrameTooLarge(num_bytes=len(data), cap_bytes=MAX_MESSAGE_BYTES)
    return data


def decode(data: bytes | memoryview) -> Message:
    """Read one message. Raises FrameTooLarge, BadMessage or UnknownMessage, and nothing else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise FrameTooLarge(num_bytes=len(data), cap_bytes=MAX_MESSAGE_BYTES)
    try:
        fields: Any = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise BadMessage(reason=f"no valid msgpack ({type(error).__name__})") from None
    if not isinstance(fields, dict):
        raise BadMessage(reason=f"a map was expected, not {type(fields).__name__}")
    tag = fields.get("t")
    if tag not in _TAGS if isinstance(tag, str) else True:
        raise UnknownMessage(tag=str(tag)[:64])
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError as error:
        raise BadMessage(reason=first_error(error)) from None
