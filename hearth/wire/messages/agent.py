"""Messages between a coordinator and an agent about the device: leases, telemetry, measurements and chunks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from hearth.plan.chunks import ChunkKind
from hearth.plan.model_spec import ModelSpec
from hearth.plan.profile import BlockProfile, WireCost
from hearth.protocol import DEFAULT_DEPLOYMENT, MAX_PAYLOAD_FRAME_BYTES, PROTOCOL_VERSION
from hearth.wire.messages.base import (
    Bytes,
    Command,
    ComputeDevice,
    Epoch,
    Hash,
    Message,
    Name,
    Port,
    PublicKey,
    TensorName,
    Text,
    WireModel,
)


class AgentWelcome(Message):
    """`device_id` is stable and bound to the hardware; `boot_id` tells apart runs of the same agent."""

    any_version: ClassVar[bool] = True
    protocol: int = PROTOCOL_VERSION
    version: Name
    device_id: Name
    boot_id: Name
    name: Name
    device_public_key: PublicKey
    link_port: Port


class GetTelemetry(Message):
    """The answer is `Telemetry`."""


class Gpu(WireModel):
    name: Name
    kind: Literal["cuda", "tegra"]
    memory_total_bytes: Bytes
    memory_free_bytes: Bytes
    load_fraction: float | None = None


class Telemetry(Message):
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
    compute_device: ComputeDevice
    clock_unix_seconds: float
    python_version: Name


# ---- leases -------------------------------------------------------------------------------------------------------


class AcquireLease(Command):
    """Ask for the right to run one deployment on this device. `holder` is random, one per coordinator process."""

    holder_name: Name
    seconds: Annotated[float, Field(gt=0, le=60)]


class LeaseGranted(Message):
    last_epoch: Epoch  # the newest epoch of this deployment that the agent has seen; a new plan must be newer


class ReleaseLease(Command):
    """Stop the deployment's worker and end its lease."""


class Heartbeat(Message):
    """Renews every lease of this holder and asks for the state of the workers."""

    holder: Name


WorkerState: TypeAlias = Literal["none", "starting", "loading", "bound", "ready", "failed", "stopped"]


class WorkerStatus(WireModel):
    deployment: Name = DEFAULT_DEPLOYMENT
    state: WorkerState
    epoch: Epoch
    failure: Text = ""
    peak_bytes: Bytes = 0  # the most memory that the process had resident so far


class AgentState(Message):
    """`workers`: at most one per deployment. A deployment that is not among them has none."""

    boot_id: Name
    workers: tuple[WorkerStatus, ...] = Field(default=(), max_length=256)

    def worker(self, deployment: str) -> WorkerStatus | None:
        return next((worker for worker in self.workers if worker.deployment == deployment), None)


# ---- measurements -------------------------------------------------------------------------------------------------


class OpenLinkProbe(Message):
    """Let one peer measure the link to this device, or fetch chunks from it, for a while."""

    peer_public_key: PublicKey
    seconds: Annotated[float, Field(gt=0, le=60)]


class MeasureLink(Message):
    """Measure the link from this device to another, bounded in time and bytes."""

    host: Name
    port: Port
    peer_public_key: PublicKey
    max_bytes: Annotated[int, Field(gt=0, le=1 << 30)]
    max_seconds: Annotated[float, Field(gt=0, le=30)]


class LinkMeasured(Message):
    bytes_per_second: Annotated[float, Field(gt=0)]
    round_trip_seconds: Annotated[float, Field(ge=0)]
    num_bytes: Bytes
    stable: bool


class BlocksOf(WireModel):
    """Profile the blocks of a transformer's layer."""

    kind: Literal["blocks"] = "blocks"
    model: ModelSpec
    seq_len: Annotated[int, Field(ge=1, le=1 << 20)]


class OperatorsOf(WireModel):
    """Profile the operators of an ONNX graph. Payload: its protobuf in frames, one after the other.

    Initialisers whose bytes are left out (external data, at any location) are filled with random values.
    """

    kind: Literal["operators"] = "operators"


class Profile(Message):
    """Measure how fast this device computes a model. The answer is `Profiled`."""

    subject: BlocksOf | OperatorsOf = Field(discriminator="kind")
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)]


class Kernel(WireModel):
    """One node of the graph as onnxruntime runs it. `operators`: the nodes of the given graph that it stands for.

    They are found by name; where onnxruntime gave it another, by the tensors that it makes. Empty: a node of its own.
    """

    name: TensorName
    kind: Name
    provider: Name
    seconds: Annotated[float, Field(ge=0)]  # median of a run
    operators: tuple[TensorName, ...] = ()


class GraphProfile(WireModel):
    """The process with onnxruntime holds `process_bytes`, a loaded graph `load_bytes` more, running it `run_bytes` more.

    `peak_bytes` is the most that the whole process held while it loaded.
    """

    kernels: tuple[Kernel, ...] = Field(max_length=100_000)
    run_seconds: Annotated[float, Field(gt=0)]  # median of a whole run, without the profiler
    provider: Name
    process_bytes: Bytes
    load_bytes: Bytes
    peak_bytes: Bytes
    run_bytes: Bytes
    wire: WireCost


class Profiled(Message):
    result: BlockProfile | GraphProfile


# ---- chunks -------------------------------------------------------------------------------------------------------


class ChunkRef(WireModel):
    """One hash-named piece of a checkpoint, and the grain it holds (see `hearth.plan.chunks`)."""

    hash: Hash
    num_bytes: Annotated[int, Field(ge=0, le=MAX_PAYLOAD_FRAME_BYTES)]
    kind: ChunkKind
    layer: Annotated[int, Field(ge=0)]  # 0 for embeddings
    grain: Annotated[int, Field(ge=0)]  # 0 where the kind has one chunk per layer


class FindMissing(Command):
    hashes: tuple[Hash, ...] = Field(max_length=50_000)


class ChunksMissing(Message):
    hashes: tuple[Hash, ...]


class PutChunk(Command):
    """The chunk's bytes are the one payload frame."""

    hash: Hash


class FetchChunks(Command):
    """Get chunks from another agent, which lets this one in for a while (`OpenLinkProbe`)."""

    host: Name
    port: Port
    peer_public_key: PublicKey
    hashes: tuple[Hash, ...] = Field(min_length=1, max_length=50_000)
    seconds: Annotated[float, Field(gt=0, le=60)]  # in all


class ChunksFetched(Message):
    missing: tuple[Hash, ...]  # chunks that did not come in that time


class GetChunk(Message):
    """From agent to agent. The answer is `Done`, with the chunk's bytes as its one payload frame."""

    hash: Hash
