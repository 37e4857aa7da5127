"""Controls the client apps (`tools.bench.clients`) that run on the hub."""

from __future__ import annotations

from hearth.plan.plan import TransformerPlan
from tools.bench.clients import Ask, Outcome
from tools.bench.processes import ClientProcess
from tools.testbed import Testbed

_READY_SECONDS = 600.0  # for the coordinator to serve
_ANSWER_SECONDS = 900.0  # timeout of all answers


class ClientRunner(ClientProcess):
    """The process with the client apps, on the hub."""

    def __init__(self, testbed: Testbed) -> None:
        super().__init__(testbed, "clients")

    def ready(self) -> TransformerPlan:
        """Wait until a plan is served and return it. Raises InternalError with the end of the coordinator's log."""
        return TransformerPlan.model_validate(self.ready_status(_READY_SECONDS)["plan"])

    def answers(self, asks: list[Ask], together: bool) -> list[Outcome]:
        found = self.call("ask", _ANSWER_SECONDS, asks=[each.model_dump() for each in asks], together=together)
        return [Outcome.model_validate(each) for each in found["outcomes"]]
