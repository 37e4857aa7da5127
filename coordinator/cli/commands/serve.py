"""`hearth serve`: the coordinator. Deploys a model, keeps it running and answers requests."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from coordinator.cli import options
from coordinator.cli.goals import goal_from_options
from coordinator.cli.output import err, report
from coordinator.http.settings import check_installed
from coordinator.models.file_kinds import read_json_file, why_wrong_kind
from coordinator.serve.clients.http_gateway import http_address
from coordinator.serve.config import load_coordinator_settings
from coordinator.serve.roles import run_coordinator
from coordinator.serve.state import Goal
from coordinator.serve.state_folder import address_of_running
from hearth.client.sync import connect
from hearth.errors import BadKey, BadPlan, BadRequest, DeadlineExceeded
from hearth.plan.plan import Plan, plan_from_json
from hearth.platform.machine import raise_file_limit
from hearth.platform.security import HomeKey, resolve_credential

# Options that apply to the coordinator's process, not to the model.
_OF_COORDINATOR = (
    "port", "http", "http_tls", "state_dir", "name", "min_devices", "mdns_interfaces", "encrypt_data_plane", "standby",
    "leader",
)  # fmt: skip
_READY_SECONDS = 1800.0  # until a model that was added is ready: profiles and weights take minutes on slow devices
_POLL_SECONDS = 0.3


def serve(
    command: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(help="Model directory or ONNX file. Default: what was served last.", show_default=False),
    ] = None,
    name_as: Annotated[
        str | None,
        typer.Option("--as", help="Name for requests to this model. Default: the model's own name.", metavar="NAME"),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Use the plan in this file, written by `hearth plan --save`.")
    ] = None,
    strategy: options.StrategyOption = "auto",
    objective: options.ObjectiveOption = None,
    dim: options.DimsOption = [],  # noqa: B006 (typer's form of an empty default)
    time_limit: options.TimeLimitOption = None,
    no_congestion: options.NoCongestionOption = False,
    tiles: options.TilesOption = "off",
    no_learn: options.NoLearnOption = False,
    seq_len: options.SeqLenOption = None,
    context: options.ContextOption = None,
    sequences: options.SequencesOption = None,
    no_kv_copies: options.NoKvCopiesOption = False,
    kv_cache: options.KvCacheOption = None,
    shared_prefixes: options.SharedPrefixesOption = False,
    speculate: options.SpeculateOption = "auto",
    draft: options.DraftOption = None,
    weights: options.WeightsOption = "float32",
    deterministic: options.DeterministicOption = False,
    wire: options.WireOption = "exact",
    lz4: options.Lz4Option = "auto",
    accuracy_budget: Annotated[
        float | None,
        typer.Option(
            help="Maximum relative error of the output, or of a decoder's logits (0.01: one percent), from a lossy format of "
            "activations. Measures all formats and uses the fastest within this budget.",
            metavar="X",
        ),
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin", help="Where memory is short, models that are not pinned make room for this one.")
    ] = False,
    keep_alive: Annotated[
        str | None,
        typer.Option(
            help="Unload the model after this time without a request (30, 10min); the next request loads it again, and waits.",
            metavar="TIME",
        ),
    ] = None,
    exclude: options.ExcludeOption = [],  # noqa: B006
    limit: options.LimitOption = [],  # noqa: B006
    min_devices: Annotated[int | None, typer.Option(help="Wait until this many devices are present.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port for clients (default 47830; 0: any free port).")] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="Also answer OpenAI's and Ollama's APIs over HTTP at this address, say 127.0.0.1 (port 47880).",
            metavar="HOST[:PORT]",
        ),
    ] = None,
    http_tls: Annotated[
        bool | None,
        typer.Option(
            "--http-tls", help="With --http: speak TLS with a self-made certificate, which clients have to trust."
        ),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Directory of the coordinator's state.")] = None,
    name: Annotated[str | None, typer.Option(help="Display name of the coordinator.")] = None,
    encrypt_data_plane: Annotated[
        bool | None,
        typer.Option(  # in its own panel: two long option names would narrow the help column of all others
            help="Encrypt activations between devices. Turn off for measurements only; prints a warning.",
            metavar="",
            rich_help_panel="Data plane",
        ),
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option("--standby", help="Follow the leading coordinator, and take over when it is gone."),
    ] = None,
    leader: Annotated[
        str | None,
        typer.Option(help="Addresses of coordinators to follow, if mDNS does not find them.", metavar="ADDRESS"),
    ] = None,
    static: options.DevicesOption = None,
    mdns_interfaces: options.InterfacesOption = None,
    key: options.KeyPathOption = None,
) -> None:
    """Serve a model on the devices of this home until stopped. Without MODEL, serve again what was served last.

    While a coordinator runs here, this adds the model to those that it serves, and ends once the model is ready.
    """
    settings = load_coordinator_settings(
        {"devices": static, **{each: command.params[each] for each in _OF_COORDINATOR}}
    )
    if settings.http:
        check_installed(settings.http_tls)
        http_address(settings.http)
    home = resolve_credential(key)
    if not isinstance(home, HomeKey):
        raise BadKey(source=str(key or "the key file"), reason="a coordinator needs the home key")
    if not settings.encrypt_data_plane:
        report("[yellow]warning:[/] activations are not encrypted; anyone on the network can read them")
    goal: Goal | None = None
    if model is not None:
        goal = goal_from_options(options.check_kind(command, model), model, command.params)
    else:
        options.reject_options(command, options.MODEL_OPTIONS, "it needs a MODEL")
    saved: Plan | None = None
    if plan is not None:
        content = read_json_file(plan, lambda reason: BadPlan(reason=f"{plan} {reason}"))
        if reason := why_wrong_kind(content, "plan"):
            raise BadPlan(reason=f"{plan} {reason}")
        saved = plan_from_json(plan.read_bytes())
    if goal is not None and (running := address_of_running(settings.state_dir)) is not None:
        options.reject_options(command, {"static", *_OF_COORDINATOR} - {"state_dir"}, "a coordinator runs here already")
        _add_model(running, home, goal, name_as or "", saved)
        return
    logging.getLogger().setLevel(logging.WARNING)
    size = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *size, console=err, transient=True) as bars:
        tasks = {}

        def progress(device: str, done: int, total: int) -> None:
            if total == 0:
                return
            if done == 0 or device not in tasks:
                tasks[device] = bars.add_task(f"to {device}", total=total)
            bars.update(tasks[device], completed=done)
            if done == total:
                bars.remove_task(tasks.pop(device))

        raise_file_limit()
        asyncio.run(run_coordinator(settings, home, report, progress, goal, saved, name_as or ""))


def _add_model(address: str, key: HomeKey, goal: Goal, name: str, plan: Plan | None) -> None:
    """Have the running coordinator serve one more model, and report its state until it is ready.

    Raises BadRequest if it cannot be served at all, DeadlineExceeded.
    """
    with connect(address, key) as home:
        name = home.serve_model(goal.model_dump_json(), name, plan)
        deadline, shown = time.monotonic() + _READY_SECONDS, ""
        while time.monotonic() < deadline:
            served = next((each for each in home.models() if each.deployment == name), None)
            if served is None:
                raise BadRequest(reason=f"{name} was stopped before it was ready")
            if served.has_ended:
                home.stop_model(name)
                raise BadRequest(reason=served.state)
            if served.state != shown:
                shown = served.state
                report(f"{escape(name)}: {escape(shown)}")
            if served.ready:
                return
            time.sleep(_POLL_SECONDS)
    raise DeadlineExceeded(action=f"getting {name} ready ({shown})", seconds=_READY_SECONDS)
