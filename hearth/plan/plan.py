"""A plan: the parts of a model that each device holds, and how the devices compute together. Saved as JSON. Pure.

The envelope (`Plan`) is the same for all kinds of model; the body describes how the model is divided.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Generic, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import from_json
from typing_extensions import TypeIs, TypeVar

from hearth.errors import BadPlan
from hearth.plan.graph import GraphModel, GraphSegments
from hearth.plan.migration import plan_from_v1
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import Alternative, PlannedDevice, Prediction, WireFormat, timeout_seconds
from hearth.plan.transformer import TransformerBody
from hearth.validation import first_error

Body = Annotated[TransformerBody | GraphSegments, Field(discriminator="kind")]
# Type checkers use these to distinguish the kinds of model; at run time a plain `Plan` accepts every kind.
Model_co = TypeVar("Model_co", default=ModelSpec | GraphModel, covariant=True)
Body_co = TypeVar("Body_co", default=Body, covariant=True)


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


def migrate(saved: Any) -> Any:
    """Convert the decoded JSON of a version 1 plan to version 2; return anything else unchanged."""
    if not isinstance(saved, dict) or saved.get("version", 1) != 1:
        return saved
    try:
        return plan_from_v1(saved)
    except (AttributeError, TypeError, ValueError):  # not a valid plan: validation reports the field
        return saved


def plan_from_json(text: str | bytes, kind: type[_P] = Plan) -> _P:  # type: ignore[assignment]  # the bound's own parameters
    """Parse a saved plan of version 1 or 2 for this kind of model. Raises BadPlan that names the invalid field."""
    try:
        return kind.model_validate(migrate(from_json(text)))
    except ValidationError as error:
        raise BadPlan(reason=first_error(error, "the plan")) from None
    except ValueError as error:
        raise BadPlan(reason=f"the plan: {error}") from None
