"""`hearth plan MODEL --compare`: runs plans for real, one deployment after the other, beside their predictions."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from rich.table import Table

from coordinator.cli.output import out, print_json, report
from coordinator.cli.planning.flow import Planning
from coordinator.cli.planning.live import Live, Reach, reached
from coordinator.cli.planning.transformer import timed_tokens
from coordinator.cli.render.tables import right
from coordinator.deploy.deployment import Deployment, loss_of
from coordinator.devices.registry import Device
from coordinator.plan.graph.request import seconds_of as graph_seconds_of
from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.serve.config import CoordinatorSettings
from hearth.errors import HearthError
from hearth.plan.plan import GraphPlan, TransformerPlan, is_graph_plan, is_transformer_plan
from hearth.platform.units import format_seconds

_T = TypeVar("_T")


@dataclass(frozen=True)
class Comparison:
    """One plan: the seconds of each timed step as its workers measured them, or why there are none.

    For a decoder and for a graph, each is of a request instead (see `timed_work`).
    """

    plan: TransformerPlan | GraphPlan
    step_seconds: tuple[float, ...]
    failure: str = ""

    @property
    def predicted_seconds(self) -> float:
        """The prediction for what `step_seconds` measures."""
        return graph_seconds_of(self.plan) if is_graph_plan(self.plan) else seconds_of(self.plan)

    @property
    def median_seconds(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def min_seconds(self) -> float | None:
        return min(self.step_seconds, default=None)

    @property
    def error_percent(self) -> float | None:
        """How far the prediction lies above (+) or below (-) the measured median."""
        measured = self.median_seconds
        return 100 * (self.predicted_seconds / measured - 1) if measured else None

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": strategy_of(self.plan),
            "devices": [device.name for device in self.plan.devices],
            "predicted_seconds": self.predicted_seconds,
            "median_seconds": self.median_seconds,
            "min_seconds": self.min_seconds,
            "step_seconds": list(self.step_seconds),
            "error_percent": self.error_percent,
            "failure": self.failure or None,
        }


class Comparer:
    """Deploys plans and times them. `device_changed` is the fleet's `on_change`; `report` takes a line for people."""

    def __init__(self, settings: CoordinatorSettings, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        self._deployment: Deployment | None = None

    def device_changed(self, device: Device) -> None:
        """Fail what runs on a device that is gone, rather than wait for it."""
        deployment = self._deployment
        if deployment is not None and (error := loss_of(device, deployment, loaded=False)) is not None:
            deployment.fail(error)

    async def compare(
        self, planning: Planning, plans: Sequence[TransformerPlan | GraphPlan], live: Live, rounds: int
    ) -> list[Comparison]:
        """Measure each plan; one that fails is reported, and the others still run. Cancelled, it stops its workers."""
        results = []
        for index, plan in enumerate(plans, start=1):
            numbered: Any = plan.with_epoch(live.fleet.last_epoch + index)
            self._report(f"running {label_of(plan)} ({index} of {len(plans)})")
            deployment = self._deployment = planning.deployment(live.fleet, numbered)
            try:
                seconds = await self._measure(planning, deployment, live, rounds)
                results.append(Comparison(numbered, seconds))
            except HearthError as error:
                self._report(f"{label_of(plan)} failed: {error}")
                results.append(Comparison(numbered, (), error.explanation()))
        return results

    async def _measure(self, planning: Planning, deployment: Any, live: Live, rounds: int) -> tuple[float, ...]:
        try:
            weights = planning.weights(deployment.plan, self._settings.state_dir / "manifests")
            await deployment.push(weights, lambda name, done, total: None)
            await deployment.load(live.profiler.links, self._settings.encrypt_data_plane)
            return await planning.measured_seconds(deployment, rounds)
        finally:
            self._deployment = None
            await deployment.close()


async def compare(planning: Planning, reach: Reach, settings: CoordinatorSettings, rounds: int) -> list[Comparison]:
    """Plan, and run the chosen plan and the best one of each other strategy. Raises HearthError."""
    planning.read()  # a graph without weights cannot run
    comparer = Comparer(settings, report)
    name = f"{settings.name} (hearth plan --compare)"[:128]
    async with reached(planning.goal, reach, settings, name, comparer.device_changed) as live:
        cluster: Any = await planning.profile(live)
        plans = await (await planning.plan(cluster)).best_of_each_strategy()
        return await comparer.compare(planning, plans, live, rounds)


def run_interruptibly(work: Coroutine[Any, Any, _T]) -> _T:
    """Run it; Ctrl-C and SIGTERM cancel it once, so that it cleans up undisturbed. Raises KeyboardInterrupt then."""

    async def main() -> _T:
        task = asyncio.ensure_future(work)

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


# ---- for people -----------------------------------------------------------------------------------------------------


def strategy_of(plan: TransformerPlan | GraphPlan) -> str:
    return plan.body.strategy if is_transformer_plan(plan) else plan.planner


def label_of(plan: TransformerPlan | GraphPlan) -> str:
    """`hmp on attic, kitchen`."""
    title = plan.body.title if is_transformer_plan(plan) else plan.planner
    return f"{title} on {', '.join(device.name for device in plan.devices)}"


def timed_work(plan: TransformerPlan | GraphPlan) -> str:
    """What is timed, for people."""
    if is_graph_plan(plan):
        return "one request alone" if plan.body.objective == "latency" else "each request of a full pipeline"
    length, new_tokens = timed_tokens(plan)
    if not new_tokens:
        return f"a step of {length} rows"
    return f"a request of {length} prompt tokens and {new_tokens} generated tokens"


def print_comparison(results: Sequence[Comparison], rounds: int, as_json: bool) -> None:
    """`results` of the chosen plan first."""
    plan = results[0].plan
    if as_json:
        asked = {"objective": plan.body.objective} if is_graph_plan(plan) else {"seq_len": plan.body.seq_len}
        plans = [result.as_json() for result in results]
        print_json({"model": plan.model.name, **asked, "rounds": rounds, "plans": plans})
        return
    out.print(f"{plan.model.name}: {timed_work(plan)}, {rounds} times each", style="italic", soft_wrap=True)
    numbers = [right(heading, no_wrap=True) for heading in ("predicted", "median", "min", "error")]
    table = Table("plan", *numbers, show_edge=False)
    for result in results:
        label = f"[bold]{strategy_of(result.plan)}[/]\n" + ", ".join(device.name for device in result.plan.devices)
        predicted = format_seconds(result.predicted_seconds)
        if result.median_seconds is None or result.min_seconds is None or result.error_percent is None:
            table.add_row(f"{label}\n[red]failed:[/] {result.failure}", predicted, "-", "-", "-")
            continue
        measured = map(format_seconds, (result.median_seconds, result.min_seconds))
        table.add_row(label, predicted, *measured, f"{result.error_percent:+.0f} %")
    out.print(table)
    out.print("error: how far the prediction lies above (+) or below (-) the median.", style="dim")
    out.print(describe(results))


def describe(results: Sequence[Comparison]) -> str:
    """Whether the plan that was chosen (the first) was right."""
    chosen = results[0].median_seconds
    others = [(each.median_seconds, label_of(each.plan)) for each in results[1:] if each.median_seconds is not None]
    if chosen is None:
        return "The chosen plan failed, so that nothing can be said of it."
    if not others:
        return "There was no other plan to compare with."
    seconds, label = min(others)
    if seconds >= chosen:
        return f"The chosen plan was the fastest; the next one, {label}, took {format_seconds(seconds)}."
    return f"{label} was faster than the chosen plan: {format_seconds(seconds)}."
