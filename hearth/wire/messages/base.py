"""Base classes of messages, field types, the settings of sampling, and the messages that any peer may send.

`Hello`, the two welcomes and `Failed` have the same form in every protocol version, so that peers of different versions can
detect the mismatch.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict, TypeVar

from pydantic import BaseModel, Field, StringConstraints

from hearth.errors import BadMessage, HearthError, Scope, error_from_wire
from hearth.protocol import DEFAULT_DEPLOYMENT, PROTOCOL_VERSION

Name = Annotated[str, StringConstraints(max_length=256)]
Text = Annotated[str, StringConstraints(max_length=1 << 16)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # SHA-256
PublicKey = Annotated[str, StringConstraints(min_length=40, max_length=40)]  # Z85
Epoch = Annotated[int, Field(ge=0, lt=1 << 63)]
StepNumber = Annotated[int, Field(ge=0, lt=1 << 32)]
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Port = Annotated[int, Field(ge=1, le=65535)]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=1024)]  # as in the ONNX file
Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], Field(max_length=8)]
ElementType: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64",
    "bool",
]  # fmt: skip

ComputeDevice: TypeAlias = Literal["cpu", "cuda"]
WorkerLibrary: TypeAlias = Literal["torch", "onnxruntime"]  # what a worker computes with: Transformers, graphs

# Of a list in a message, unless its field sets a lower limit: a long trace, or the tokens of a long text.
MAX_LIST_ITEMS = 1 << 20

MESSAGE_TYPES: dict[str, type[Message]] = {}  # keyed by tag

_M = TypeVar("_M", bound="Message")
_LARGEST_FLOAT = math.nextafter(math.inf, 0.0)  # of 64 bits
_MAX_DETAIL_CHARACTERS = 4096  # of one field of an error: enough for a sentence with names; logs hold the rest
Temperature: TypeAlias = Annotated[float, Field(ge=0, le=100)]
TopK: TypeAlias = Annotated[int, Field(ge=0, le=1 << 24)]
TopP: TypeAlias = Annotated[float, Field(gt=0, le=1)]
MinP: TypeAlias = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty: TypeAlias = Annotated[float, Field(gt=0, le=100)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]


class WireModel(BaseModel, frozen=True, extra="ignore", allow_inf_nan=False):
    """A part of a message: frozen, validated, unknown fields ignored."""


class Message(WireModel):
    """Base class of messages. The tag on the wire is the class name in snake case: `find_missing` for `FindMissing`.

    `any_version` marks messages that peers of another protocol version can read.
    """

    tag: ClassVar[str]
    any_version: ClassVar[bool] = False

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        """Register a message type, unless it is `abstract`: a base class with fields that several messages share."""
        super().__init_subclass__(**kwargs)
        if not abstract:
            cls.tag = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
            MESSAGE_TYPES[cls.tag] = cls


def expect_message(message: Message, kind: type[_M], sender: str) -> _M:
    """Return the message if it is of this type. Raises BadMessage, naming the sender, if not."""
    if not isinstance(message, kind):
        raise BadMessage(reason=f"{sender} answered with {type(message).__name__}")
    return message


class Command(Message, abstract=True):
    """A request by the coordinator that holds the agent's lease."""

    holder: Name


class DeploymentCommand(Command, abstract=True):
    """A command that concerns one deployment."""

    deployment: Name = DEFAULT_DEPLOYMENT


class PlanCommand(DeploymentCommand, abstract=True):
    """A request to the worker that runs one plan of a deployment."""

    epoch: Epoch


class Hello(Message):
    """First message of a connection. The answer is `AgentWelcome` or `CoordinatorWelcome`."""

    any_version: ClassVar[bool] = True
    protocol: int = PROTOCOL_VERSION
    name: Name


class Done(Message):
    """The answer to a request that returns nothing."""


class Failed(Message):
    """The answer to a request that raised a `HearthError`."""

    any_version: ClassVar[bool] = True
    code: Name
    details: dict[Name, str | int | float | bool | None] = Field(max_length=64)
    scope: Scope = "plan"

    @classmethod
    def of(cls, error: HearthError) -> Failed:
        """The message for an error. It can always be encoded: values that no message may hold are replaced."""
        details = {name: _encodable(value) for name, value in error.details().items()}
        return cls(code=error.code, details=details, scope=error.scope)

    def error(self) -> HearthError:
        """The error, rebuilt as its class; an InternalError if this version does not know it."""
        return error_from_wire(self.code, self.details, self.scope)


def _encodable(value: Any) -> str | int | float | bool | None:
    """The value of an error's field as a message may hold it: finite, of 64 bits, valid UTF-8, of limited length."""
    if isinstance(value, float):
        return 0.0 if math.isnan(value) else min(max(value, -_LARGEST_FLOAT), _LARGEST_FLOAT)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return min(max(value, -(1 << 63)), (1 << 64) - 1)
    return str(value)[:_MAX_DETAIL_CHARACTERS].encode(errors="replace").decode()


class Cancel(Message):
    """Cancel this caller's request with this id. It is not answered."""

    request: Annotated[bytes, Field(min_length=8, max_length=8)]
    final: bool = False  # nobody will ask for the rest of the answer, so nothing of it needs to be kept


class Sampling(WireModel):
    """Sampling settings. With temperature 0 decoding is greedy, and of the others only the penalties apply.

    Applied in the order of `transformers`: repetition penalty, then presence and frequency penalty, temperature, top-k, top-p,
    min-p.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0  # sample from the k most likely tokens; 0 disables
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    # Of the answer's tokens alone, as in OpenAI's API: subtracted once, and as often as the token occurs.
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Seed = 0


class SamplingChoice(WireModel):
    """A client's sampling settings. A setting that is None comes from the model's generation_config.json, else `Sampling`."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None  # None: a random seed


class SamplingSettings(TypedDict, total=False):
    """A `SamplingChoice` as keyword arguments."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
