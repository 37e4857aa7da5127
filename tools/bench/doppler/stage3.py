"""Kind `doppler-stage3`: what a coordinator learns while it serves a graph whose profile is wrong, or right.

One device becomes slower after it was profiled. The plan of the wrong profile and that of a right one are measured first; then
a coordinator with the wrong profile serves requests one by one, and the same with the right one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter

from hearth.platform.units import format_seconds
from hearth.wire.messages import Learning
from tools.bench.experiment import Context, Experiment
from tools.bench.findings import COUNT, PERCENT, Finding, at_least, at_most, equal, summarise, without_target
from tools.bench.graph_home import Candidate, GraphHome
from tools.bench.homes import agents, forget_plans, hub_scenario, on_quietest_core, stop_coordinator
from tools.bench.results import Summary
from tools.graph_models import build, export
from tools.testbed import Testbed

LEAST_SHARE = 0.80  # of the gain of the right profile, after `requests` requests
MOST_LOSS = 0.02  # of time, with a right profile
MOST_TRIALS = 0.05  # of the requests, on plans under trial
_SERVING_SECONDS = 240.0  # for the coordinator to serve again, after a change of plan, too
_PART_REQUESTS = 20  # of one call of the client: a change of plan between two calls shows in the log of the run


class DopplerStage3(Experiment):
    """Row P of the targets: learning on the real system (Doppler, arXiv 2505.23131, stage III)."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(Finding)

    network: str = "two_branch"  # of tools.graph_models
    branch_width: int = Field(256, ge=8, le=1024)  # channels of each branch; compute grows with the square
    devices: int = Field(3, ge=2, le=4)  # not counting the hub
    cores: float = Field(0.45, gt=0, le=1)  # CPU share of each device, of one core
    mbit: float = Field(940.0, ge=0.1)
    slowdown: float = Field(1.5, gt=1)  # of one device of the plan, against its profile
    requests: int = Field(200, ge=20)  # one by one, while the coordinator learns
    measured: int = Field(40, ge=5)  # requests whose median counts
    time_limit: float = Field(10.0, gt=0)  # seconds of each plan search

    def measure(self, context: Context) -> Iterator[Finding]:
        with agents(hub_scenario(self.devices, self.cores), context.folder, self.mbit) as testbed:
            context.report(f"making {self.network}")
            model = export(build(self.network, branch_width=self.branch_width), context.folder / "model.onnx")
            with on_quietest_core(testbed.scenario), GraphHome(testbed, model, "latency", context.report) as home:
                home.set_mbit(self.mbit)
                yield from _Measurement(self, testbed, home, model, context).run()

    def summary(self, rows: Sequence[Finding]) -> Summary:
        title = f"{self.network} on {self.devices} devices of {self.cores:g} core, one {self.slowdown:g} x slower"
        return summarise(title, rows)


class _Measurement:
    def __init__(
        self, settings: DopplerStage3, testbed: Testbed, home: GraphHome, model: Path, context: Context
    ) -> None:
        self._settings, self._testbed, self._home, self._model = settings, testbed, home, model
        self._report = context.report
        self._state = testbed.folder / "coordinator"
        self._wrong = context.folder / "wrong-profiles"

    def run(self) -> Iterator[Finding]:
        settings = self._settings
        wrong = self._plan("the wrong profile")
        shutil.copytree(self._state / "profiles", self._wrong)
        slow = max(wrong.plan.devices, key=lambda device: device.compute_seconds).name
        self._testbed.cgroups[slow].set_cpu_share(settings.cores / settings.slowdown)
        for path in (self._state / "profiles").glob("graph-*.json"):
            path.unlink()
        right = self._plan("the right profile")
        slow_seconds, right_seconds = self._fixed(wrong), self._fixed(right)
        yield without_target(
            "plan of the wrong profile, one request", slow_seconds, format_seconds, f"{slow} is slower"
        )
        yield without_target("plan of the right profile, one request", right_seconds, format_seconds)
        seconds, learning, failed = self._learn()
        gained = f"{format_seconds(seconds)} after {settings.requests} requests"
        figure = "right profile, learning: time that is lost"
        yield at_most(figure, seconds / right_seconds - 1, MOST_LOSS, PERCENT, gained)
        yield from self._common("right profile", learning, failed)
        shutil.rmtree(self._state / "profiles")
        shutil.copytree(self._wrong, self._state / "profiles")
        seconds, learning, failed = self._learn()
        gained = f"{format_seconds(seconds)} after {settings.requests} requests"
        share = (slow_seconds - seconds) / (slow_seconds - right_seconds) if slow_seconds > right_seconds else 1.0
        yield at_least("wrong profile: share of the right one's gain", share, LEAST_SHARE, PERCENT, gained)
        yield from self._common("wrong profile", learning, failed)

    def _common(self, which: str, learning: Learning, failed: int) -> Iterator[Finding]:
        yield equal(f"{which}: failed requests", failed, 0, COUNT)
        num_requests = self._settings.requests + self._settings.measured
        share = learning.trial_requests / num_requests
        yield at_most(
            f"{which}: share of requests in trials", share, MOST_TRIALS, PERCENT, f"{learning.trial_requests}"
        )
        if learning.pearson is not None and learning.spearman is not None:
            figure = f"{which}: Pearson of predicted and measured segments at the end"
            yield without_target(figure, learning.pearson, "{:.3f}".format, f"Spearman {learning.spearman:.3f}")

    def _plan(self, label: str) -> Candidate:
        return self._home.make_plan(label, "auto", self._settings.time_limit)

    def _fixed(self, candidate: Candidate) -> float:
        """The median seconds of a request by this plan, which stays."""
        path = self._testbed.folder / "fixed.json"
        path.write_text(candidate.plan.model_dump_json())
        with self._serving("--plan", str(path)):
            return self._ask(self._settings.measured)

    def _learn(self) -> tuple[float, Learning, int]:
        """The median seconds of the last requests while the coordinator learns, its status, and its failed requests."""
        with self._serving():
            for number in range(0, self._settings.requests, _PART_REQUESTS):
                self._report(f"learning: request {number} of {self._settings.requests}")
                self._ask(_PART_REQUESTS, warm_up=0)
            seconds = self._ask(self._settings.measured, warm_up=0)
            status = self._home.ready_status(_SERVING_SECONDS)
        return seconds, Learning.model_validate(status["learning"]), status["failed_requests"]

    def _ask(self, count: int, warm_up: int = 2) -> float:
        """The median seconds of so many requests, one by one."""
        answer = self._home.call("load", _SERVING_SECONDS, at_once=1, warm_up=warm_up, count=count)
        return float(answer["seconds"])

    @contextmanager
    def _serving(self, *options: str) -> Iterator[None]:
        """A coordinator that has learnt nothing yet and plans with the profiles that are there."""
        forget_plans(self._testbed)
        shutil.rmtree(self._state / "learnt", ignore_errors=True)
        settings = self._settings
        coordinator = self._testbed.start_coordinator(
            str(self._model), "--objective", "latency", "--time-limit", f"{settings.time_limit:g}",
            "--min-devices", str(settings.devices), *options,
        )  # fmt: skip
        try:
            self._home.ready_status(_SERVING_SECONDS)
            yield
        finally:
            stop_coordinator(coordinator)
