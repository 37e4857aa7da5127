"""`ModelKind`: the protocol for what differs between kinds of model. `controller` uses nothing else of a kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from coordinator.deploy.deployment import Deployment, Weights
from coordinator.deploy.distribution import PushProgress
from coordinator.devices.fleet import Fleet
from coordinator.devices.other_models import TakenByOthers
from coordinator.devices.profile_cache import Workload
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.plan.solution import PlanningResult
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.planners.process import PlannerKind, SparePlanners
from coordinator.serve.resources import Resources
from coordinator.serve.state import StateFile
from hearth.errors import HearthError
from hearth.plan.plan import Plan
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire.messages import AnswerKind, Event, Message
from hearth.wire.rpc import Response

D = TypeVar("D", bound=Deployment)
P = TypeVar("P", bound=Plan)
RequestHandler: TypeAlias = Callable[[Any, Sequence[Any]], Awaitable[Response]]  # takes a message and its payload


@dataclass(frozen=True)
class SharedServices:
    """Services shared by all deployments of a coordinator. `report` logs a line for the user."""

    fleet: Fleet
    profiler: Profiler
    settings: CoordinatorSettings
    state: StateFile
    report: Callable[[str], None]
    progress: PushProgress
    spare_planners: SparePlanners = field(default_factory=SparePlanners)
    resources: Resources = field(default_factory=Resources)
    deployment: str = DEFAULT_DEPLOYMENT  # of which these are the services
    record: Callable[[Event], None] = lambda event: None  # tells those who watch the coordinator what has happened

    @property
    def taken(self) -> TakenByOthers:
        """What the other deployments take of devices and links."""
        return self.resources.by_others(self.deployment)

    def held(self, plan: P) -> P:
        """A plan whose memory counts as free for the next one, as far as other deployments leave it."""
        return self.resources.with_room(self.deployment, plan, self.fleet.devices)

    def chosen(self, planned: PlanningResult[P]) -> P:
        """The chosen plan; its notes are reported."""
        for note in planned.notes:
            self.report(note)
        return planned.plan


class ModelKind(Protocol[D]):
    """An opened model, with the planning, deployment and request handlers of its kind."""

    usage: str  # tells a client that sent a request of another kind which requests the model answers
    answers: AnswerKind
    takes_tools: bool
    context_tokens: int  # of a prompt and its answer, or of a text to embed; 0: it takes no text
    planner: PlannerKind  # the process that makes its plans
    workload: Workload[Any]  # measured on each device before planning
    handlers: Mapping[type[Message], RequestHandler]  # by type of request

    @property
    def files(self) -> Sequence[Path]:
        """The model's files that a standby needs. Raises as opening the model does."""

    def check(self, plan: Plan) -> None:
        """Raise BadPlan if a plan is not for this model and these settings."""

    async def profile(self, devices: Sequence[Device], deployed: Plan | None = None, joined: bool = False) -> Any:
        """Measure the devices; returns the cluster for `plan`. Raises NoDevices, ...

        A graph of operators can be cut in many ways. It is measured as the `deployed` plan has cut it; without one, or if
        devices have `joined`, as it is best cut for these devices.
        """

    async def plan(self, cluster: Any, recovering: bool, held: Plan | None = None) -> Plan:
        """Make a plan. `recovering`: clients are waiting, so limit the search. Raises ModelDoesNotFit, ...

        `held`: the memory that the workers of this plan hold counts as free, because they go on in the new plan or end.
        """

    async def plans_ahead(self, clusters: Sequence[Any], held: Plan) -> list[Plan | HearthError]:
        """As `plan` for each of these clusters, in a process with low priority; an error in place of an impossible plan."""

    def summary(self, plan: Plan) -> str:
        """One line about a new plan for the log; empty if the line of the phase says all."""

    async def revise(self, cluster: Any, deployment: D) -> tuple[Plan, float, float]:
        """Plan again, counting the memory that `deployment` holds as free.

        Returns the new plan and the predicted seconds of the new and of the deployed plan, both for this cluster.
        """

    async def weights(self, plan: Plan) -> Weights:
        """The weight chunks that each rank of a plan needs."""

    def deployment(self, plan: Plan, name: str) -> D:
        """Create the deployment of a plan; contacts no device."""

    def capacity(self, deployment: D) -> int:
        """Number of requests that may run at once."""

    async def probe(self, deployment: D) -> None:
        """Run a small request: checks that all workers compute and reach each other.

        Used for the warm-up, which loads the kernels, and after a failed step, to see whether the plan still works.
        """

    async def tune(self, deployment: D) -> None:
        """Choose settings that the plan leaves open, by measuring between requests."""
