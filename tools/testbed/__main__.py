"""`python -m tools.testbed`: command line of the emulated edge cluster."""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.table import Table

from coordinator.cli.output import err, handles_errors, out
from coordinator.models.checkpoint.families import read_spec
from hearth.errors import BadSetting
from hearth.platform.units import format_bytes
from tools.testbed.cluster import Testbed, check_possible, check_rights, remove_orphans
from tools.testbed.registry import Running, locked, running_testbeds
from tools.testbed.scenario import SCENARIOS, load_scenario

_FOLDER_PREFIX = "hearth-testbed-"
_MARK = "HEARTH_TESTBED_RUN"  # environment variable that marks the command and its descendants
_GRACE_SECONDS = 2.0  # that the processes get to end after each signal
_COMMAND = "python -m tools.testbed"

_WHICH = "Scenario of the testbed, if several are running."
ScenarioName = Annotated[str | None, typer.Option("--scenario", help=_WHICH, show_default=False)]
DeviceName = Annotated[str, typer.Argument(help="Name of a device, as `status` shows it.")]

app = typer.Typer(
    name=_COMMAND,
    help="Emulate a home of small computers on this machine, with namespaces, shaped links, CPU shares, memory limits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
@handles_errors
def scenarios() -> None:
    """List the built-in scenarios. Other commands also accept a TOML file of the same format."""
    table = Table("scenario", "devices", "description", show_edge=False)
    for path in sorted(SCENARIOS.glob("*.toml")):
        scenario = load_scenario(path)
        table.add_row(scenario.name, str(len(scenario.devices)), scenario.description)
    out.print(table)


@app.command()
@handles_errors
def up(
    scenario: Annotated[str, typer.Argument(help="Name of a scenario, or a TOML file.")],
    model: Annotated[Path | None, typer.Option(help="Also serve this model on all devices.")] = None,
    mbit: Annotated[float | None, typer.Option(help="Rate of every link, instead of the scenario's.", min=0.01)] = None,
) -> None:
    """Set up networks and limits, and start hearth-agent on every device. The testbed runs until `down`."""
    chosen = load_scenario(scenario)
    if mbit is not None:
        chosen = chosen.with_mbit(mbit)
    if model is not None:
        read_spec(model)  # report a missing or invalid model before starting anything
    check_possible(chosen)
    if others := running_testbeds():
        names = ", ".join(other.scenario.name for other in others)
        err.print(f"[yellow]warning:[/] {names} is also running and shares this machine's cores", soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    testbed = Testbed(chosen, folder, owned=False)
    try:
        testbed.up()
        testbed.calibrate()
        testbed.start_agents()
        testbed.wait_for_agents()
        if model is not None:
            testbed.start_coordinator(str(model.resolve()), "--min-devices", str(len(chosen.devices)))
    except BaseException:
        testbed.down()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    out.print(_table(testbed))
    if chosen.scale_links:
        out.print(f"links x {testbed.link_scale:.2f}: this machine's speed over that where the scenario was set")
    _say_next(testbed, model is not None)


@app.command()
@handles_errors
def status() -> None:
    """Show the running testbeds of this machine."""
    check_rights()
    found = running_testbeds()
    if not found:
        out.print(f"none is up; `{_COMMAND} up SCENARIO` makes one")
    for running in found:
        out.print(_table(Testbed.attached(running), _whose(running)))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@handles_errors
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="A program and its arguments.")],
    device: Annotated[
        str | None,
        typer.Option("--device", help="Device to run it on. Default: the coordinator's.", show_default=False),
    ] = None,
    limited: Annotated[bool, typer.Option("--limited", help="Apply the device's CPU share and memory limit.")] = False,
    scenario: ScenarioName = None,
) -> None:
    """Run a command on a device. There, `hearth` finds the key, the coordinator and the agents."""
    testbed = _attached(scenario)
    raise typer.Exit(_run_in_foreground(testbed, device or testbed.scenario.coordinator_device, command, limited))


@app.command()
@handles_errors
def link(
    device: DeviceName,
    mbit: Annotated[float | None, typer.Option(help="New rate in each direction, without scaling.")] = None,
    cut: Annotated[bool, typer.Option("--cut", help="Disconnect the device.")] = False,
    mend: Annotated[bool, typer.Option("--mend", help="Reconnect the device.")] = False,
    scenario: ScenarioName = None,
) -> None:
    """Change a device's link in a running testbed."""
    if (mbit is not None) + cut + mend != 1:
        raise BadSetting(setting="link", reason="one of --mbit N, --cut and --mend is needed")
    testbed = _attached(scenario)
    name = testbed.device(device).name
    if mbit is not None:
        testbed.network.set_mbit(name, mbit)
    elif cut:
        testbed.network.cut(name)
    else:
        testbed.network.mend(name)
    out.print(_table(testbed))


@app.command()
@handles_errors
def cpu(
    device: DeviceName,
    share: Annotated[float, typer.Argument(help="Share of one core, such as 0.45.")],
    scenario: ScenarioName = None,
) -> None:
    """Change a device's CPU share in a running testbed."""
    testbed = _attached(scenario)
    testbed.cgroups[testbed.device(device).name].set_cpu_share(share)
    out.print(_table(testbed))


@app.command()
@handles_errors
def down(
    scenario: Annotated[str | None, typer.Argument(help=_WHICH, show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="All running testbeds.")] = False,
) -> None:
    """Stop everything in a testbed and remove it. Testbeds of running tests and benchmarks end with their process."""
    check_rights()
    with locked():
        remove_orphans()
    found = [running for running in running_testbeds() if running.detached]
    if not found:
        out.print("none is up")
        return
    for running in found if every else [_chosen(scenario)]:
        Testbed.attached(running).down()
        folder = Path(running.folder)
        if folder.name.startswith(_FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        out.print(f"{running.scenario.name} is down")


def _run_in_foreground(testbed: Testbed, device: str, command: Sequence[str], limited: bool) -> int:
    """Run a command; returns its exit status in the shell's convention. An interrupt ends all its processes.

    Raises BadSetting if there is no such program.
    """
    environment = testbed.environment()
    if shutil.which(command[0], path=environment["PATH"]) is None:
        raise BadSetting(setting="the command", reason=f"there is no program '{command[0]}'")
    mark = secrets.token_hex(8)
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        process = testbed.popen(device, *command, limited=limited, environment={**environment, _MARK: mark})
        status = process.wait()
    except KeyboardInterrupt:
        # Ctrl-C also reaches the command, so first wait for it to end by itself, then terminate, then kill it.
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if testbed.stop(
                lambda: {pid for pid in testbed.pids(device) if _is_marked(pid, mark)}, number, _GRACE_SECONDS
            ):
                break
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return psutil.Process(pid).environ().get(_MARK) == mark
    except psutil.Error:
        return False


def _attached(scenario: str | None) -> Testbed:
    check_rights()
    return Testbed.attached(_chosen(scenario))


def _chosen(scenario: str | None) -> Running:
    """The testbed of this scenario, or the only one running. Raises BadSetting if that is none or ambiguous."""
    found = [running for running in running_testbeds() if running.detached]
    if not found:
        raise BadSetting(setting="the testbed", reason=f"none is up; `{_COMMAND} up SCENARIO` makes one")
    names = ", ".join(running.scenario.name for running in found)
    fitting = [running for running in found if scenario in (None, running.scenario.name)]
    if len(fitting) != 1:
        reason = f"several are up, name one of {names}" if fitting else f"'{scenario}' is not up, only {names}"
        raise BadSetting(setting="scenario", reason=reason)
    return fitting[0]


def _table(testbed: Testbed, whose: str = "") -> Table:
    scenario = testbed.scenario
    title = f"{scenario.name}{whose}" + (f": {scenario.description}" if scenario.description else "")
    table = Table("device", "address", title=title, title_justify="left", show_edge=False)
    for heading in ("CPU share", "core", "memory", "Mbit/s\n[dim]scenario's[/]", "processes"):
        table.add_column(heading, justify="right")
    for device in scenario.devices:
        try:
            state = testbed.network.state(device.name)
            share = f"{testbed.cgroups[device.name].cpu_share():.2f}"
            rate = "[red]cut[/]" if state.is_cut else f"{state.mbit:.1f}"
        except (BadSetting, OSError):  # removed by another process
            share, rate = "-", "[red]gone[/]"
        table.add_row(
            device.name, testbed.address(device.name), share, "any" if device.core is None else str(device.core),
            "no limit" if device.memory_bytes is None else format_bytes(device.memory_bytes),
            f"{rate}\n[dim]{device.mbit:g}[/]", str(len(testbed.pids(device.name))),
        )  # fmt: skip
    return table


def _whose(running: Running) -> str:
    if running.detached:
        return ""
    return " (left behind)" if running.orphaned else f" (of process {running.owner_pid})"


def _say_next(testbed: Testbed, serves: bool) -> None:
    run, serving = f"{_COMMAND} run -- hearth", "status` until it says serving" if serves else "plan MODEL`"
    link = f"{_COMMAND} link {testbed.scenario.devices[-1].name} --mbit 20"
    out.print(f"\nnext: `{run} devices`, `{run} {serving}, `{link}`, `{_COMMAND} down`", soft_wrap=True)
    out.print(f"[dim]logs: {testbed.folder}[/]", soft_wrap=True)


def main() -> None:
    """Run the command; an error of a program or file is one line."""
    try:
        app()
    except (OSError, subprocess.SubprocessError) as error:
        err.print(f"[red]error:[/] {error}", soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
