"""Everything that differs between kinds of model, behind one protocol. `controller` knows no more of a kind than this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from coordinator.deploy.deployment import Deployment, Weights
from coordinator.deploy.distribution import Progress
from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler, Workload
from coordinator.devices.registry import Device
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.state import StateFile
from hearth.plan.plan import Plan
from hearth.wire.messages import Message
from hearth.wire.rpc import Response

D = TypeVar("D", bound=Deployment)
Handler: TypeAlias = Callable[[Any, Sequence[Any]], Awaitable[Response]]  # of a message and its payload


@dataclass(frozen=True)
class Tools:
    """Shared by all deployments of a coordinator. `report` takes a line for people."""

    fleet: Fleet
    profiler: Profiler
    settings: CoordinatorSettings
    state: StateFile
    report: Callable[[str], None]
    progress: Progress


class ModelKind(Protocol[D]):
    """A model that was opened, and how its kind is planned, deployed and asked."""

    usage: str  # how such a model is asked, for clients that ask it for something else
    workload: Workload[Any]  # measured on devices before they are planned for
    handlers: Mapping[type[Message], Handler]  # of the requests that such a model answers

    def check(self, plan: Plan) -> None:
        """Raise BadPlan that says why a plan is not for this model and these settings."""

    async def profile(self, devices: Sequence[Device]) -> Any:
        """The cluster as `plan` takes it. Raises NoDevices, ..."""

    async def plan(self, cluster: Any, recovering: bool) -> Plan:
        """`recovering`: clients wait, so a good plan soon is better than the best one later. Raises ModelDoesNotFit, ..."""

    async def revise(self, cluster: Any, deployment: D) -> tuple[Plan, float, float]:
        """The best plan now, while the memory that `deployment` holds counts as free.

        Also the seconds of that plan and of the deployed one, both priced for this cluster.
        """

    def weights(self, plan: Plan) -> AbstractAsyncContextManager[Weights]:
        """The chunks of a plan."""

    def deployment(self, plan: Plan, name: str) -> D:
        """The deployment of a plan, with nothing on the devices yet."""

    def capacity(self, deployment: D) -> int:
        """Requests that may run at once."""

    async def warm_up(self, deployment: D) -> None:
        """A small request: proves that all workers reach each other, and loads the kernels."""

    async def tune(self, deployment: D) -> None:
        """Choose by measurement what the plan leaves open, between requests."""
