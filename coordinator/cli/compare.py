"""`hearth plan MODEL --compare`: predictions next to measurements on the devices."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rich.table import Table

from coordinator.cli.comparison import (
    Comparer,
    Comparison,
    GraphTrial,
    Site,
    TransformerTrial,
    describe,
    strategy_of,
    timed_work,
)
from coordinator.cli.output import err, out, print_json, report
from coordinator.cli.planning.flow import Source
from coordinator.cli.planning.graph import GraphPlanning
from coordinator.cli.planning.live import Reach, reached
from coordinator.cli.planning.transformer import TransformerPlanning
from coordinator.serve.config import CoordinatorSettings
from hearth.plan.plan import is_graph_plan
from hearth.platform.units import format_seconds

_T = TypeVar("_T")


def run_interruptibly(work: Coroutine[Any, Any, _T]) -> _T:
    """Run it; Ctrl-C and SIGTERM cancel it once, so that it cleans up undisturbed. Raises KeyboardInterrupt then."""

    async def main() -> _T:
        task = asyncio.ensure_future(work)

        def stop() -> None:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, lambda: None)
            err.print("stopping the workers")
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def compare(
    planning: TransformerPlanning | GraphPlanning, reach: Reach, settings: CoordinatorSettings, rounds: int
) -> list[Comparison]:
    """Plan, and run the chosen plan and the best one of each other strategy. Raises HearthError."""
    planning.read(Source(reach))  # a graph without weights cannot run
    comparer = Comparer(report)
    name = f"{settings.name} (hearth plan --compare)"[:128]
    async with reached(planning.goal, reach, settings, name, comparer.device_changed) as live:
        site = Site(live.fleet, live.profiler.links, settings.state_dir / "manifests", settings.encrypt_data_plane)
        if isinstance(planning, GraphPlanning):
            graph_plans = await (await planning.plan(await planning.measure(live))).best_of_each_strategy()
            return await comparer.compare(GraphTrial(planning.graph), graph_plans, site, rounds)
        plans = await (await planning.plan(await planning.measure(live))).best_of_each_strategy()
        return await comparer.compare(TransformerTrial(planning.model), plans, site, rounds)


def print_comparison(results: Sequence[Comparison], rounds: int, as_json: bool) -> None:
    """`results` of the chosen plan first."""
    plan = results[0].plan
    if as_json:
        asked = {"objective": plan.body.objective} if is_graph_plan(plan) else {"seq_len": plan.body.seq_len}
        plans = [result.as_json() for result in results]
        print_json({"model": plan.model.name, **asked, "rounds": rounds, "plans": plans})
        return
    out.print(f"{plan.model.name}: {timed_work(plan)}, {rounds} times each", style="italic", soft_wrap=True)
    table = Table(show_edge=False)
    table.add_column("plan")
    for heading in ("predicted", "median", "min", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        label = f"[bold]{strategy_of(result.plan)}[/]\n" + ", ".join(device.name for device in result.plan.devices)
        predicted = format_seconds(result.predicted_seconds)
        if result.median_seconds is None or result.min_seconds is None or result.error_percent is None:
            table.add_row(f"{label}\n[red]failed:[/] {result.failure}", predicted, "-", "-", "-")
            continue
        table.add_row(
            label,
            predicted,
            format_seconds(result.median_seconds),
            format_seconds(result.min_seconds),
            f"{result.error_percent:+.0f} %",
        )
    out.print(table)
    out.print("error: how far the prediction lies above (+) or below (-) the median.", style="dim")
    out.print(describe(results))
