"""Plans for transformers, as `hearth plan` makes and shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.cli.output import out
from coordinator.cli.planning.flow import Source
from coordinator.cli.planning.live import Live
from coordinator.cli.render.tables import (
    candidates_list,
    formats_line,
    generation_lines,
    others_table,
    plan_tables,
)
from coordinator.devices.block_profiling import block_cluster, block_workload
from coordinator.devices.profile_file import SavedTransformerProfile, read_transformer_profile
from coordinator.plan.solution import Planned
from coordinator.plan.transformer.cost.layout import Layout
from coordinator.plan.transformer.cost.predict import predicted_timeline
from coordinator.plan.transformer.explain import best_of_each_strategy, candidate_as_json, unit_of, why_won
from coordinator.plan.transformer.make import plan_transformer
from coordinator.plan.transformer.request import PlanRequest
from coordinator.serve.goal import open_model, plan_request
from coordinator.serve.state import TransformerGoal
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_seconds
from hearth.wire.messages import DeviceTrace

_NUM_OTHERS = 3  # alternatives that are shown without --explain


@dataclass(frozen=True)
class PlannedTransformer:
    """A `Planned`."""

    found: Planned[TransformerPlan]
    request: PlanRequest

    @property
    def plan(self) -> TransformerPlan:
        return self.found.plan

    def timeline(self) -> Sequence[DeviceTrace]:
        plan = self.plan
        used = self.request.cluster.subset(tuple(device.device_id for device in plan.devices))
        return predicted_timeline(Layout(plan.model, plan.body, used, plan.wire))

    def drawing(self) -> None:
        """All layers are alike."""

    def as_json(self, explain: bool) -> dict[str, Any]:
        found = self.plan.model_dump(mode="json")
        if explain:
            found["priced"] = [candidate_as_json(each, self.request.cluster) for each in self.found.candidates]
        return found

    def show(self, explain: bool) -> None:
        plan, cluster = self.plan, self.request.cluster
        predicted = plan.predicted
        out.print(*plan_tables(plan), sep="\n")
        out.print(
            f"predicted: {format_seconds(predicted.latency_seconds)} a step "
            f"(busiest device {format_seconds(predicted.compute_seconds)}, "
            f"busiest link {format_seconds(predicted.transfer_seconds)})"
        )
        for line in generation_lines(plan):
            out.print(line)
        if plan.body.exact_links:
            out.print(formats_line(plan))
        if explain:
            out.print(f"\n{why_won(self.found, cluster, self.request.strategy)}")
            out.print(candidates_list(self.found, cluster))
        elif plan.alternatives:
            title = f"Not taken ({unit_of(plan)})" if plan.body.generation else "Not taken"
            out.print(others_table(self.found, _NUM_OTHERS, "predicted", title))

    async def best_of_each_strategy(self) -> list[TransformerPlan]:
        """This plan first."""
        return best_of_each_strategy(self.found)


class TransformerPlanning:
    """A `Planning`. Raises BadCheckpoint, UnsupportedArchitecture, BadSetting."""

    def __init__(self, goal: TransformerGoal) -> None:
        self.goal = goal
        self.model = open_model(goal)

    def read(self, source: Source) -> ClusterProfile | None:
        return read_transformer_profile(source.profile, self.model.spec) if source.profile is not None else None

    async def measure(self, live: Live) -> ClusterProfile:
        return await block_cluster(live.profiler, live.devices, block_workload(self.model.spec, self.model.seq_len))

    def saved(self, cluster: ClusterProfile) -> SavedTransformerProfile:
        return SavedTransformerProfile(devices=cluster.devices, links=cluster.links, model=self.model.spec)

    async def plan(self, cluster: ClusterProfile) -> PlannedTransformer:
        request = plan_request(self.goal, self.model, cluster)
        return PlannedTransformer(plan_transformer(request), request)
