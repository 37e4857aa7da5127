"""Lines and tables about what a coordinator learns from requests."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table

from coordinator.cli.render.tables import make_table, right_column
from hearth.platform.units import format_seconds
from hearth.wire.messages import Learning, PlanTrial


def learning_lines(learning: Learning) -> list[str]:
    """The deployed plan as predicted and measured, and what was gained so far."""
    lines = [f"learning: {learning.state}"]
    if learning.measured_seconds is not None:
        predicted, measured = format_seconds(learning.predicted_seconds), format_seconds(learning.measured_seconds)
        line = f"deployed plan: {measured} a request, predicted {predicted}"
        if learning.pearson is not None and learning.spearman is not None:
            line += f"; segments: Pearson {learning.pearson:.2f}, Spearman {learning.spearman:.2f}"
        lines.append(line)
    tried = len(learning.trials)
    if tried or learning.gain:
        lines.append(f"{tried} plans tried with {learning.trial_requests} requests; gain so far {learning.gain:.1%}")
    return lines


def trial_table(trials: Sequence[PlanTrial]) -> Table:
    """Plans that were tried, latest last."""
    table = make_table(
        Column("tried", no_wrap=True),
        Column("devices", overflow="fold"),
        *map(right_column, ("predicted", "requests", "gain", "error")),
        "outcome",
    )
    for each in trials:
        table.add_row(
            each.planner,
            ", ".join(each.devices),
            format_seconds(each.predicted_seconds),
            str(each.num_requests),
            f"{each.gain:.1%}",
            f"{each.standard_error:.1%}",
            each.outcome,
        )
    return table
