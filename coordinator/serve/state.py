"""What must survive a power cut: the models that were served, their plans, and the newest epoch. One JSON file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coordinator.plan.limits import MemoryLimit
from hearth.files import write_atomically
from hearth.plan.graph import Objective
from hearth.plan.model_spec import WeightFormat
from hearth.plan.parts import WireFormat
from hearth.plan.plan import Plan, migrated
from hearth.protocol import DEFAULT_DEPLOYMENT

log = logging.getLogger(__name__)


class _Goal(BaseModel):
    """What the user asked to be served, as far as it is the same for every kind of model."""

    model_config = ConfigDict(frozen=True)

    wire: WireFormat = WireFormat()
    exclude: tuple[str, ...] = ()  # devices, by name or id
    limits: tuple[MemoryLimit, ...] = ()
    # The user gave the plan: no better one takes its place while its devices are there.
    keep_plan: bool = False


class TransformerGoal(_Goal):
    kind: Literal["transformer"] = "transformer"
    model_dir: str
    strategy: str = "auto"  # a name of `coordinator.plan.registry`
    seq_len: int | None = None
    # Of models that generate: tokens of one sequence, and how many such sequences have room at once.
    context: int | None = Field(default=None, ge=1, le=1 << 24)
    sequences: int | None = Field(default=None, ge=1, le=4096)
    weights: WeightFormat = "float32"  # of matrices in the devices' memory
    # Relative error that lossy activations may cause; None: they travel as `wire` says.
    accuracy_budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def path(self) -> str:
        return self.model_dir


class GraphGoal(_Goal):
    """Of a graph of operators."""

    kind: Literal["graph"] = "graph"
    model_file: str  # ONNX
    dims: dict[str, int] = {}  # of dynamic dimensions, by name
    objective: Objective = "latency"
    strategy: str = "auto"
    congestion: bool = True
    time_limit_seconds: float = Field(default=30.0, gt=0, le=86400)  # of the search for a plan

    @property
    def path(self) -> str:
        return self.model_file


Goal: TypeAlias = TransformerGoal | GraphGoal


class SavedDeployment(BaseModel):
    model_config = ConfigDict(frozen=True)

    goal: Annotated[Goal, Field(discriminator="kind")]
    plan: Plan | None = None

    @field_validator("goal", mode="before")
    @classmethod
    def _of_some_kind(cls, goal: Any) -> Any:
        """In version 1 only goals of graphs named their kind."""
        return {"kind": "transformer", **goal} if isinstance(goal, dict) else goal

    @field_validator("plan", mode="before")
    @classmethod
    def _migrated(cls, plan: Any) -> Any:
        """Version 1 has plans of version 1."""
        return migrated(plan)


class SavedState(BaseModel):
    """`deployments` by name."""

    model_config = ConfigDict(frozen=True)

    version: Literal[2] = 2
    deployments: dict[str, SavedDeployment] = {}
    last_epoch: int = 0

    @model_validator(mode="before")
    @classmethod
    def _of_version_1(cls, saved: Any) -> Any:
        """Version 1 had one deployment, without a name."""
        if not isinstance(saved, dict) or "version" in saved or "deployments" in saved:
            return saved
        deployments = {DEFAULT_DEPLOYMENT: saved} if saved.get("goal") is not None else {}
        return {"deployments": deployments, "last_epoch": saved.get("last_epoch", 0)}


class StateFile:
    """Reads and writes `serving.json`; a write is complete or not there at all."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "serving.json"

    def load(self) -> SavedState:
        try:
            return SavedState.model_validate_json(self._path.read_text())
        except FileNotFoundError:
            return SavedState()
        except (ValidationError, ValueError, OSError) as error:
            aside = self._path.with_suffix(".unreadable")
            log.warning("%s cannot be read and was kept as %s: %s", self._path, aside.name, error)
            self._path.replace(aside)
            return SavedState()

    def save(self, name: str, deployment: SavedDeployment, last_epoch: int) -> None:
        """Write one deployment; others stay as they are."""
        state = self.load()
        deployments = {**state.deployments, name: deployment}
        state = SavedState(deployments=deployments, last_epoch=max(state.last_epoch, last_epoch))
        write_atomically(self._path, state.model_dump_json(indent=1))
