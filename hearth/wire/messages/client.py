"""Messages to the client port: between a client and the coordinator, and between a leading coordinator and its standby."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, StringConstraints

from hearth.plan.plan import Plan
from hearth.plan.profile import Link
from hearth.protocol import DEFAULT_DEPLOYMENT, MAX_PAYLOAD_FRAMES, PROTOCOL_VERSION
from hearth.wire.messages.agent import Configuration, Telemetry, WorkerStatus
from hearth.wire.messages.base import (
    MAX_LIST_ITEMS,
    Bytes,
    ElementType,
    Message,
    Name,
    PublicKey,
    SamplingChoice,
    Shape,
    TensorName,
    Text,
    WireModel,
)
from hearth.wire.messages.worker import MAX_TOP_LOG_PROBS, FinishReason, TokenLogProbs, TraceEvent, WireStats

_MAX_PATH_PARTS = 16  # the weights of an ONNX file may lie in folders below it


class ClientRequest(Message, abstract=True):
    """A request by a client. `request_id` is unique; a client that repeats a request uses the same id."""

    request_id: Name = ""  # empty: the request will not be repeated
    deployment: Name | None = None  # name of a deployment or of its model; None: the default for this type of request
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0  # from the arrival of the request


class CoordinatorWelcome(Message):
    """The coordinator's answer to `Hello`."""

    any_version: ClassVar[bool] = True
    protocol: int = PROTOCOL_VERSION
    version: Name
    name: Name


class ModelRequest(ClientRequest, abstract=True):
    """A request to the served model. Apps may send only these and GetReadiness."""


AnswerKind: TypeAlias = Literal["", "text", "vectors", "arrays"]  # what a model answers with; empty: there is none


class GetReadiness(ClientRequest):
    """Ask whether a model is ready. The answer is `Readiness`."""


class Readiness(Message):
    """The answer to `GetReadiness`. `state` is a sentence for users, `model` the name of the model."""

    deployment: Name = DEFAULT_DEPLOYMENT
    ready: bool
    state: Text
    model: Name
    answers: AnswerKind = ""
    takes_tools: bool = False  # whether its chat template has calls of tools that the coordinator reads
    context_tokens: Annotated[int, Field(ge=0)] = 0  # of a prompt and its answer, or of a text to embed; 0: not known


class ListModels(ClientRequest):
    """Ask which models are served. The answer is `ModelList`."""


DeploymentPhase: TypeAlias = Literal[
    "idle", "adopting", "settling", "profiling", "planning", "pushing", "loading", "warming", "serving", "draining", "failed",
    "unloaded",
]  # fmt: skip


class ServedModel(WireModel):
    """One deployment; the first of each kind is the default for requests that name no model. Apps do not see the devices."""

    deployment: Name
    model: Name  # the name of the model
    ready: bool  # whether it answers requests: at once, or once it is loaded for them
    phase: DeploymentPhase
    state: Text  # for users
    answers: AnswerKind = ""
    takes_tools: bool = False  # as in `Readiness`
    context_tokens: Annotated[int, Field(ge=0)] = 0  # as in `Readiness`
    has_ended: bool = False  # it cannot be served, whatever devices come
    pinned: bool = False  # whether others make room for it
    keep_alive_seconds: Annotated[float, Field(ge=0)] | None = None  # it is unloaded after that long without a request
    missing_bytes: Annotated[int, Field(ge=0)] = 0  # by which it does not fit; 0: it fits, or that is not known
    devices: tuple[Name, ...] = Field(default=(), max_length=4096)  # of its plan, by rank
    memory_bytes: Annotated[int, Field(ge=0)] = 0  # of its plan, over all devices
    sent_bytes_per_second: Annotated[float, Field(ge=0)] = 0.0  # between its devices, over the last half minute
    waiting_requests: Annotated[int, Field(ge=0)] = 0
    running_requests: Annotated[int, Field(ge=0)] = 0


class ModelList(Message):
    """The answer to `ListModels`, oldest first."""

    models: tuple[ServedModel, ...] = Field(max_length=256)


# ---- transformers -------------------------------------------------------------------------------------------------


class Embed(ModelRequest):
    """Compute normalised sentence embeddings. The answer is `Vectors` with payload [N,H] float32."""

    texts: tuple[Text, ...] = Field(min_length=1, max_length=4096, fail_fast=True)
    trace: bool = False


class GetHiddenStates(ModelRequest):
    """Compute the last hidden states of one sequence. Payload: token ids [T] int32. The answer is `Vectors`, [T,H] float32."""


class DeviceTrace(WireModel):
    """The events of one rank in one step. Several traces of one rank belong to successive steps."""

    device: Name
    rank: Annotated[int, Field(ge=0, lt=1 << 16)]
    events: tuple[TraceEvent, ...] = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)


class Vectors(Message):
    """The result of `Embed` or `GetHiddenStates`. Payload: one float32 array."""

    latency_seconds: float  # from the start of the step to its last row; excludes the time in the queue
    num_tokens: int
    traces: tuple[DeviceTrace, ...] = Field(default=(), max_length=MAX_LIST_ITEMS, fail_fast=True)


class ToolCall(WireModel):
    """A model's call of a tool. `arguments` is a JSON object."""

    id: Name
    name: Name
    arguments: Text


class ChatMessage(WireModel):
    """One message of a chat; `role` is a role of the chat template, such as "user".

    An assistant's message may have called tools; the result of a call is a message of the role "tool" with its id.
    """

    role: Name
    content: Text
    reasoning: Text = ""
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=128)
    tool_call_id: Name = ""
    name: Name = ""  # of the tool that answers


class AnswerConstraint(WireModel):
    """What an answer must look like: a JSON schema, a regular expression, or a grammar in llguidance's form of Lark."""

    kind: Literal["schema", "regex", "grammar"]
    text: Text


MAX_TEMPLATE_OPTIONS = 16  # of a chat template


class Generate(ModelRequest):
    """Continue a prompt: a text, a chat, or token ids (payload [T] int32; exactly one of the three).

    The answer is a stream of `TextGenerated` that ends with `TextEnded`.
    """

    prompt: Text | None = None
    messages: tuple[ChatMessage, ...] = Field(default=(), max_length=4096, fail_fast=True)
    sampling: SamplingChoice = SamplingChoice()
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None  # None: from generation_config.json, else 512
    stop: tuple[Text, ...] = Field(default=(), max_length=16)  # texts that end the answer and are not part of it
    # Tools that the model may call: JSON objects as in OpenAI's API, which the chat template gets.
    tools: tuple[Text, ...] = Field(default=(), max_length=256)
    template_options: dict[Name, bool | int | float | Text] = Field(default={}, max_length=MAX_TEMPLATE_OPTIONS)
    takes_parts: bool = False  # whether reasoning and calls of tools are parts of their own; with tools they always are
    constraint: AnswerConstraint | None = None
    called_tools: tuple[Name, ...] = Field(default=(), max_length=256)  # the answer must call one; empty: it is free to
    parallel_calls: bool = True  # whether it may call several
    # The number of most likely tokens to report for each token of the answer; None: no log-probabilities.
    top_log_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None
    # The tokens of this answer that arrived before the connection broke; the answer continues after them.
    generated: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = Field(default=(), max_length=1 << 20)
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0


class TextGenerated(Message):
    """New tokens and the text that they add; empty while a character, or a possible stop text, is incomplete."""

    token_ids: tuple[int, ...] = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)
    text: Text
    reasoning: Text = ""
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=128)  # that are complete now
    log_probs: tuple[TokenLogProbs, ...] = Field(default=(), max_length=MAX_LIST_ITEMS, fail_fast=True)  # of each token


class TextEnded(Message):
    """The end of an answer. `text`, `reasoning` and `tool_calls` are what was still held back.

    `queued_seconds` is the time in the queue, `first_token_seconds` the time from there to the first token, and
    `decode_seconds` the time for all later tokens.
    """

    text: Text
    reasoning: Text = ""
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=128)
    reason: FinishReason
    num_prompt_tokens: Annotated[int, Field(ge=0)]
    num_tokens: Annotated[int, Field(ge=0)]
    queued_seconds: Annotated[float, Field(ge=0)]
    first_token_seconds: Annotated[float, Field(ge=0)]
    decode_seconds: Annotated[float, Field(ge=0)]
    num_cached_tokens: Annotated[int, Field(ge=0)] = 0  # of the prompt's, found in the KV cache of earlier requests
    num_drafted_tokens: Annotated[int, Field(ge=0)] = 0  # that were guessed before they were computed
    num_accepted_tokens: Annotated[int, Field(ge=0)] = 0  # of these, tokens of the answer


# ---- graphs -------------------------------------------------------------------------------------------------------


class GetModelInfo(ModelRequest):
    """Ask for the inputs and outputs of the served graph. The answer is `ModelInfo`."""


class ArrayInfo(WireModel):
    """Name, dtype and shape of one of the graph's inputs or outputs."""

    name: TensorName
    dtype: ElementType
    shape: Shape


class ModelInfo(Message):
    """The inputs and outputs of the served graph."""

    name: Name
    inputs: tuple[ArrayInfo, ...] = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)
    outputs: tuple[ArrayInfo, ...] = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)


class Infer(ModelRequest):
    """Run the served graph once. Payload: all inputs in the order of `names`, two frames each. The answer is `Inferred`."""

    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    trace: bool = False


class Inferred(Message):
    """The result of `Infer`. Payload: the outputs in the order of `names`, two frames each."""

    names: tuple[TensorName, ...] = Field(max_length=MAX_PAYLOAD_FRAMES // 2)
    latency_seconds: float  # from the start of the request to its last output; excludes the time in the queue
    traces: tuple[DeviceTrace, ...] = Field(default=(), max_length=MAX_LIST_ITEMS, fail_fast=True)


# ---- with an admin key --------------------------------------------------------------------------------------------


class ListDevices(ClientRequest):
    """Ask for the devices and links. The answer is `DeviceList`."""


class DeviceInfo(WireModel):
    """A device as seen by the coordinator. An agent that refused `Hello` has an empty id, and its address as its name."""

    device_id: Name
    name: Name
    host: Name
    state: Literal["alive", "suspect", "dead", "busy", "refused"]
    reason: Text = ""
    workers: tuple[WorkerStatus, ...] = Field(default=(), max_length=256)
    num_abandoned: Annotated[int, Field(ge=0)] = 0  # as in `AgentState`
    num_hung: Annotated[int, Field(ge=0)] = 0  # as in `AgentState`
    telemetry: Telemetry | None

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory of this device's workers, summed."""
        return sum(worker.peak_bytes for worker in self.workers)


class DeviceList(Message):
    """The answer to `ListDevices`: the devices, and the links that were measured."""

    devices: tuple[DeviceInfo, ...] = Field(max_length=4096, fail_fast=True)
    links: tuple[Link, ...] = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)


class GetStatus(ClientRequest):
    """Ask for the coordinator's state. The answer is `Status`."""


class PhaseEntered(WireModel):
    """One transition of a deployment's life cycle. A repeated failure counts as one transition, in `times`."""

    phase: DeploymentPhase
    cause: Text  # for users
    seconds_ago: float
    times: Annotated[int, Field(ge=1)] = 1


class PreparedLoss(WireModel):
    """What is prepared for the loss of one device of the plan."""

    device: Name
    is_prepared: bool
    reason: Text = ""  # why the others cannot serve the model; empty if they can, or if that is not known yet
    spare_bytes: Annotated[int, Field(ge=0)] = 0  # of weights that only the plan without this device needs, in all
    missing_bytes: Annotated[int, Field(ge=0)] = 0  # of weights that the others have not received yet
    pause_seconds: float | None = None  # predicted, from the loss until the plan without the device serves


class KeepLoaded(ClientRequest):
    """Unload the model once it has been idle for that long, instead of what it is served with. The answer is `Done`, at once.

    Below 0: keep it loaded. The next request for the model takes this back. It has no effect on a pinned model.
    """

    seconds: Annotated[float, Field(ge=-1, allow_inf_nan=False)]


class Status(Message):
    """The answer to `GetStatus`: the coordinator's state, and counters since its start."""

    name: Name
    version: Name
    deployment: Name = DEFAULT_DEPLOYMENT
    phase: DeploymentPhase
    state: Text  # the phase as a sentence for users
    history: tuple[PhaseEntered, ...] = Field(default=(), max_length=1000)  # oldest first
    model_path: Text
    plan: Plan | None
    queued_requests: int
    served_requests: int
    failed_requests: int
    last_error: Text
    last_latency_seconds: float | None
    wire: WireStats
    dropped_messages: int
    refused_requests: int = 0
    refused_connections: int = 0
    # Of accesses to a disk that does not answer.
    hung_files: tuple[Text, ...] = Field(default=(), max_length=MAX_LIST_ITEMS)
    redundancy: Text = ""  # whether the deployment survives the loss of any one device, as a sentence for users
    losses: tuple[PreparedLoss, ...] = Field(default=(), max_length=4096)  # of each device of the plan, while it serves
    num_prompt_tokens: int = 0  # of the prompts that were answered
    num_cached_tokens: int = 0  # of these, found in the KV cache
    num_drafted_tokens: int = 0  # of answers, that were guessed before they were computed
    num_accepted_tokens: int = 0  # of these, tokens of the answers


class ServeModel(ClientRequest):
    """Serve one more model. The answer is `ModelChanged`, before the model is ready.

    `goal`: what to serve, as JSON in the form of `serving.json`; its files are on the coordinator's computer. `name`: of the
    deployment; empty: that of the model. `plan`: to be used, instead of one that is made.
    """

    goal: Text
    name: Name = ""
    plan: Plan | None = None


class StopModel(ClientRequest):
    """Serve a model no longer, once its running requests have finished. The answer is `ModelChanged`, afterwards."""

    name: Name


class ModelChanged(Message):
    """The answer to a change of the models that are served."""

    deployment: Name


# What an app may do: ask models; read the metrics; or ask models and read events and metrics.
AppRole: TypeAlias = Literal["app", "metrics", "observer"]


class AddApp(ClientRequest):
    """Authorise an app's public key. The answer is `KeysChanged`."""

    name: Name
    public_key: PublicKey
    role: AppRole = "app"


class RevokeApp(ClientRequest):
    """Revoke an app's key. The answer is `KeysChanged`."""

    name: Name


class AddDevice(ClientRequest):
    """Admit an agent with a key of its own. The answer is `KeysChanged`."""

    name: Name
    public_key: PublicKey


class RevokeDevice(ClientRequest):
    """Shut out the agent with this key, at once. The answer is `KeysChanged`."""

    name: Name


class KeysChanged(Message):
    """The answer to a change of keys, which is in force. `warning`: why it may be lost; empty if it lasts."""

    warning: Text = ""


class ListApps(ClientRequest):
    """Ask for the admitted and the revoked apps. The answer is `AppList`."""


class AppList(Message):
    """The answer to `ListApps`: the names of admitted and of revoked apps."""

    names: tuple[Name, ...] = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)
    revoked: tuple[Name, ...] = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)


def is_replica_path(path: str) -> bool:
    """Whether a path stays inside the folder that it is relative to. The first part is a plain name, none is hidden there."""
    parts = path.split("/")
    return (
        len(parts) <= _MAX_PATH_PARTS
        and path.isprintable()
        and parts[0][:1].isalnum()
        and all(part not in ("", ".", "..") for part in parts)
    )


def _checked(path: str) -> str:
    if not is_replica_path(path):
        raise ValueError("the path leaves the folder of the copy, or is not printable")
    return path


# Path of a file of the leader's state, relative to the standby's copy.
ReplicaPath = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_checked)]

# Number that a leader gives to what it has sent to one standby; 0: none.
Receipt = Annotated[int, Field(ge=0, lt=1 << 63)]

MAX_KEYS = 1000  # of one list
# Public keys, each with the name of its app or device.
NamedKeys = Annotated[tuple[tuple[PublicKey, Name], ...], Field(max_length=MAX_KEYS)]


class KnownKeys(WireModel):
    """The keys of apps, or of devices, that a coordinator knows."""

    admitted: NamedKeys = ()
    revoked: NamedKeys = ()
    roles: NamedKeys = ()  # of admitted keys of apps with another role than "app": each with its role


class Follow(Message):
    """Ask to be the standby of this coordinator. The answer is a stream of `ReplicaPart` and `LeaderAlive`, without an end.

    With `takes_over`, accept the place of a leader that leaves; the answer is `Done`. With `confirmed`, say that all that came
    before a `LeaderAlive` with this receipt is stored; the answer is `Done`. `confirms`: this standby does so.

    `apps` and `devices`: the keys that this standby knows; it may have led while the present leader was cut off.
    """

    name: Name
    takes_over: bool = False
    confirms: bool = False
    confirmed: Receipt = 0
    apps: KnownKeys = KnownKeys()
    devices: KnownKeys = KnownKeys()


class ReplicaPart(Message):
    """A part of a file of the leader's state. Payload: its bytes, one frame. Bytes that no part holds are zero."""

    path: ReplicaPath
    num_bytes: Bytes  # of the whole file
    offset: Bytes
    is_last: bool  # the file is complete with this part


class LeaderAlive(Message):
    """Sent by the leader at short intervals; `is_complete`: all files have been sent since the last change.

    `is_leaving`: it stops, and leaves its devices to the standby that accepts (`Follow.takes_over`). `receipt`: the standby
    confirms it once it has stored all that came before (`Follow.confirmed`).
    """

    name: Name
    is_complete: bool
    configuration: Configuration | None
    is_leaving: bool = False
    receipt: Receipt = 0
