"""Messages between a client and the coordinator."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from hearth.plan.plan import Plan
from hearth.plan.profile import Link
from hearth.protocol import DEFAULT_DEPLOYMENT, MAX_PAYLOAD_FRAMES, PROTOCOL_VERSION
from hearth.wire.messages.agent import Telemetry, WorkerStatus
from hearth.wire.messages.base import ElementType, Message, Name, PublicKey, Shape, TensorName, Text, WireModel
from hearth.wire.messages.worker import FinishReason, TraceEvent, WireStats


class ClientRequest(Message, abstract=True):
    """A request of a client. `request_id` is unique; a client that sends a request again sends the same id."""

    request_id: Name = ""  # empty: the request is sent once only
    deployment: Name | None = None  # None: the one that takes this kind of request
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0  # the deadline, from the arrival of the request


class CoordinatorWelcome(Message):
    any_version: ClassVar[bool] = True
    protocol: int = PROTOCOL_VERSION
    version: Name
    name: Name


class ModelRequest(ClientRequest, abstract=True):
    """A request that the served model answers. All that an app may send, but for GetReadiness."""


class GetReadiness(ClientRequest):
    """Whether a model is served. The answer is `Readiness`."""


class Readiness(Message):
    deployment: Name = DEFAULT_DEPLOYMENT
    ready: bool
    state: Text
    model: Name


# ---- transformers -------------------------------------------------------------------------------------------------


class Embed(ModelRequest):
    """Sentence embeddings, normalised. The answer is `Vectors` with payload [N,H] float32."""

    texts: tuple[Text, ...] = Field(min_length=1, max_length=4096)
    trace: bool = False


class GetHiddenStates(ModelRequest):
    """Last hidden states of one sequence. Payload: token ids [T] int32. The answer's payload is [T,H] float32."""


class DeviceTrace(WireModel):
    """The events of one rank. Several of the same rank are of steps that ran one after the other."""

    device: Name
    rank: Annotated[int, Field(ge=0, lt=1 << 16)]
    events: tuple[TraceEvent, ...]


class Vectors(Message):
    latency_seconds: float  # from the start of the step to its last row, without the time in the queue
    num_tokens: int
    traces: tuple[DeviceTrace, ...] = ()


class ChatMessage(WireModel):
    role: Name
    content: Text


class SamplingChoice(WireModel):
    """A client's settings of sampling; the others come from the model's generation_config.json, else `Sampling`."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 24)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None  # None: another one each time


class Generate(ModelRequest):
    """Continue a prompt: a text, a chat, or token ids (payload [T] int32; exactly one of the three).

    The answer is a stream of `TextGenerated` that ends with `TextEnded`.
    """

    prompt: Text | None = None
    messages: tuple[ChatMessage, ...] = Field(default=(), max_length=4096)
    sampling: SamplingChoice = SamplingChoice()
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None  # None: as generation_config.json says, or 512
    stop: tuple[Text, ...] = Field(default=(), max_length=16)  # texts that end the answer, and are no part of it
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0


class TextGenerated(Message):
    """`text` is what these tokens add; empty while a character, or a possible stop text, is not complete."""

    token_ids: tuple[int, ...]
    text: Text


class TextEnded(Message):
    """`text` was held back. Seconds: the wait in the queue, then to the first token, then for the others."""

    text: Text
    reason: FinishReason
    num_prompt_tokens: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    queued_seconds: Annotated[float, Field(ge=0)]
    first_token_seconds: Annotated[float, Field(ge=0)]
    decode_seconds: Annotated[float, Field(ge=0)]


# ---- graphs -------------------------------------------------------------------------------------------------------


class GetModelInfo(ModelRequest):
    """What the served graph takes and makes. The answer is `ModelInfo`."""


class ArrayInfo(WireModel):
    name: TensorName
    dtype: ElementType
    shape: Shape


class ModelInfo(Message):
    """The inputs and outputs of the served graph."""

    name: Name
    inputs: tuple[ArrayInfo, ...]
    outputs: tuple[ArrayInfo, ...]


class Infer(ModelRequest):
    """Run the served graph once. Payload: every input, in two frames each. The answer is `Inferred`."""

    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    trace: bool = False


class Inferred(Message):
    """Payload: the graph's outputs, in two frames each."""

    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    latency_seconds: float  # from the start of the request to its last output, without the time in the queue
    traces: tuple[DeviceTrace, ...] = ()


# ---- with an admin key --------------------------------------------------------------------------------------------


class ListDevices(ClientRequest):
    """The answer is `DeviceList`."""


class DeviceInfo(WireModel):
    """A device as the coordinator sees it. An agent that refused the hello has no id; its address is its name."""

    device_id: Name
    name: Name
    host: Name
    state: Literal["alive", "suspect", "dead", "busy", "refused"]
    reason: Text = ""
    workers: tuple[WorkerStatus, ...] = ()
    telemetry: Telemetry | None

    @property
    def peak_bytes(self) -> int:
        """The most memory that the workers of this device had resident so far."""
        return sum(worker.peak_bytes for worker in self.workers)


class DeviceList(Message):
    devices: tuple[DeviceInfo, ...]
    links: tuple[Link, ...]


class GetStatus(ClientRequest):
    """The answer is `Status`."""


Phase: TypeAlias = Literal[
    "idle", "settling", "profiling", "planning", "pushing", "loading", "warming", "serving", "draining", "failed"
]  # fmt: skip


class PhaseEntered(WireModel):
    """One move of a deployment's life cycle. A failure that repeats is one move."""

    phase: Phase
    cause: Text  # for people
    seconds_ago: float
    times: Annotated[int, Field(ge=1)] = 1


class Status(Message):
    name: Name
    version: Name
    deployment: Name = DEFAULT_DEPLOYMENT
    phase: Phase
    state: Text  # the same for people
    history: tuple[PhaseEntered, ...] = Field(default=(), max_length=1000)  # the oldest first
    model_path: Text
    plan: Plan | None
    queued_requests: int
    served_requests: int
    failed_requests: int
    last_error: Text
    last_latency_seconds: float | None
    wire: WireStats
    dropped_messages: int


class AddApp(ClientRequest):
    name: Name
    public_key: PublicKey


class RevokeApp(ClientRequest):
    name: Name


class ListApps(ClientRequest):
    """The answer is `AppList`."""


class AppList(Message):
    names: tuple[Name, ...]
    revoked: tuple[Name, ...]
