"""Messages between coordinator and agent about the device: leases, telemetry, measurements, chunks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field

from hearth.plan.layer import ChunkKind
from hearth.plan.model_spec import ModelSpec
from hearth.plan.profile import BlockProfile, WireCost
from hearth.protocol import (
    CONFINEMENT,
    DEFAULT_DEPLOYMENT,
    MAX_LINK_OPEN_SECONDS,
    MAX_PAYLOAD_FRAME_BYTES,
    PROTOCOL_VERSION,
)
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
    StepNumber,
    TensorName,
    Text,
    WireModel,
    WorkerLibrary,
)

MAX_WORKERS = 256  # of one agent; each is a process, of which a device can run a few


class AgentWelcome(Message):
    """The agent's answer to `Hello`. `device_id` is stable and bound to the hardware; `boot_id` is new in each run."""

    any_version: ClassVar[bool] = True
    protocol: int = PROTOCOL_VERSION
    version: Name
    device_id: Name
    boot_id: Name
    name: Name
    device_public_key: PublicKey
    link_port: Port
    data_ports: tuple[int, int] = (0, 0)  # first and last that its workers bind; (0, 0): any, or not known


# ---- telemetry ----------------------------------------------------------------------------------------------------


class GetTelemetry(Message):
    """Ask for the device's state. The answer is `Telemetry`."""


class Gpu(WireModel):
    """A device's GPU. `load_fraction` is None if it is not known."""

    name: Name
    kind: Literal["cuda", "tegra"]
    memory_total_bytes: Bytes
    memory_free_bytes: Bytes
    load_fraction: float | None = None
    compute_capability: tuple[int, int] | None = None  # NVIDIA's version of its instructions; None: not used to compute


class Telemetry(Message):
    """A device's properties and current state."""

    host_id: Name  # the same for all agents on one machine
    cpu_model: Name
    num_cores: int
    load_1min: float
    frequency_mhz: float | None
    memory_total_bytes: Bytes
    memory_available_bytes: Bytes
    memory_budget_bytes: Bytes  # memory limit of a worker: the user's limit, or the free memory less a reserve
    disk_free_bytes: Bytes
    temperature_celsius: float | None
    gpu: Gpu | None
    # Why the device computes on the CPU although it has a GPU and the user did not choose the CPU; empty if it does not.
    gpu_problem: Text = ""
    num_threads: int  # compute threads of a worker
    compute_device: ComputeDevice
    clock_unix_seconds: float
    python_version: Name
    # Resident memory of the workers, by deployment, that is no longer part of the budget; none if that is the user's limit.
    memory_held_bytes: dict[Name, Bytes] = Field(default={}, max_length=MAX_WORKERS)
    # Chunks that the store can take besides those of the plans deployed here, if it drops all others; None: not known.
    store_room_bytes: Bytes | None = None
    cpu_load: float | None = None  # busy fraction of all cores since the last reading
    # What the system confines workers in, of `CONFINEMENT`, with spaces between; None: not known, of an earlier version
    confined: Text | None = None

    def unconfined(self) -> tuple[str, ...]:
        """What workers are not confined in although they should be; empty if that is not known."""
        return () if self.confined is None else tuple(each for each in CONFINEMENT if each not in self.confined.split())

    @property
    def gpu_load(self) -> float | None:
        """The busy fraction of the GPU; None without one, or if it is not known."""
        return self.gpu.load_fraction if self.gpu is not None else None


class DeviceSampled(WireModel):
    """The event that a device's telemetry was read, at an interval. Fractions are between 0 and 1."""

    kind: Literal["device_sampled"] = "device_sampled"
    device_id: Name
    name: Name
    cpu_load: Annotated[float, Field(ge=0, le=1)] | None = None  # mean of all cores since the sample before
    gpu_load: Annotated[float, Field(ge=0, le=1)] | None = None
    memory_available_bytes: Bytes
    memory_budget_bytes: Bytes  # memory limit of a worker
    worker_peak_bytes: Bytes = 0  # of all its workers
    temperature_celsius: float | None = None


class Sensor(NamedTuple):
    """A reading of a device: an attribute of `Telemetry` and `DeviceSampled`, the metric that exports it, and how it is shown.

    Loads and memory have no `text`: they have places of their own in tables and lines.
    """

    field: str
    metric: str  # its name in Prometheus's format follows `hearth_device_`
    help: str
    text: str = ""  # format of a value with its unit
    heading: str = ""  # of its column, next to the GPU's name


SENSORS = (
    Sensor("temperature_celsius", "temperature_celsius", "Of the hottest zone.", "{:.0f} °C", "temp"),
    Sensor("memory_available_bytes", "memory_available_bytes", "Memory that is free."),
    Sensor("memory_budget_bytes", "memory_budget_bytes", "Memory that a worker may use."),
    Sensor("cpu_load", "load_ratio", "Load of the processor, 1 if all cores are busy."),
    Sensor("gpu_load", "gpu_load_ratio", "Load of the GPU."),
)


# ---- leases -------------------------------------------------------------------------------------------------------


class AcquireLease(Message):
    """Request the exclusive right to run workers on this device.

    `holder` is the random id of a coordinator; the lease ends after `seconds` unless a `Heartbeat` renews it. `adopt`: the
    epochs of the workers that are taken over as they are, by deployment; the agent stops all others. Without `adopt`, only
    the present holder keeps its workers.

    `ended`: the name of a coordinator that has ended, as the sender has found. If it has the lease, and its connection to this
    agent has been closed for a while, too, the lease need not run out.
    """

    holder: Name
    holder_name: Name
    seconds: Annotated[float, Field(gt=0, le=60)]
    adopt: Annotated[dict[Name, Epoch], Field(max_length=MAX_WORKERS)] | None = None
    ended: Name | None = None


class RunningWorker(WireModel):
    """A ready worker that the holder of a lease takes over."""

    deployment: Name = DEFAULT_DEPLOYMENT
    epoch: Epoch
    plan_hash: Hash  # `hearth.plan.plan.plan_hash`
    rank: Annotated[int, Field(ge=0)]
    last_step: StepNumber  # the newest that it was asked to run


class Configuration(WireModel):
    """The devices whose leases decide which coordinator of a home may compute (`coordinator.devices.quorum`).

    A later configuration has a higher `number`. While the voters change, a majority of the previous ones is needed, too.
    """

    number: Annotated[int, Field(ge=0, lt=1 << 63)]
    leader: Name  # random id of a run of the coordinator that made it
    voters: tuple[Name, ...] = Field(min_length=1, max_length=256)  # device ids
    tie_breaker: Name  # the voter with which exactly half of the voters are sufficient
    previous_voters: tuple[Name, ...] = Field(default=(), max_length=256)  # empty: the change is complete
    previous_tie_breaker: Name = ""


class StoreConfiguration(Command):
    """Store a configuration, unless the agent has a later one. The agent keeps it over restarts. The answer is `Done`.

    A number that the agent has stored for another leader is refused as well: a leader is the only one of its term.
    """

    configuration: Configuration


class LeaseGranted(Message):
    """The answer to `AcquireLease`."""

    last_epoch: Epoch  # highest epoch of any deployment that the agent has seen; a new plan needs a higher one
    workers: tuple[RunningWorker, ...] = Field(default=(), max_length=MAX_WORKERS)  # that the new holder takes over
    configuration: Configuration | None = None  # the latest that the agent has stored; None: it does not vote


class ReleaseLease(Command):
    """Stop all workers and end the lease. `keep_workers`: leave the workers to the coordinator that takes over."""

    keep_workers: bool = False


class Heartbeat(Command):
    """Renew the lease. The answer is `AgentState`."""


class WatchWorkers(Command):
    """Report the workers' states, and each change at once. The answers are `AgentState`, at least every 5 s while leased."""


WorkerState: TypeAlias = Literal["none", "starting", "loading", "bound", "ready", "failed", "stopped"]


class WorkerStatus(WireModel):
    """State of one deployment's worker."""

    deployment: Name = DEFAULT_DEPLOYMENT
    state: WorkerState
    epoch: Epoch
    failure: Text = ""
    peak_bytes: Bytes = 0  # peak resident memory of the process
    busy_seconds: Annotated[float, Field(ge=0)] = 0.0  # processor time of the process since it started
    step: StepNumber | None = None  # the step that it computes, since `step_seconds`
    step_seconds: Annotated[float, Field(ge=0)] = 0.0
    silent_seconds: Annotated[float, Field(ge=0)] = 0.0  # since its last sign of life, which it gives every 0.5 s
    late_rank: Annotated[int, Field(ge=0)] | None = None  # it waits unusually long for a tile of this rank
    # To the workers of other devices since the plan was loaded, by device id; none before it is ready.
    sent_bytes: dict[Name, Bytes] = Field(default={}, max_length=256)


class AgentState(Message):
    """State of the agent's workers: at most one per deployment."""

    boot_id: Name
    workers: tuple[WorkerStatus, ...] = Field(default=(), max_length=MAX_WORKERS)
    num_abandoned: Annotated[int, Field(ge=0)] = 0  # worker processes that did not end when they were killed
    num_hung: Annotated[int, Field(ge=0)] = 0  # accesses to the store's disk beyond their time limits

    def worker(self, deployment: str) -> WorkerStatus | None:
        """The status of one deployment's worker, or None if it has none."""
        return next((worker for worker in self.workers if worker.deployment == deployment), None)


# ---- measurements -------------------------------------------------------------------------------------------------


class OpenLinkProbe(Message):
    """Allow one peer to measure the link to this device, or to fetch chunks from it, for `seconds`."""

    peer_public_key: PublicKey
    seconds: Annotated[float, Field(gt=0, le=MAX_LINK_OPEN_SECONDS)]


class MeasureLink(Message):
    """Measure the link from this device to another, within limits of time and bytes. The answer is `LinkMeasured`."""

    host: Name
    port: Port
    peer_public_key: PublicKey
    max_bytes: Annotated[int, Field(gt=0, le=1 << 30)]
    max_seconds: Annotated[float, Field(gt=0, le=30)]


class LinkMeasured(Message):
    """The answer to `MeasureLink`."""

    bytes_per_second: Annotated[float, Field(gt=0)]
    round_trip_seconds: Annotated[float, Field(ge=0)]
    num_bytes: Bytes
    stable: bool  # whether the last bursts agreed


class BlocksOf(WireModel):
    """Profile the blocks of one transformer layer."""

    kind: Literal["blocks"] = "blocks"
    model: ModelSpec
    seq_len: Annotated[int, Field(ge=1, le=1 << 20)]
    deterministic: bool = False  # whether each matrix has one kernel for all numbers of rows
    quick: bool = False  # a profile in a few seconds: of fewer rows, scaled up, with the default kernels only


class OperatorsOf(WireModel):
    """Profile the operators of an ONNX graph. Payload: the model's protobuf, split into frames.

    Initialisers without data (external data, at any location) are filled with random values.
    """

    kind: Literal["operators"] = "operators"


class Profile(Message):
    """Measure how fast this device computes a model. The answer is `Profiled`."""

    subject: BlocksOf | OperatorsOf = Field(discriminator="kind")
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)]


class Kernel(WireModel):
    """One node of the graph as optimised by onnxruntime. `operators` are the nodes of the original graph that it computes.

    They are identified by name or, if onnxruntime has renamed the node, by the tensors that it produces. Empty: a node that
    onnxruntime added.
    """

    name: TensorName
    kind: Name
    provider: Name
    seconds: Annotated[float, Field(ge=0)]  # mean per run, scaled so that all kernels sum to `run_seconds`
    operators: tuple[TensorName, ...] = Field(default=(), max_length=100_000, fail_fast=True)


class GraphProfile(WireModel):
    """Measured times and memory of a graph on one device.

    A process with onnxruntime holds `process_bytes`; loading the graph adds `load_bytes`, and running it `run_bytes`.
    `peak_bytes` is the peak of the whole process during loading.
    """

    kernels: tuple[Kernel, ...] = Field(max_length=100_000, fail_fast=True)
    run_seconds: Annotated[float, Field(gt=0)]  # median of a whole run, without the profiler
    provider: Name
    process_bytes: Bytes
    load_bytes: Bytes
    peak_bytes: Bytes
    run_bytes: Bytes
    wire: WireCost


class Profiled(Message):
    """The answer to `Profile`."""

    result: BlockProfile | GraphProfile


# ---- chunks -------------------------------------------------------------------------------------------------------


class ChunkRef(WireModel):
    """One chunk of a checkpoint, named by its hash, and the grain that it holds (see `hearth.plan.layer`)."""

    hash: Hash
    num_bytes: Annotated[int, Field(ge=0, le=MAX_PAYLOAD_FRAME_BYTES)]
    kind: ChunkKind
    layer: Annotated[int, Field(ge=0)]  # 0 for embeddings
    grain: Annotated[int, Field(ge=0)]  # 0 for kinds with one chunk per layer


class FindMissing(Command):
    """Ask which of these chunks the agent's store lacks. The answer is `ChunksMissing`.

    With `verify`, the agent hashes the chunks that it has; damaged ones are discarded and count as missing. With `read_ahead`,
    it asks its system to read them into the page cache, in their order, up to half of its free memory. With `prepare_worker`,
    a worker that needs this library may have to load them soon: the agent starts the process from which it would be forked.
    """

    hashes: tuple[Hash, ...] = Field(max_length=50_000, fail_fast=True)
    verify: bool = False
    read_ahead: bool = False
    prepare_worker: WorkerLibrary | None = None


class ChunksMissing(Message):
    """The answer to `FindMissing`: the chunks that the store lacks. The bytes are of the others, with `read_ahead` only."""

    hashes: tuple[Hash, ...] = Field(max_length=50_000, fail_fast=True)
    stored_bytes: Bytes = 0
    read_ahead_bytes: Bytes = 0  # of these, those that the system was asked to read into the page cache


class PutChunk(Command):
    """Store a chunk. Payload: its bytes, in one frame."""

    hash: Hash


class FetchChunks(Command):
    """Fetch chunks from another agent, which must have admitted this one by `OpenLinkProbe`. The answer is `ChunksFetched`."""

    host: Name
    port: Port
    peer_public_key: PublicKey
    hashes: tuple[Hash, ...] = Field(min_length=1, max_length=50_000, fail_fast=True)
    seconds: Annotated[float, Field(gt=0, le=60)]  # timeout for all chunks together


class ChunksFetched(Message):
    """The answer to `FetchChunks`."""

    # Chunks that did not arrive intact within that time:
    missing: tuple[Hash, ...] = Field(max_length=50_000, fail_fast=True)


class GetChunk(Message):
    """Ask another agent for a chunk. The answer is `Done`, with the chunk's bytes in one payload frame."""

    hash: Hash
