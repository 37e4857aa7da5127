"""`python -m tools.testbed`: command line of the emulated edge cluster."""

from __future__ import annotations

import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from coordinator.cli.output import handles_errors, out
from coordinator.models.checkpoint.families import read_spec
from hearth.errors import BadSetting
from hearth.platform.units import format_bytes
from tools import interrupts
from tools.testbed.cluster import Testbed, check_rights
from tools.testbed.registry import running_testbeds
from tools.testbed.scenario import SCENARIOS, load_scenario

_COMMAND = "python -m tools.testbed"
ScenarioName = Annotated[
    str | None, typer.Option("--scenario", help="Scenario of the testbed, if several are up.", show_default=False)
]

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
    """Set up networks and limits, and start hearth-agent on every device. Ctrl-C stops and removes everything."""
    chosen = load_scenario(scenario)
    if mbit is not None:
        chosen = chosen.with_mbit(mbit)
    if model is not None:
        read_spec(model)  # report a missing or invalid model before starting anything
    with tempfile.TemporaryDirectory(prefix="hearth-testbed-") as folder, Testbed(chosen, Path(folder)) as testbed:
        testbed.start_agents()
        testbed.wait_for_agents()
        if model is not None:
            testbed.start_coordinator(str(model.resolve()), "--min-devices", str(len(chosen.devices)))
        _print_devices(testbed)
        link = f"{_COMMAND} link {chosen.devices[-1].name} --mbit 20"
        out.print(
            f"\nin another terminal: `{_COMMAND} run -- hearth devices`, `{link}`; logs: {folder}", soft_wrap=True
        )
        with suppress(KeyboardInterrupt):
            signal.pause()


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
    testbed = _running(scenario)
    testbed.execute(device or testbed.scenario.coordinator_device, *command, limited=limited)


@app.command()
@handles_errors
def link(
    device: Annotated[str, typer.Argument(help="Name of a device.")],
    mbit: Annotated[float | None, typer.Option(help="New rate in each direction, without scaling.")] = None,
    cut: Annotated[bool, typer.Option("--cut", help="Disconnect the device.")] = False,
    mend: Annotated[bool, typer.Option("--mend", help="Reconnect the device.")] = False,
    scenario: ScenarioName = None,
) -> None:
    """Change a device's link in a running testbed."""
    if (mbit is not None) + cut + mend != 1:
        raise BadSetting(setting="link", reason="one of --mbit N, --cut and --mend is needed")
    testbed = _running(scenario)
    name = testbed.device(device).name
    if mbit is not None:
        testbed.network.set_mbit(name, mbit)
    elif cut:
        testbed.network.cut(name)
    else:
        testbed.network.mend(name)
    _print_devices(testbed)


def _running(scenario: str | None) -> Testbed:
    """The testbed of this scenario, or the only one running. Raises BadSetting if that is none or ambiguous."""
    check_rights()
    found = [running for running in running_testbeds() if not running.orphaned]
    fitting = [running for running in found if scenario in (None, running.scenario.name)]
    if len(fitting) != 1:
        names = ", ".join(running.scenario.name for running in found) or "none"
        reason = f"one of those that are up is needed: {names}; `{_COMMAND} up SCENARIO` makes one"
        raise BadSetting(setting="scenario", reason=reason)
    return Testbed.attached(fitting[0])


def _print_devices(testbed: Testbed) -> None:
    table = Table("device", "address", "CPU share", "memory", "Mbit/s", show_edge=False)
    for device in testbed.scenario.devices:
        state = testbed.network.state(device.name)
        memory = "no limit" if device.memory_bytes is None else format_bytes(device.memory_bytes)
        rate = "cut" if state.is_cut else f"{state.mbit:.1f}"
        table.add_row(device.name, testbed.address(device.name), f"{device.cpu_share:.2f}", memory, rate)
    out.print(table)


if __name__ == "__main__":
    interrupts.run(app)
