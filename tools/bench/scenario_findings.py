"""Rows of the experiment with all scenarios of the testbed, their findings and their table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from hearth.platform.units import format_seconds
from tools.bench.findings import COUNT, PERCENT, Finding, at_most, summarise, without_target
from tools.bench.results import Summary, Table
from tools.bench.stats import Ratio, bootstrap_interval, paired_ratio

AUTO = "auto"
LOCAL = "local"
TARGET_ERROR = 0.20  # median of the relative errors of predictions, in each scenario
TARGET_RATIO = 1.05  # `auto` / the best single device, median of paired rounds
CLAIM_ROUNDS = 15  # rounds that a claim needs


class ScenarioRow(BaseModel):
    """One plan of a workload in a scenario. `same_plan_as`: the strategy whose plan is the same, measured once for both."""

    model_config = ConfigDict(frozen=True)

    scenario: str
    workload: str
    strategy: str
    plan: str  # in a few words
    media: tuple[str, ...] = ()  # devices of each medium in the profile; of graphs: not recorded
    actual_media: tuple[str, ...] | None = None  # those of the scenario; None: not recorded
    predicted_seconds: float = Field(gt=0)
    seconds: tuple[float, ...] = Field(min_length=1)  # by round
    # Of a decoder, the part of both until the first token.
    predicted_prompt_seconds: float = 0.0
    prompt_seconds: tuple[float, ...] = ()
    same_plan_as: str | None = None
    distrust: str = ""  # why the times cannot be trusted: other programs ran during the rounds
    errors: tuple[str, ...] = ()  # of requests

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def prediction_error(self) -> float:
        """predicted / median - 1."""
        return self.predicted_seconds / self.median_seconds - 1

    @property
    def at(self) -> str:
        return f"{self.scenario}, {self.workload}"


def _best_single_device(row: ScenarioRow, rows: Iterable[ScenarioRow]) -> ScenarioRow | None:
    """The row to compare with. None: the same plan, or no single device was measured."""
    local = next((each for each in rows if each.at == row.at and each.strategy == LOCAL), None)
    return None if row is local or row.same_plan_as == LOCAL else local


def ratio_to_local(row: ScenarioRow, rows: Iterable[ScenarioRow]) -> Ratio | None:
    """Time over that of the best single device in the same rounds. None: the same plan, or no single device was measured."""
    local = _best_single_device(row, rows)
    return paired_ratio(row.seconds, local.seconds) if local else None


def rescaled_error(row: ScenarioRow, rows: Iterable[ScenarioRow]) -> float | None:
    """Relative error of the prediction, rescaled by the steps of the best single device in the same rounds.

    It leaves out what made all devices slower or faster alike since they were profiled. None: in the same cases as
    `ratio_to_local`.
    """
    local = _best_single_device(row, rows)
    if local is None:
        return None
    return row.predicted_seconds / local.predicted_seconds / paired_ratio(row.seconds, local.seconds).median - 1


def summarise_scenarios(rows: Sequence[ScenarioRow]) -> Summary:
    """Findings by scenario, and the table of all rows."""
    findings: list[Finding] = []
    for scenario in dict.fromkeys(row.scenario for row in rows):
        group = [row for row in rows if row.scenario == scenario]
        measured = [row for row in group if row.same_plan_as is None]
        errors = [abs(row.prediction_error) for row in measured]
        worst = max(measured, key=lambda row: abs(row.prediction_error))
        detail = f"{len(errors)} plans; worst {worst.prediction_error:+.0%}: {worst.workload}, {worst.strategy}"
        figure = f"{scenario}: error of predictions, median"
        findings.append(at_most(figure, statistics.median(errors), TARGET_ERROR, PERCENT, detail))
        rescaled = [abs(error) for row in measured if (error := rescaled_error(row, rows)) is not None]
        if rescaled:
            figure = f"{scenario}: the same, rescaled by the best single device"
            findings.append(
                without_target(figure, statistics.median(rescaled), PERCENT, f"{len(rescaled)} other plans")
            )
        findings += [_of_auto(row, rows) for row in group if row.strategy == AUTO]
        findings += _of_media(scenario, group)
    failed = sum(len(row.errors) for row in rows)
    findings.append(at_most("failed requests", failed, 0, "{:.0f}".format))
    least = min((len(row.seconds) for row in rows), default=0)
    title = f"{least} rounds" + ("" if least >= CLAIM_ROUNDS else f"; a claim needs {CLAIM_ROUNDS}")
    return summarise(title, findings, _table(rows))


def _of_media(scenario: str, rows: Sequence[ScenarioRow]) -> list[Finding]:
    """Media that a profile lacks, or has although there is none, of all workloads."""
    known = [row for row in rows if row.actual_media is not None]
    if not known:
        return []
    wrong = {f"{row.workload}: {each}" for row in known for each in {*row.media} ^ {*(row.actual_media or ())}}
    return [at_most(f"{scenario}: media missed or invented", len(wrong), 0, COUNT, "; ".join(sorted(wrong)))]


def _of_auto(row: ScenarioRow, rows: Sequence[ScenarioRow]) -> Finding:
    figure = f"{row.at}: time of auto, over that of the best single device"
    if row.same_plan_as == LOCAL:
        return without_target(figure, 1.0, "{:.2f}".format, "the same plan, measured once")
    ratio = ratio_to_local(row, rows)
    if ratio is None:
        raise ValueError(f"{row.at}: no single device was measured")
    return at_most(figure, ratio.median, TARGET_RATIO, "{:.2f}".format, f"{ratio.interval}, {row.plan}")


_COLUMNS = (
    "scenario, workload", "strategy", "plan", "predicted", "measured", "interval", "error", "rescaled", "over one device",
)  # fmt: skip


def _table(rows: Sequence[ScenarioRow]) -> Table:
    media = dict.fromkeys(f"{row.scenario}: one medium for {each}" for row in rows for each in row.media)
    distrusted = dict.fromkeys(f"{row.at}: untrusted, {row.distrust}" for row in rows if row.distrust)
    notes = [*media, *distrusted]
    return Table.of("seconds of one step or request", _COLUMNS, (_cells(row, rows) for row in rows), notes)


def _cells(row: ScenarioRow, rows: Sequence[ScenarioRow]) -> tuple[str, ...]:
    low, high = bootstrap_interval(row.seconds)
    ratio = ratio_to_local(row, rows)
    over = f"{ratio.median:.2f} {ratio.interval}" if ratio is not None else "same plan" if row.same_plan_as else "-"
    predicted, measured = format_seconds(row.predicted_seconds), format_seconds(row.median_seconds)
    if row.prompt_seconds:
        predicted += f" (prompt {format_seconds(row.predicted_prompt_seconds)})"
        measured += f" (prompt {format_seconds(statistics.median(row.prompt_seconds))})"
    rescaled = rescaled_error(row, rows)
    return (
        f"{row.at} (untrusted)" if row.distrust else row.at, row.strategy, row.plan, predicted, measured,
        f"{format_seconds(low)}..{format_seconds(high)}", f"{row.prediction_error:+.0%}",
        "-" if rescaled is None else f"{rescaled:+.0%}", over,
    )  # fmt: skip
