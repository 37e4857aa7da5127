"""`hearth ps` and `hearth stop`: what the running coordinator serves, and the end of one of its models."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.options import AsJsonOption, HomeOptions, TimeoutOption
from coordinator.cli.output import out, print_json
from coordinator.cli.render.tables import model_table


def ps(timeout: TimeoutOption = 10.0, *, where: HomeOptions, as_json: AsJsonOption = False) -> None:
    """List the models that the home serves. The first of each kind answers requests that name none."""
    with where.connect(timeout) as home:
        models = home.models(timeout)
    if as_json:
        print_json({"models": [each.model_dump(mode="json") for each in models]})
    elif not models:
        out.print("no model is served; add one with `hearth serve MODEL`")
    else:
        out.print(model_table(models))


def stop(
    name: Annotated[str, typer.Argument(help="Name of the deployment, as `hearth ps` shows it.")],
    timeout: TimeoutOption = 120.0,
    *,
    where: HomeOptions,
) -> None:
    """Stop serving a model, after its running requests have finished. Needs an admin or home key."""
    with where.connect() as home:
        out.print(f"stopped {home.stop_model(name, timeout)}")
