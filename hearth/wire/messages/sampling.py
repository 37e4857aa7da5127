"""Settings of sampling: what a client may ask for, and what rank 0 of a plan applies. The names are those of `generate`."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypedDict

from pydantic import Field

from hearth.wire.messages.base import WireModel

Temperature: TypeAlias = Annotated[float, Field(ge=0, le=100)]
TopK: TypeAlias = Annotated[int, Field(ge=0, le=1 << 24)]
TopP: TypeAlias = Annotated[float, Field(gt=0, le=1)]
MinP: TypeAlias = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty: TypeAlias = Annotated[float, Field(gt=0, le=100)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]


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
