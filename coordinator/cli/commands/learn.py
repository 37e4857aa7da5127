"""`hearth learn`: have the running coordinator try plans of the served graph on the devices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from coordinator.cli.options import (
    AddressOption,
    AsJsonOption,
    InterfacesOption,
    KeyPathOption,
    ServedModelOption,
    TimeoutOption,
    interface_list,
)
from coordinator.cli.output import out, print_json, print_line, report
from coordinator.cli.render.learning import learning_lines, trial_table
from hearth.client.sync import Home, connect
from hearth.errors import BadRequest, BadSetting
from hearth.wire.messages import Learning

_POLL_SECONDS = 1.0  # interval of looking at what the coordinator does: a trial takes seconds


def learn(
    model: Annotated[
        Path | None,
        typer.Argument(help="The ONNX file that is served. Default: the oldest one.", show_default=False),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time limit in minutes.", min=0.1, max=1440)] = 5.0,
    name: ServedModelOption = None,
    timeout: TimeoutOption = 10.0,
    address: AddressOption = None,
    mdns_interfaces: InterfacesOption = None,
    key: KeyPathOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Measure the served graph's plan and try others beside it, while requests go on. Needs an admin or home key."""
    with connect(address, key, timeout, interface_list(mdns_interfaces)) as home:
        name = name or (model.name if model is not None else _oldest_graph(home, timeout))
        served = home.status(timeout, model=name).model_path
        if model is not None and Path(served).name != model.name:
            raise BadSetting(setting="MODEL", reason=f"the coordinator serves {served}, not {model}")
        home.learn(60.0 * minutes, model=name)
        found = _watch(home, name, time.monotonic() + 60.0 * minutes, timeout)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    for line in learning_lines(found):
        print_line(escape(line))
    if found.trials:
        out.print(trial_table(found.trials))


def _oldest_graph(home: Home, timeout_seconds: float) -> str | None:
    """The name of the oldest ONNX graph that is served; None if there is none."""
    models = home.models(timeout_seconds)
    return next((each.deployment for each in models if each.answers == "arrays"), None)


def _watch(home: Home, name: str | None, deadline: float, timeout_seconds: float) -> Learning:
    """Report what the coordinator does until the deadline, or until nothing is left to try."""
    shown = ""
    while True:
        learning = home.status(timeout_seconds, model=name).learning
        if learning is None:  # it was started again, with another model or with --no-learn
            raise BadRequest(reason="what the coordinator serves now is served without learning")
        if learning.state != shown:
            shown = learning.state
            report(escape(shown))
        if not learning.is_asked or time.monotonic() >= deadline:
            return learning
        time.sleep(_POLL_SECONDS)
