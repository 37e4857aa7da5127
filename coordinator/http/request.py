"""One HTTP request: the fields of its body that both APIs share, what its handler gets, and the two forms of answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coordinator.http.answer_stream import Receive
from coordinator.http.failures import Failure, unknown_model, unsupported
from coordinator.http.homes import Asked, Served, wait_until_ready
from hearth.client.answers import AsyncGeneration
from hearth.client.home import AsyncHome
from hearth.errors import NotServing
from hearth.wire import messages as wire

_READY_SECONDS = 5.0  # for a home that is not ready now: one that has lost a device plans again within a second or two
_ANSWER_SECONDS = 3600.0  # longest answer; a client that goes away ends it

_B = TypeVar("_B", bound="Body")

Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: () if given is None else (given,) if isinstance(given, str) else given),
]
NumTop = Annotated[int, Field(ge=0, le=wire.MAX_TOP_LOG_PROBS)]


class Body(BaseModel):
    """A request's JSON object. Unknown fields are refused, since they might change the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Fields that clients send and that change no answer here.
    ignored: ClassVar[frozenset[str]] = frozenset()
    # Fields that are not supported, with the values that ask for nothing.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls: type[_B], given: object) -> _B:
        """Validate a request. Raises Failure that names the field."""
        if not isinstance(given, dict):
            raise Failure(400, "The body must be a JSON object.")
        fields = {name: value for name, value in given.items() if name not in cls.ignored}
        for name, values in cls.neutral.items():
            if name in fields and (value := fields.pop(name)) is not None and value not in values:
                raise unsupported(name)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _failure(error) from None


def _failure(error: ValidationError) -> Failure:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unsupported(name)
    return Failure(400, f"The field '{name}' is not valid: {first['msg']}.", param=name)


class TextPart(BaseModel):
    """A part of a message's content. Only texts are supported."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str = ""


class Sampled(Body):
    """Sampling settings and stop texts, named as in OpenAI's API; both APIs allow a few values that `generate` does not."""

    temperature: wire.Temperature | None = None
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda number: max(number, 0))] | None = None  # -1: all
    top_p: wire.TopP | None = None
    min_p: wire.MinP | None = None
    repetition_penalty: wire.RepetitionPenalty | None = None
    presence_penalty: wire.Penalty | None = None
    frequency_penalty: wire.Penalty | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[Texts, Field(max_length=16)] = ()

    def generate(self, home: AsyncHome, max_tokens: int | None, number: int = 0, **arguments: Any) -> AsyncGeneration:
        """Begin the answer with this number to a request; `arguments` are others of `AsyncHome.generate`."""
        sampling: dict[str, Any] = {name: getattr(self, name, None) for name in wire.SamplingChoice.model_fields}
        if self.seed is not None:
            sampling["seed"] = (self.seed + number) % (1 << 63)
        return home.generate(
            **arguments, **sampling, max_tokens=max_tokens, stop=self.stop, timeout_seconds=_ANSWER_SECONDS
        )


class EventStream(NamedTuple):
    """An answer in pieces. `events` raises HearthError or Failure; `failed` is the last piece after one of them."""

    media_type: str
    events: AsyncGenerator[bytes, None]
    failed: Callable[[Failure], bytes]


class Call(NamedTuple):
    """One request: the home as its token sees it, its body as JSON, and the variables of its path."""

    served: Served
    receive: Receive
    body: object
    path: Mapping[str, str]

    async def ready(self, model: str) -> Asked:
        """The model of this name, once it is ready. Raises Failure for one that is not served, NotServing."""
        served = self.served
        if not served.models:
            raise NotServing(state="no model is served")
        if (found := served.named(model)) is None:
            raise unknown_model(model, served.models)
        return await wait_until_ready(served.home, found, _READY_SECONDS)


Answer = dict[str, Any] | EventStream
Handler = Callable[[Call], Awaitable[Answer]]
