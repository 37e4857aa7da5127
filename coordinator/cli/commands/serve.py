"""`hearth serve`: the coordinator. Deploys a model, keeps it running and answers requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from coordinator.cli.goals import goal_from_options
from coordinator.cli.model_options import ServeOptions, check_kind, reject_options
from coordinator.cli.options import DevicesOption, InterfacesOption, KeyPathOption
from coordinator.cli.output import err, report
from coordinator.http.settings import check_installed
from coordinator.models.file_kinds import read_json_file, why_wrong_kind
from coordinator.serve.clients.http_gateway import http_address
from coordinator.serve.config import load_coordinator_settings
from coordinator.serve.roles import run_coordinator
from coordinator.serve.state import Goal, address_of_running
from hearth.client.sync import connect
from hearth.errors import BadKey, BadPlan, BadRequest, DeadlineExceeded
from hearth.plan.plan import Plan, plan_from_json
from hearth.platform.machine import raise_file_limit
from hearth.platform.security import HomeKey, resolve_credential

_READY_SECONDS = 1800.0  # until a model that was added is ready: profiles and weights take minutes on slow devices
_POLL_SECONDS = 0.3


@dataclass(frozen=True)
class CoordinatorOptions:
    """Options of the coordinator's process, which override its settings."""

    min_devices: Annotated[int | None, typer.Option(help="Wait until this many devices are present.")] = None
    port: Annotated[int | None, typer.Option(help="TCP port for clients (default 47830; 0: any free port).")] = None
    http: Annotated[
        str | None,
        typer.Option(
            help="Also answer OpenAI's and Ollama's APIs over HTTP at this address, for example 127.0.0.1 (port 47880).",
            metavar="HOST[:PORT]",
        ),
    ] = None
    http_tls: Annotated[
        bool | None,
        typer.Option(
            "--http-tls", help="With --http: speak TLS with a self-made certificate, which clients have to trust."
        ),
    ] = None
    state_dir: Annotated[Path | None, typer.Option(help="Directory of the coordinator's state.")] = None
    name: Annotated[str | None, typer.Option(help="Display name of the coordinator.")] = None
    encrypt_data_plane: Annotated[
        bool | None,
        typer.Option(  # in its own panel: two long option names would narrow the help column of all others
            help="Encrypt activations between devices. Turn off for measurements only; prints a warning.",
            metavar="",
            rich_help_panel="Data plane",
        ),
    ] = None
    standby: Annotated[
        bool | None, typer.Option("--standby", help="Follow the leading coordinator, and take over when it is gone.")
    ] = None
    leader: Annotated[
        str | None,
        typer.Option(help="Addresses of coordinators to follow, if mDNS does not find them.", metavar="ADDRESS"),
    ] = None
    devices: DevicesOption = None
    mdns_interfaces: InterfacesOption = None


def serve(
    command: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(help="Model directory or ONNX file. Default: what was served last.", show_default=False),
    ] = None,
    *,
    options: ServeOptions,
    process: CoordinatorOptions,
    key: KeyPathOption = None,
) -> None:
    """Serve a model on the devices of this home until stopped. Without MODEL, serve again what was served last.

    While a coordinator runs here, this adds the model to those that it serves, and ends once the model is ready.
    """
    settings = load_coordinator_settings(vars(process))
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
        goal = goal_from_options(check_kind(command, model), model, options)
    else:
        reject_options(command, vars(options), "it needs a MODEL")
    saved = _read_plan(options.plan) if options.plan is not None else None
    name = options.name_as or ""
    if goal is not None and (running := address_of_running(settings.state_dir)) is not None:
        reject_options(command, vars(process).keys() - {"state_dir"}, "a coordinator runs here already")
        _add_model(running, home, goal, name, saved)
        return
    logging.getLogger().setLevel(logging.WARNING)
    raise_file_limit()
    with _push_progress() as progress:
        asyncio.run(run_coordinator(settings, home, report, progress, goal, saved, name))


def _read_plan(path: Path) -> Plan:
    """The plan in a file of `hearth plan --save`. Raises BadPlan."""
    content = read_json_file(path, lambda reason: BadPlan(reason=f"{path} {reason}"))
    if reason := why_wrong_kind(content, "plan"):
        raise BadPlan(reason=f"{path} {reason}")
    return plan_from_json(path.read_bytes())


@contextmanager
def _push_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each device that gets weights; call it with the device, and bytes so far and in all."""
    size = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *size, console=err, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(device: str, done: int, total: int) -> None:
            if total == 0:
                return
            if done == 0 or device not in tasks:
                tasks[device] = bars.add_task(f"to {device}", total=total)
            bars.update(tasks[device], completed=done)
            if done == total:
                bars.remove_task(tasks.pop(device))

        yield progress


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
