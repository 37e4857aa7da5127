"""State that survives a power cut, in one JSON file: the goals and plans of all deployments, and the newest epoch."""

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
from hearth.plan.plan import Plan, migrate
from hearth.protocol import DEFAULT_DEPLOYMENT

log = logging.getLogger(__name__)


class _Goal(BaseModel):
    """What the user asked to serve: the fields common to all kinds of model."""

    model_config = ConfigDict(frozen=True)

    wire: WireFormat = WireFormat()
    exclude: tuple[str, ...] = ()  # devices, by name or id
    limits: tuple[MemoryLimit, ...] = ()
    # The user gave the plan: do not replace it by a better one while its devices are available.
    keep_plan: bool = False


class TransformerGoal(_Goal):
    """Goal of a transformer, given as a model directory."""

    kind: Literal["transformer"] = "transformer"
    model_dir: str
    strategy: str = "auto"  # a name of `coordinator.plan.registry`
    seq_len: int | None = None
    # Decoders only: tokens per sequence, and the number of such sequences to reserve KV cache for.
    context: int | None = Field(default=None, ge=1, le=1 << 24)
    sequences: int | None = Field(default=None, ge=1, le=4096)
    weights: WeightFormat = "float32"  # format of matrices in the devices' memory
    # Largest relative error that lossy activation formats may cause; None: use the format in `wire`.
    accuracy_budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def path(self) -> str:
        return self.model_dir


class GraphGoal(_Goal):
    """Goal of a model given as a graph of operators."""

    kind: Literal["graph"] = "graph"
    model_file: str  # ONNX
    dims: dict[str, int] = {}  # sizes of dynamic dimensions, by name
    objective: Objective = "latency"
    strategy: str = "auto"
    congestion: bool = True  # whether transfers of one device share its link
    time_limit_seconds: float = Field(default=30.0, gt=0, le=86400)  # for the plan search

    @property
    def path(self) -> str:
        return self.model_file


Goal: TypeAlias = TransformerGoal | GraphGoal


class SavedDeployment(BaseModel):
    """The goal of one deployment and its last plan; None if none was made yet."""

    model_config = ConfigDict(frozen=True)

    goal: Annotated[Goal, Field(discriminator="kind")]
    plan: Plan | None = None

    @field_validator("goal", mode="before")
    @classmethod
    def _upgrade_goal(cls, goal: Any) -> Any:
        """In version 1 only graph goals have the field `kind`."""
        return {"kind": "transformer", **goal} if isinstance(goal, dict) else goal

    @field_validator("plan", mode="before")
    @classmethod
    def _upgrade_plan(cls, plan: Any) -> Any:
        """Upgrade plans of version 1."""
        return migrate(plan)


class SavedState(BaseModel):
    """The content of `serving.json`; `deployments` are by name."""

    model_config = ConfigDict(frozen=True)

    version: Literal[2] = 2
    deployments: dict[str, SavedDeployment] = {}
    last_epoch: int = 0

    @model_validator(mode="before")
    @classmethod
    def _upgrade_version_1(cls, saved: Any) -> Any:
        """Upgrade version 1, which holds one deployment without a name."""
        if not isinstance(saved, dict) or "version" in saved or "deployments" in saved:
            return saved
        deployments = {DEFAULT_DEPLOYMENT: saved} if saved.get("goal") is not None else {}
        return {"deployments": deployments, "last_epoch": saved.get("last_epoch", 0)}


class StateFile:
    """Reads and writes `serving.json`. Writes are atomic."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "serving.json"

    def load(self) -> SavedState:
        """The saved state. An unreadable file is renamed to `serving.unreadable`, and the state is empty."""
        try:
            return SavedState.model_validate_json(self._path.read_text())
        except FileNotFoundError:
            return SavedState()
        except (ValidationError, ValueError, OSError) as error:
            backup = self._path.with_suffix(".unreadable")
            log.warning("%s cannot be read and was renamed to %s: %s", self._path, backup.name, error)
            self._path.replace(backup)
            return SavedState()

    def save(self, name: str, deployment: SavedDeployment, last_epoch: int) -> None:
        """Write one deployment and leave the others unchanged. The saved epoch never decreases."""
        state = self.load()
        deployments = {**state.deployments, name: deployment}
        state = SavedState(deployments=deployments, last_epoch=max(state.last_epoch, last_epoch))
        write_atomically(self._path, state.model_dump_json(indent=1))
