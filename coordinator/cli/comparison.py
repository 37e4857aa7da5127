"""`hearth plan MODEL --compare`: deploys plans one after another and compares measured with predicted times."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from rich.table import Table

from coordinator.cli.output import out, print_json, report
from coordinator.cli.plans.flow import Planning
from coordinator.cli.plans.live import ConnectionOptions, LiveDevices, connect_devices
from coordinator.cli.plans.transformer import timed_tokens
from coordinator.cli.render.tables import right_column
from coordinator.deploy.deployment import Deployment, loss_error
from coordinator.devices.registry import Device
from coordinator.plan.graph.request import objective_seconds
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.serve.config import CoordinatorSettings
from hearth.errors import HearthError
from hearth.plan.plan import GraphPlan, TransformerPlan, is_graph_plan, is_transformer_plan
from hearth.platform.units import format_seconds

_T = TypeVar("_T")


@dataclass(frozen=True)
class PlanTimes:
    """Measured times of one plan.

    `step_seconds` has one value per timed step, as the workers measured it; for decoders and graphs, per request (see
    `timed_work`). It is empty if the plan failed, and `failure` says why.
    """

    plan: TransformerPlan | GraphPlan
    step_seconds: tuple[float, ...]
    failure: str = ""

    @property
    def predicted_seconds(self) -> float:
        """The prediction for what `step_seconds` measures."""
        return objective_seconds(self.plan) if is_graph_plan(self.plan) else request_seconds(self.plan)

    @property
    def median_seconds(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def min_seconds(self) -> float | None:
        return min(self.step_seconds, default=None)

    @property
    def error_percent(self) -> float | None:
        """Prediction error relative to the measured median; positive if the prediction is too high."""
        measured = self.median_seconds
        return 100 * (self.predicted_seconds / measured - 1) if measured else None

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": strategy_name(self.plan),
            "devices": [device.name for device in self.plan.devices],
            "predicted_seconds": self.predicted_seconds,
            "median_seconds": self.median_seconds,
            "min_seconds": self.min_seconds,
            "step_seconds": list(self.step_seconds),
            "error_percent": self.error_percent,
            "failure": self.failure or None,
        }


class PlanRunner:
    """Deploys plans and times them. `device_changed` is for the fleet's `on_change`; `report` prints a progress line."""

    def __init__(self, settings: CoordinatorSettings, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        self._deployment: Deployment | None = None

    def device_changed(self, device: Device) -> None:
        """Fail the running deployment at once if it has lost this device."""
        deployment = self._deployment
        if deployment is not None and (error := loss_error(device, deployment, loaded=False)) is not None:
            deployment.fail(error)

    async def time_plans(
        self, planning: Planning, plans: Sequence[TransformerPlan | GraphPlan], live: LiveDevices, rounds: int
    ) -> list[PlanTimes]:
        """Measure each plan. A failure is reported, and the others still run. Cancellation stops the workers."""
        results = []
        for index, plan in enumerate(plans, start=1):
            numbered: Any = plan.with_epoch(live.fleet.last_epoch + index)
            self._report(f"running {plan_label(plan)} ({index} of {len(plans)})")
            deployment = self._deployment = planning.deployment(live.fleet, numbered)
            try:
                seconds = await self._time_plan(planning, deployment, live, rounds)
                results.append(PlanTimes(numbered, seconds))
            except HearthError as error:
                self._report(f"{plan_label(plan)} failed: {error}")
                results.append(PlanTimes(numbered, (), error.explanation()))
        return results

    async def _time_plan(
        self, planning: Planning, deployment: Any, live: LiveDevices, rounds: int
    ) -> tuple[float, ...]:
        try:
            weights = await planning.weights(deployment.plan, self._settings.state_dir / "manifests")
            await deployment.push(weights, lambda name, done, total: None)
            await deployment.load(live.profiler.links, self._settings.encrypt_data_plane)
            return await planning.measure_seconds(deployment, rounds)
        finally:
            self._deployment = None
            await deployment.close()


async def compare_plans(
    planning: Planning, connection: ConnectionOptions, settings: CoordinatorSettings, rounds: int
) -> list[PlanTimes]:
    """Plan, then run the chosen plan and the best one of each other strategy. Raises HearthError."""
    planning.cluster_from_files()  # raises for a graph without weights
    runner = PlanRunner(settings, report)
    name = f"{settings.name} (hearth plan --compare)"[:128]
    async with connect_devices(planning.goal, connection, settings, name, runner.device_changed) as live:
        cluster: Any = await planning.profile(live)
        plans = await (await planning.plan(cluster)).best_of_each_strategy()
        return await runner.time_plans(planning, plans, live, rounds)


def run_interruptibly(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run `work`. The first Ctrl-C or SIGTERM cancels it; later ones are ignored while it cleans up.

    Raises KeyboardInterrupt when it was cancelled.
    """

    async def main() -> _T:
        task = asyncio.ensure_future(coroutine)

        def stop() -> None:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, lambda: None)
            report("stopping the workers")
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


# ---- output ---------------------------------------------------------------------------------------------------------


def strategy_name(plan: TransformerPlan | GraphPlan) -> str:
    """The strategy of a plan; for a graph, the planner that made it."""
    return plan.body.strategy if is_transformer_plan(plan) else plan.planner


def plan_label(plan: TransformerPlan | GraphPlan) -> str:
    """Strategy and devices of a plan, such as `hmp on attic, kitchen`."""
    title = plan.body.title if is_transformer_plan(plan) else plan.planner
    return f"{title} on {', '.join(device.name for device in plan.devices)}"


def describe_timed_work(plan: TransformerPlan | GraphPlan) -> str:
    """Description of the work that is timed."""
    if is_graph_plan(plan):
        return "one request alone" if plan.body.objective == "latency" else "each request of a full pipeline"
    length, new_tokens = timed_tokens(plan)
    if not new_tokens:
        return f"a step of {length} rows"
    return f"a request of {length} prompt tokens and {new_tokens} generated tokens"


def print_comparison(results: Sequence[PlanTimes], rounds: int, as_json: bool) -> None:
    """Print the table or JSON. `results[0]` is of the chosen plan."""
    plan = results[0].plan
    if as_json:
        request_fields = {"objective": plan.body.objective} if is_graph_plan(plan) else {"seq_len": plan.body.seq_len}
        plans = [result.as_json() for result in results]
        print_json({"model": plan.model.name, **request_fields, "rounds": rounds, "plans": plans})
        return
    runs = "1 run" if rounds == 1 else f"{rounds} runs"
    out.print(f"{plan.model.name}: {describe_timed_work(plan)}, {runs} each", style="italic", soft_wrap=True)
    numbers = [right_column(heading, no_wrap=True) for heading in ("predicted", "median", "min", "error")]
    table = Table("plan", *numbers, show_edge=False)
    for result in results:
        label = f"[bold]{strategy_name(result.plan)}[/]\n" + ", ".join(device.name for device in result.plan.devices)
        predicted = format_seconds(result.predicted_seconds)
        if result.median_seconds is None or result.min_seconds is None or result.error_percent is None:
            table.add_row(f"{label}\n[red]failed:[/] {result.failure}", predicted, "-", "-", "-")
            continue
        measured = map(format_seconds, (result.median_seconds, result.min_seconds))
        table.add_row(label, predicted, *measured, f"{result.error_percent:+.0f} %")
    out.print(table)
    out.print("error: the prediction relative to the median; + is too high, - is too low.", style="dim")
    out.print(verdict(results))


def verdict(results: Sequence[PlanTimes]) -> str:
    """One sentence: whether the chosen plan (the first) was the fastest."""
    chosen = results[0].median_seconds
    others = [(each.median_seconds, plan_label(each.plan)) for each in results[1:] if each.median_seconds is not None]
    if chosen is None:
        return "The chosen plan failed, so it cannot be compared."
    if not others:
        return "There was no other plan to compare with."
    seconds, label = min(others)
    if seconds >= chosen:
        return f"The chosen plan was the fastest; the next one, {label}, took {format_seconds(seconds)}."
    return f"{label} was faster than the chosen plan: {format_seconds(seconds)}."
