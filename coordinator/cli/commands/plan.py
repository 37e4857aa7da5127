"""`hearth plan`: plans a model and explains the plan. Deploys nothing, except with --compare."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli import options
from coordinator.cli.comparison import compare_plans, print_comparison, run_interruptibly
from coordinator.cli.goals import goal_from_options, learn_seconds
from coordinator.cli.planning.flow import OutputOptions, Planning, plan_model
from coordinator.cli.planning.graph import GraphPlanning
from coordinator.cli.planning.live import ConnectionOptions
from coordinator.cli.planning.problem import plan_problem
from coordinator.cli.planning.transformer import TransformerPlanning
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
    strategy: options.StrategyOption = "auto",
    objective: options.ObjectiveOption = None,
    dim: options.DimsOption = [],  # noqa: B006 (typer's form of an empty default)
    time_limit: options.TimeLimitOption = None,
    no_congestion: options.NoCongestionOption = False,
    tiles: options.TilesOption = "off",
    learn: options.LearnOption = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="(graph) Plan for the devices in this file (TOML or JSON) instead of live ones. Its fields: "
            "mbit_per_second and latency_seconds (a number, or a matrix from row to column); devices, each with name, "
            "memory, flops_per_second, seconds_per_operator, operator_seconds; media (devices that share one, "
            "mbit_per_second). See docs/planners.md.",
            metavar="FILE",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="(graph) Save the graph, coloured by device, for Graphviz (.dot).", metavar="FILE"),
    ] = None,
    seq_len: options.SeqLenOption = None,
    context: options.ContextOption = None,
    sequences: options.SequencesOption = None,
    no_kv_copies: options.NoKvCopiesOption = False,
    kv_cache: options.KvCacheOption = None,
    draft: options.DraftOption = None,
    weights: options.WeightsOption = "float32",
    deterministic: options.DeterministicOption = False,
    wire: options.WireOption = "exact",
    lz4: options.Lz4Option = "auto",
    exclude: options.ExcludeOption = [],  # noqa: B006
    limit: options.LimitOption = [],  # noqa: B006
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every candidate plan, and why it was not chosen.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run the plan and the best one of each other strategy on the devices; show predicted and measured times.",
        ),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(help="Timed runs of each plan with --compare (default 5).", min=1, max=1000, metavar="N"),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save the plan as JSON, for `hearth serve --plan`.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Save the predicted timeline as a Chrome trace, like the measured one of `hearth embed --trace`.",
            metavar="FILE",
        ),
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Save the measurements of devices and links as JSON.", metavar="FILE")
    ] = None,
    load_profile: Annotated[
        Path | None, typer.Option(help="Plan from a saved profile; needs no device, network or key.", metavar="FILE")
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Start planning after this many seconds without a new device.", min=0.1)
    ] = 1.5,
    static: options.DevicesOption = None,
    mdns_interfaces: options.InterfacesOption = None,
    key: options.KeyPathOption = None,
    as_json: options.AsJsonOption = False,
) -> None:
    """Plan a model for the devices of this home. Shows shares, memory, predicted time and alternatives."""
    kind = options.check_kind(command, model)
    goal = goal_from_options(kind, model, command.params)
    connection = ConnectionOptions(key, static or "", mdns_interfaces, wait)
    if rounds is not None and not compare:
        raise BadSetting(setting="--rounds", reason="it needs --compare")
    if compare:
        options.reject_options(command, _NOT_COMPARED, "it cannot be combined with --compare")
    if tiles != "off":
        options.reject_options(command, _NOT_TILED, "it cannot be combined with --tiles")
    if picture is not None:
        check_picture(picture)
    output = OutputOptions(explain, as_json, save, timeline, picture, save_profile)
    if kind == "instance" and isinstance(goal, GraphGoal):
        asyncio.run(plan_problem(goal, output))
        return
    planning: Planning
    if isinstance(goal, TransformerGoal):
        planning = TransformerPlanning(goal)
    else:
        policies_dir = load_coordinator_settings({}).state_dir / POLICIES_FOLDER
        planning = GraphPlanning(goal, str(policies_dir), learn_seconds(command.params))
    if compare:
        rounds = rounds or _DEFAULT_ROUNDS
        print_comparison(
            run_interruptibly(compare_plans(planning, connection, load_coordinator_settings({}), rounds)),
            rounds,
            as_json,
        )
        return
    asyncio.run(plan_model(planning, load_profile, cluster, connection, output))
