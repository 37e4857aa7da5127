"""`hearth plan`: what would run where, how fast, and why; changes nothing on the devices, unless asked to compare."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from coordinator.cli import options
from coordinator.cli.cluster import Reach, live_cluster, load_cluster, save_cluster
from coordinator.cli.compare import compare as compare_plans
from coordinator.cli.compare import print_comparison, run_interruptibly
from coordinator.cli.goals import goal_of
from coordinator.cli.graph_plan import GraphOutput, plan_graph_command
from coordinator.cli.output import handles_errors, out, print_json
from coordinator.cli.render.tables import alternatives_table, generation_lines, options_list, plan_tables
from coordinator.plan.transformer.cost.layout import Layout
from coordinator.plan.transformer.cost.predict import predicted_timeline
from coordinator.plan.transformer.explain import option_as_json, why_won
from coordinator.plan.transformer.explain import options as priced_options
from coordinator.plan.transformer.make import PlanRequest, make_plan
from coordinator.serve.config import load_settings
from coordinator.serve.goal import Model, open_model, plan_request
from coordinator.serve.state import GraphGoal, TransformerGoal
from hearth.errors import BadSetting
from hearth.files import write_atomically
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_seconds
from hearth.trace import chrome_trace

_NUM_OTHERS = 3  # alternatives that are shown without --explain
_DEFAULT_ROUNDS = 5
_NOT_COMPARED = ("load_profile", "save_profile", "save", "explain", "timeline")


@handles_errors
def plan(
    command: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            help="Model directory: config.json, *.safetensors, tokenizer.json; or a graph of operators: an ONNX file, or "
            "JSON without weights (then with --cluster)."
        ),
    ],
    strategy: options.Strategy = "auto",
    objective: options.Objective = None,
    dim: options.Dims = [],  # noqa: B006 (typer's way to say "none")
    time_limit: options.TimeLimit = None,
    no_congestion: options.NoCongestion = False,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="Of a graph: plan for the devices of this file (TOML or JSON) instead of live ones: mbit_per_second, a "
            "number or a matrix from row to column; latency_seconds likewise; and devices, each with name, memory, "
            "flops_per_second, seconds_per_operator, operator_seconds.",
            metavar="FILE",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Of a graph: draw it coloured by device, as .svg or .png.", metavar="FILE"),
    ] = None,
    seq_len: options.SeqLen = None,
    context: options.Context = None,
    sequences: options.Sequences = None,
    weights: options.Weights = "float32",
    wire: options.Wire = "exact",
    lz4: options.Lz4 = "auto",
    exclude: options.Exclude = [],  # noqa: B006
    limit: options.Limit = [],  # noqa: B006
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every plan that was priced, and why it was not taken.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run the plan, and the best one of each other strategy, on the devices; show predicted and measured.",
        ),
    ] = False,
    rounds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Timed steps of each plan with --compare (default 5).", min=1, max=1000, metavar="N"),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save the plan as JSON, for `hearth serve --plan`.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Save the predicted timeline as a Chrome trace, to lay beside that of `hearth embed --trace`.",
            metavar="FILE",
        ),
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Save what was measured of devices and links as JSON.", metavar="FILE")
    ] = None,
    load_profile: Annotated[
        Path | None, typer.Option(help="Plan from a saved profile: needs no device, network or key.", metavar="FILE")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds without a new device after which to plan.", min=0.1)] = 1.5,
    static: options.Devices = None,
    mdns_interfaces: options.Interfaces = None,
    key: options.KeyPath = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan a model on the devices of this home: shares, bytes against budgets, predicted time, alternatives."""
    kind = options.check_kind(command, model)
    wishes = goal_of(kind, model, command.params)
    if isinstance(wishes, GraphGoal):
        output = GraphOutput(explain, picture, save, as_json)
        plan_graph_command(wishes, Reach(key, static or "", mdns_interfaces, wait), cluster, output)
        return
    if rounds is not None and not compare:
        raise BadSetting(setting="--rounds", reason="it needs --compare")
    if compare:
        options.refuse(command, _NOT_COMPARED, "it does not go with --compare")
    opened = open_model(goal := wishes)
    reach = Reach(key, static or "", mdns_interfaces, wait)
    if compare:
        rounds = rounds or _DEFAULT_ROUNDS
        results = run_interruptibly(compare_plans(goal, opened, reach, load_settings({}), rounds))
        print_comparison(results, opened, rounds, as_json)
        return
    if load_profile is not None:
        profile = load_cluster(load_profile, goal, opened)
    else:
        profile = asyncio.run(_measure(goal, opened, reach))
    if save_profile is not None:
        save_cluster(save_profile, profile, opened)
    request = plan_request(goal, opened, profile)
    made = make_plan(request)
    if save is not None:
        _save("--save", save, made.model_dump_json(indent=1))
    if timeline is not None:
        _save("--timeline", timeline, _timeline(made, profile))
    if as_json:
        printed = made.model_dump(mode="json")
        if explain:
            priced = priced_options(request, made)
            printed["priced"] = [option_as_json(option, made, profile, request.strategy) for option in priced]
        print_json(printed)
        return
    _print(made, request, explain)


async def _measure(goal: TransformerGoal, model: Model, reach: Reach) -> ClusterProfile:
    async with live_cluster(goal, model, reach, load_settings({})) as live:
        return live.profile


def _timeline(made: TransformerPlan, cluster: ClusterProfile) -> str:
    used = cluster.subset(tuple(device.device_id for device in made.devices))
    return json.dumps(chrome_trace(predicted_timeline(Layout(made.model, made.body, used, made.wire))))


def _formats(made: TransformerPlan) -> str:
    """Which links carry what, where not all are alike."""
    names = [device.name for device in made.devices]
    if len(made.body.exact_links) == len(names) * (len(names) - 1):
        return f"exact on all links: {made.wire.values} would save no time"
    links = ", ".join(f"{names[source]} to {names[target]}" for source, target in made.body.exact_links)
    return f"{made.wire.values}, but exact where that costs no time: {links}"


def _save(option: str, path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise BadSetting(setting=option, reason=f"{path} cannot be written ({error.strerror})") from None


def _print(made: TransformerPlan, request: PlanRequest, explain: bool) -> None:
    out.print(*plan_tables(made), sep="\n")
    predicted = made.predicted
    out.print(
        f"predicted: {format_seconds(predicted.latency_seconds)} a step "
        f"(busiest device {format_seconds(predicted.compute_seconds)}, "
        f"busiest link {format_seconds(predicted.transfer_seconds)})"
    )
    for line in generation_lines(made):
        out.print(line)
    if made.body.exact_links:
        out.print(f"activations: {_formats(made)}")
    if explain:
        priced = priced_options(request, made)
        out.print(f"\n{why_won(priced, request.cluster, request.strategy)}")
        out.print(options_list(priced, request.cluster, request.strategy))
    elif made.alternatives:
        out.print(alternatives_table(made, _NUM_OTHERS))
