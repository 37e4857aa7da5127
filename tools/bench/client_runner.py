"""Controls the client apps (`tools.bench.clients`) that run on the hub."""

from __future__ import annotations

from typing import Any

from hearth.errors import HearthError, InternalError
from hearth.plan.plan import TransformerPlan
from tools.bench.clients import Ask, Outcome
from tools.bench.drive import Group
from tools.testbed import Testbed

_READY_SECONDS = 600.0  # for the coordinator to serve
_ANSWER_SECONDS = 900.0  # default timeout of a call


class ClientRunner(Group):
    """The process with the client apps, on the hub."""

    def __init__(self, testbed: Testbed) -> None:
        super().__init__(testbed, "clients")
        self._hub = testbed.scenario.coordinator_device
        self.start(self._hub, str(testbed.key), testbed.address(self._hub), limited=False)

    def call(self, what: str, patience: float = _ANSWER_SECONDS, **arguments: Any) -> dict[str, Any]:
        """Call a method of `Clients`. `patience`: timeout in seconds."""
        return self.ask({self._hub: {"do": what, **arguments}}, patience)[self._hub]

    def ready(self) -> TransformerPlan:
        """Wait until a plan is served and return it. Raises InternalError with the end of the coordinator's log."""
        try:
            status = self.call("wait_ready", within_seconds=_READY_SECONDS, patience=_READY_SECONDS + 30.0)
        except HearthError as error:
            said = self._testbed.log("coordinator.log").strip()[-500:]
            raise InternalError(where="the coordinator", reason=f"{error}; its log ends: {said}") from None
        return TransformerPlan.model_validate(status["plan"])

    def answers(self, asks: list[Ask], together: bool) -> list[Outcome]:
        found = self.call("ask", asks=[each.model_dump() for each in asks], together=together)
        return [Outcome.model_validate(each) for each in found["outcomes"]]
