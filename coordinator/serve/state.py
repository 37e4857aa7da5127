"""What must survive a power cut: the model that was served, its plan, and the newest epoch. One JSON file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from coordinator.plan.limits import MemoryLimit
from hearth.files import write_atomically
from hearth.plan.graph import Objective
from hearth.plan.model_spec import WeightFormat
from hearth.plan.parts import WireFormat
from hearth.plan.plan import Plan, migrated
from hearth.plan.transformer import Strategy

log = logging.getLogger(__name__)


class ServingGoal(BaseModel):
    """What the user asked to be served."""

    model_config = ConfigDict(frozen=True)

    model_dir: str
    strategy: Strategy | Literal["auto"] = "auto"
    seq_len: int | None = None
    # Of models that generate: tokens of one sequence, and how many such sequences have room at once.
    context: int | None = Field(default=None, ge=1, le=1 << 24)
    sequences: int | None = Field(default=None, ge=1, le=4096)
    weights: WeightFormat = "float32"  # of matrices in the devices' memory
    wire: WireFormat = WireFormat()
    exclude: tuple[str, ...] = ()
    limits: tuple[MemoryLimit, ...] = ()
    # Relative error that lossy activations may cause; None: they travel as `wire` says.
    accuracy_budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    # The user gave the plan: no better one takes its place while its devices are there.
    keep_plan: bool = False

    @property
    def path(self) -> str:
        return self.model_dir


class GraphGoal(BaseModel):
    """What the user asked to be served, where that is a graph of operators."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["graph"]
    model_file: str  # ONNX
    dims: dict[str, int] = {}  # of dynamic dimensions, by name
    objective: Objective = "latency"
    strategy: str = "auto"
    congestion: bool = True
    time_limit_seconds: float = Field(default=30.0, gt=0, le=86400)  # of the search for a plan
    wire: WireFormat = WireFormat()
    exclude: tuple[str, ...] = ()
    limits: tuple[MemoryLimit, ...] = ()
    keep_plan: bool = False  # the user gave it

    @property
    def path(self) -> str:
        return self.model_file


class SavedState(BaseModel):
    model_config = ConfigDict(frozen=True)

    goal: ServingGoal | GraphGoal | None = None
    plan: Plan | None = None
    last_epoch: int = 0

    @field_validator("plan", mode="before")
    @classmethod
    def _migrated(cls, plan: Any) -> Any:
        """A state file of before the upgrade has a plan of version 1."""
        return migrated(plan)


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

    def save(self, state: SavedState) -> None:
        write_atomically(self._path, state.model_dump_json(indent=1))
