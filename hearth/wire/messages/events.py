"""Events that a coordinator records, and the messages with which a client reads them.

An event states what has happened, in the past tense. All are one union, told apart by `kind`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from hearth.wire.messages.agent import DeviceSampled
from hearth.wire.messages.base import Epoch, Message, Name, Text, WireModel
from hearth.wire.messages.client import ClientRequest, DeploymentPhase
from hearth.wire.messages.worker import FinishReason

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]

Operation: TypeAlias = Literal["generate", "embed", "hidden_states", "infer"]
# refused: the fault is in the request, or the queue was full; cancelled: its client did not wait for the end.
RequestOutcome: TypeAlias = Literal["served", "cancelled", "refused", "failed"]
DeviceState: TypeAlias = Literal["alive", "suspect", "dead", "busy", "refused"]


class RequestEnded(WireModel):
    """A request to a model has ended. Times are None where they are not known, for instance of a request that failed."""

    kind: Literal["request_ended"] = "request_ended"
    request_id: Name = ""
    app: Name = ""  # whose key has sent it; empty: a home or admin key
    deployment: Name
    model: Name
    operation: Operation
    outcome: RequestOutcome
    devices: tuple[Name, ...] = Field(default=(), max_length=256)  # of the plan that answered last
    seconds: Seconds  # from its arrival to its end
    queued_seconds: Seconds | None = None
    first_token_seconds: Seconds | None = None  # from the end of the queue
    decode_seconds: Seconds | None = None  # of all later tokens
    num_prompt_tokens: Count = 0
    num_cached_tokens: Count = 0  # of these, found in the KV cache
    num_tokens: Count = 0  # of the answer; after a broken connection only those of the rest
    tokens_per_second: Seconds | None = None  # of decoding; of texts to embed, in all
    finish_reason: FinishReason | None = None
    error: Name = ""  # its code
    message: Text = ""  # the error as a sentence
    advice: Text = ""  # what to do next


class DeviceChanged(WireModel):
    """A device has come, is silent, is lost, or cannot be used. `reason`: why, for users."""

    kind: Literal["device_changed"] = "device_changed"
    device_id: Name
    name: Name
    state: DeviceState
    reason: Text = ""


class LinkRated(WireModel):
    """The link from one device to another was measured, or read from the cache of measurements."""

    kind: Literal["link_rated"] = "link_rated"
    source: Name  # device ids
    target: Name
    bytes_per_second: Annotated[float, Field(gt=0)]
    round_trip_seconds: Seconds


class PlanChanged(WireModel):
    """A deployment serves by another plan. `reason`: "start", "better_plan", or the code of the error that ended the last."""

    kind: Literal["plan_changed"] = "plan_changed"
    deployment: Name
    model: Name
    strategy: Name
    planner: Name
    epoch: Epoch
    devices: tuple[Name, ...] = Field(max_length=256)
    predicted_seconds: Seconds
    reason: Name


class PhaseChanged(WireModel):
    """A deployment's life cycle has entered a phase. `cause`: why, for users."""

    kind: Literal["phase_changed"] = "phase_changed"
    deployment: Name
    phase: DeploymentPhase
    cause: Text


class CoordinatorStarted(WireModel):
    """A coordinator leads from now on. Counters of requests begin at zero."""

    kind: Literal["coordinator_started"] = "coordinator_started"
    name: Name
    version: Name


Event: TypeAlias = (
    RequestEnded | DeviceSampled | DeviceChanged | LinkRated | PlanChanged | PhaseChanged | CoordinatorStarted
)
EVENT_KINDS: tuple[str, ...] = tuple(kind.model_fields["kind"].default for kind in get_args(Event))


class RecordedEvent(WireModel):
    """An event with its number in the stream and the coordinator's clock. Numbers grow, and some are left out."""

    number: Count
    unix_seconds: float
    event: Annotated[Event, Field(discriminator="kind")]


MAX_EVENTS = 256  # of one message


class WatchEvents(ClientRequest):
    """Ask for the events after a cursor. The answer is a stream of `EventsRecorded`, the first of them at once.

    `since`: empty for all that are kept, "now" for later ones, or the cursor of an `EventsRecorded`. `kinds`: empty for all.
    Without `follow`, the stream ends with `Done` after the events that are there. `is_copy`: for a standby, which is no reader:
    devices are sampled no more often for it.
    """

    since: Name = ""
    kinds: tuple[Name, ...] = Field(default=(), max_length=16)
    follow: bool = True
    is_copy: bool = False


class EventsRecorded(Message):
    """The next events, oldest first; none if nothing has happened for a while.

    `cursor`: to go on after them, also at another time. `has_gap`: events before these were dropped, because too many happened
    meanwhile, or another coordinator has recorded them.
    """

    events: tuple[RecordedEvent, ...] = Field(max_length=MAX_EVENTS)
    cursor: Name
    has_gap: bool = False


class GetMetrics(ClientRequest):
    """Ask for all metrics in Prometheus's text format. The answer is `Metrics`."""


class Metrics(Message):
    """The answer to `GetMetrics`. Payload: one frame, the text."""

    content_type: Name
