"""What a goal comes to: its model read once, the devices that it may use, and what a planner is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coordinator.drift import with_held_memory
from coordinator.limits import Named, capped, memory_caps
from coordinator.planners import PlanRequest
from coordinator.sentences import SentenceTokenizer
from coordinator.state import ServingGoal
from hearth.model.families import read_spec
from hearth.model.sentence import read_pooling
from hearth.model.spec import ModelSpec
from hearth.plan import Plan, Values
from hearth.profile import ClusterProfile

DEFAULT_SEQ_LEN = 512  # planned for when the user names no length and the model allows it

_D = TypeVar("_D", bound=Named)


@dataclass(frozen=True)
class Model:
    """What is read once from the model's directory."""

    directory: Path
    spec: ModelSpec
    seq_len: int  # a step holds at most this many rows, and a text at most this many tokens
    tokenizer: SentenceTokenizer | None  # without one, token ids still work


def open_model(goal: ServingGoal) -> Model:
    """Read config and tokenizer. Raises BadCheckpoint or UnsupportedArchitecture."""
    directory = Path(goal.model_dir)
    spec = read_spec(directory)
    read_pooling(directory)
    seq_len = min(goal.seq_len or DEFAULT_SEQ_LEN, spec.max_positions)
    has_tokenizer = (directory / "tokenizer.json").exists()
    return Model(directory, spec, seq_len, SentenceTokenizer(directory) if has_tokenizer else None)


def allowed(goal: ServingGoal, devices: Iterable[_D]) -> list[_D]:
    """The devices that the user does not exclude."""
    excluded = set(goal.exclude)
    return [device for device in devices if not {device.name, device.device_id} & excluded]


def plan_request(
    goal: ServingGoal,
    model: Model,
    cluster: ClusterProfile,
    values: Values | None = None,
    deployed: Plan | None = None,
) -> PlanRequest:
    """What to ask a planner, under the user's limits. `deployed` is taken down before the new plan comes.

    `values` is the format that an accuracy budget chose.
    """
    caps = memory_caps(cluster, goal.limits, deployed)
    if deployed is not None:
        cluster = with_held_memory(cluster, deployed)
    wire = goal.wire if values is None else goal.wire.model_copy(update={"values": values})
    return PlanRequest(
        model.spec, capped(cluster, caps), model.seq_len, wire, goal.strategy, spare_accuracy=values is not None
    )
