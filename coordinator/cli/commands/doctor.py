"""`hearth doctor`: checks this device and the network, with advice for each problem."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from coordinator.cli.options import AsJsonOption, InterfacesOption, KeyPathOption, interface_list
from coordinator.cli.output import out, print_json
from hearth.platform.security import default_key_path

_MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}


def doctor(
    interface: Annotated[str | None, typer.Option(help="Check this network interface or address.")] = None,
    mdns_interfaces: InterfacesOption = None,
    key: KeyPathOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Check versions, libraries, network interface, multicast, firewall, key, disk, clocks, agents, GPUs and coordinators."""
    from coordinator.cli.doctor_checks import run_checks

    findings = run_checks(key or default_key_path(os.environ), interface, interface_list(mdns_interfaces))
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
    else:
        for finding in findings:
            out.print(f"{_MARKS[finding.status]} {finding.check}: {finding.what}", soft_wrap=True)
            if finding.do:
                out.print(f"        -> {finding.do}", soft_wrap=True)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)
