"""Fields of requests: what both APIs share, and how fields that are not supported are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coordinator.http.failures import Failure, unsupported

_B = TypeVar("_B", bound="Body")

Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: () if given is None else (given,) if isinstance(given, str) else given),
]


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
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unsupported(name)
    return Failure(400, f"The field '{name}' is not valid: {first['msg']}.", param=name)


class TextPart(BaseModel):
    """A part of a message's content. Only texts are supported."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str = ""


Temperature = Annotated[float, Field(ge=0, le=100)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


def seed_of(seed: int | None, number: int = 0) -> int | None:
    """The seed of the answer with this number: the home's seeds have 63 bits."""
    return None if seed is None else (seed + number) % (1 << 63)
