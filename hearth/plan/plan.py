"""A plan: the parts of a model that each device holds, and how the devices compute together. Saved as JSON. Pure.

The envelope (`Plan`) is the same for all kinds of model; the body describes how the model is divided. A decoder's plan may
contain a draft model, a small decoder that the first rank runs alone, to guess tokens.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Generic, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import from_json
from typing_extensions import TypeIs, TypeVar

from hearth.errors import BadPlan
from hearth.plan.common import Alternative, PlannedDevice, Prediction, WireFormat, timeout_seconds
from hearth.plan.graph import GraphModel, GraphSegments
from hearth.plan.model_spec import ModelSpec
from hearth.plan.transformer import GenerationLimits, TensorParallel, TransformerBody
from hearth.validation import first_error

Body = Annotated[TransformerBody | GraphSegments, Field(discriminator="kind")]
# Type checkers use these to distinguish the kinds of model; at run time a plain `Plan` accepts every kind.
Model_co = TypeVar("Model_co", default=ModelSpec | GraphModel, covariant=True)
Body_co = TypeVar("Body_co", default=Body, covariant=True)

DRAFT_RANK = 0  # it schedules the steps, so guesses need no message


class Plan(BaseModel, Generic[Model_co, Body_co], frozen=True, extra="forbid"):
    """A plan for one model. Ranks are indices into `devices`.

    `epoch` numbers deployments; messages of another epoch are dropped and counted.
    """

    version: Literal[2] = 2
    epoch: int = Field(default=0, ge=0, lt=1 << 63)
    model: Model_co
    planner: str
    devices: tuple[PlannedDevice, ...] = Field(min_length=1, max_length=256)
    wire: WireFormat = WireFormat()
    predicted: Prediction
    alternatives: tuple[Alternative, ...] = Field(default=(), max_length=256)
    body: Body_co

    @property
    def num_ranks(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def with_epoch(self, epoch: int) -> Plan[Model_co, Body_co]:
        """A copy of the plan with another epoch."""
        return self.model_copy(update={"epoch": epoch})

    def wire_on(self: Plan, source: int, target: int) -> WireFormat:
        """The wire format of activations from one rank to another."""
        return self.wire.model_copy(update={"values": self.body.values_on(source, target, self.wire.values)})

    def peer_timeout_seconds(self: Plan, num_rows: int = 0) -> float:
        """Timeout in seconds of a wait for a peer in one request, or in a transformer step of `num_rows` rows."""
        return timeout_seconds(self.predicted.latency_seconds * self.body.duration_ratio(num_rows))

    @model_validator(mode="after")
    def _consistent(self: Plan) -> Plan:
        if len({device.device_id for device in self.devices}) != self.num_ranks:
            raise ValueError("a device occurs twice in the plan")
        self.body.check(self.model, self.num_ranks)
        return self


TransformerPlan = Plan[ModelSpec, TransformerBody]
GraphPlan = Plan[GraphModel, GraphSegments]


_P = TypeVar("_P", bound=Plan)


def is_graph_plan(plan: Plan | None) -> TypeIs[GraphPlan]:
    """Whether the plan is for an ONNX graph."""
    return plan is not None and isinstance(plan.body, GraphSegments)


def is_transformer_plan(plan: Plan | None) -> TypeIs[TransformerPlan]:
    """Whether the plan is for a transformer."""
    return plan is not None and isinstance(plan.body, TransformerBody)


def plan_hash(plan: Plan) -> str:
    """SHA-256 of a plan with its epoch: two coordinators that name the same hash mean the same deployment."""
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def plan_from_json(text: str | bytes, kind: type[_P] = Plan) -> _P:  # type: ignore[assignment]  # the bound's own parameters
    """Parse a saved plan for this kind of model. Raises BadPlan that names the invalid field."""
    try:
        return kind.model_validate(from_json(text))
    except ValidationError as error:
        raise BadPlan(reason=first_error(error, "the plan")) from None
    except ValueError as error:
        raise BadPlan(reason=f"the plan: {error}") from None


def draft_body(draft: ModelSpec, limits: GenerationLimits) -> TensorParallel:
    """The whole draft model on one device, with room for the tokens of the plan's sequences."""
    return TensorParallel(
        strategy="local",
        seq_len=limits.prefill_rows,
        heads=(draft.num_heads,),
        columns=(draft.ffn_size,),
        row_weights=(1.0,),
        vocabulary=(draft.vocab_size,),
        generation=limits.model_copy(update={"draft": None, "kv_copies": False}),
    )


def draft_plan(plan: TransformerPlan) -> TransformerPlan | None:
    """The plan of the draft model, for its one device; None if the plan has no draft model."""
    limits = plan.body.generation
    if limits is None or limits.draft is None:
        return None
    nothing = Prediction(latency_seconds=0, compute_seconds=0, transfer_seconds=0, bottleneck_seconds=0)
    return Plan(
        epoch=plan.epoch,
        model=limits.draft,
        planner="draft",
        devices=(plan.devices[DRAFT_RANK],),
        predicted=nothing,
        body=draft_body(limits.draft, limits),
    )
