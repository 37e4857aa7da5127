"""`hearth plan`: plans a model and explains the plan. Deploys nothing, except with --compare."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.comparison import compare_plans, print_comparison, run_interruptibly
from coordinator.cli.goals import goal_from_options, learn_seconds
from coordinator.cli.model_options import GRAPH, TRANSFORMER, PlanOptions, ServeOptions, check_kind, reject_options
from coordinator.cli.plans.flow import OutputOptions, Planning, plan_model, plan_problem
from coordinator.cli.plans.graph import GraphPlanning
from coordinator.cli.plans.live import ConnectionOptions
from coordinator.cli.plans.transformer import TransformerPlanning
from coordinator.cli.render.picture import check_picture
from coordinator.plan.graph.request import POLICIES_FOLDER
from coordinator.serve.config import load_coordinator_settings
from coordinator.serve.state import GraphGoal, TransformerGoal
from hearth.errors import BadSetting

_DEFAULT_ROUNDS = 5  # timed runs of each plan: enough for a median, short enough to wait for
_NOT_TILED = ("load_profile", "save_profile")  # files that describe whole operators
_NOT_COMPARED = ("load_profile", "save_profile", "save", "explain", "timeline", "cluster", "picture")


def plan(
    command: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            help="Model directory (config.json, *.safetensors, tokenizer.json), or an operator graph: an ONNX file, or "
            "JSON without weights (needs --cluster)."
        ),
    ],
    *,
    options: PlanOptions,
    learn: Annotated[
        str | None,
        typer.Option(
            help="(graph) Let the policy of --strategy doppler learn on this graph and these devices before the search, for "
            "30s or 5min, for example. It is kept for the next plans, also those of `hearth serve`.",
            metavar="TIME",
        ),
        GRAPH,
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="(graph) Plan for the devices in this file (TOML or JSON) instead of live ones. Its fields: "
            "mbit_per_second and latency_seconds (a number, or a matrix from row to column); devices, each with name, "
            "memory, flops_per_second, seconds_per_operator, operator_seconds; media (devices that share one, "
            "mbit_per_second). See docs/planners.md.",
            metavar="FILE",
        ),
        GRAPH,
    ] = None,
    load_profile: Annotated[
        Path | None,
        typer.Option(help="Plan from a saved profile; needs no device, network or key.", metavar="FILE"),
        TRANSFORMER | GRAPH,
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run the plan and the best one of each other strategy on the devices; show predicted and measured times.",
        ),
        TRANSFORMER | GRAPH,
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(help="Timed runs of each plan with --compare (default 5).", min=1, max=1000, metavar="N"),
        TRANSFORMER | GRAPH,
    ] = None,
    connection: ConnectionOptions,
    output: OutputOptions,
) -> None:
    """Plan a model for the devices of this home. Shows shares, memory, predicted time and alternatives."""
    kind = check_kind(command, model)
    goal = goal_from_options(kind, model, ServeOptions(**vars(options)))
    if rounds is not None and not compare:
        raise BadSetting(setting="--rounds", reason="it needs --compare")
    if compare:
        reject_options(command, _NOT_COMPARED, "it cannot be combined with --compare")
    if options.tiles != "off":
        reject_options(command, _NOT_TILED, "it cannot be combined with --tiles")
    if output.picture is not None:
        check_picture(output.picture)
    if kind == "instance" and isinstance(goal, GraphGoal):
        asyncio.run(plan_problem(goal, output))
        return
    planning: Planning
    if isinstance(goal, TransformerGoal):
        planning = TransformerPlanning(goal)
    else:
        policies_dir = load_coordinator_settings({}).state_dir / POLICIES_FOLDER
        planning = GraphPlanning(goal, str(policies_dir), learn_seconds(learn, options.strategy))
    if compare:
        rounds = rounds or _DEFAULT_ROUNDS
        comparison = compare_plans(planning, connection, load_coordinator_settings({}), rounds)
        print_comparison(run_interruptibly(comparison), rounds, output.as_json)
        return
    asyncio.run(plan_model(planning, load_profile, cluster, connection, output))
