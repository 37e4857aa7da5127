"""Findings of the graph experiments, for pipelines and for latency placements, and their table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hearth.platform.units import format_seconds
from hearth.wire.messages import WireStats
from tools.bench.findings import COUNT, RATIO, Finding, at_least, at_most, equal, within
from tools.bench.graph_home import Served
from tools.bench.results import Table
from tools.bench.stats import paired_ratio

TARGET_GAIN = 2.2  # inferences per second of three devices over one
TARGET_ERROR = 0.15  # relative error of the predicted bottleneck
NO_GAIN = 1.01  # below this gain the planner uses fewer devices
# Largest accepted difference for each wire format, relative to the largest output value. `exact` allows for other kernels
# and summation orders, not for a wrong tensor; the others for the rounding of their values.
_TOLERANCE = {"exact": 1e-4, "fp16": 0.02, "bf16": 0.1, "int8": 0.3}


def of_pipelines(one: Served, pipelines: Sequence[Served], target_gain: float | None) -> list[Finding]:
    """Findings of pipelines against one device. `target_gain`: target for the best pipeline; None: no target."""
    findings = []
    if target_gain is not None:
        best = max(pipelines, key=lambda each: paired_ratio(one.seconds, each.seconds).median)
        findings.append(gain(f"{best.label}: inferences a second, over one device's", best, one, target_gain))
    worst = max((one, *pipelines), key=lambda each: abs(each.error))
    figure = f"bottleneck, predicted against measured, where they differ most: {worst.label}"
    return [*findings, within(figure, worst.error, TARGET_ERROR), *of_answers((one, *pipelines))]


def of_placements(groups: Sequence[Sequence[Served]]) -> list[Finding]:
    """Findings by link rate; each group: one device, moirai, auto and, if there is one, a forced plan.

    Where several devices are predicted to win, they must be faster. Where one device is, `auto` must take one, and the
    forced plan, which is on several devices, must be slower.
    """
    findings: list[Finding] = []
    winners: set[str] = set()
    for one, moirai, auto, *forced in groups:
        if predicts_gain(one, moirai):
            winners.add("several devices")
            findings += [gain(f"{each.label}: latency under one device's", each, one) for each in (moirai, auto)]
        else:
            winners.add("one device")
            figure = f"{auto.label}: devices where no plan on several is predicted to be faster"
            findings.append(equal(figure, len(auto.devices), 1, COUNT))
            findings += [gain(f"{one.label}: latency under that of {each.label}", one, each) for each in forced]
    findings += of_answers([each for group in groups for each in group])
    figure = "rates at which several devices win, and at which one does, according to the simulator"
    missing = {"several devices", "one device"} - winners
    measured = f"none for {', '.join(sorted(missing))}" if missing else "both"
    return [*findings, Finding(figure=figure, measured=measured, target="both", holds=not missing)]


def predicts_gain(one: Served, placed: Served) -> bool:
    """Whether the placement is predicted to be faster on several devices than on one."""
    return len(placed.devices) > 1 and one.predicted_seconds > NO_GAIN * placed.predicted_seconds


def of_answers(served: Sequence[Served]) -> list[Finding]:
    """Findings on the correctness of the answers."""
    findings = []
    for wire in dict.fromkeys(each.wire for each in served):
        own = [each for plan in served if plan.wire == wire for each in plan.rounds]
        worst, answers = max(each.difference for each in own), sum(each.answers for each in own)
        figure = f"largest difference of an output from one device's, of its largest value ({wire} on the wire)"
        findings.append(at_most(figure, worst, _TOLERANCE[wire], "{:.1e}".format, f"{answers} answers"))
    errors = [error for plan in served for each in plan.rounds for error in each.errors]
    findings.append(equal("requests that failed", len(errors), 0, COUNT, "; ".join(sorted(set(errors)))))
    return findings


def gain(figure: str, faster: Served, slower: Served, target: float = 1.0) -> Finding:
    """How many times as fast a plan is."""
    expected = slower.predicted_seconds / faster.predicted_seconds
    measured = paired_ratio(slower.seconds, faster.seconds)
    detail = f"{measured.interval}; predicted {expected:.2f}"
    return at_least(figure, measured.median, target, RATIO, detail)


def served_table(title: str, served: Sequence[Served]) -> Table:
    """The measurements, one row for each plan. The first plan at each link rate is that of one device."""
    ones = {each.mbit: each for each in reversed(served)}

    def over_one(each: Served) -> str:
        one = ones[each.mbit]
        if len(one.seconds) != len(each.seconds):  # not in the same rounds
            return f"{one.median_seconds / each.median_seconds:.2f}"
        gain = paired_ratio(one.seconds, each.seconds)
        return f"{gain.median:.2f} {gain.interval}"

    def sent(each: Served) -> str:
        wire = WireStats.sum(part.wire for part in each.rounds)
        return f"{wire.sent_bytes / wire.raw_bytes:.0%}" if wire.raw_bytes else "-"

    columns: Mapping[str, Callable[[Served], object]] = {
        "plan": lambda each: each.label,
        "strategy": lambda each: each.strategy,
        "devices": lambda each: ", ".join(each.devices),
        "segments": lambda each: each.segments,
        "stages, predicted": lambda each: _stages(each.stage_seconds),
        "segments, measured": lambda each: _stages(each.busy_seconds),
        "predicted": lambda each: format_seconds(each.predicted_seconds),
        "measured": lambda each: format_seconds(each.median_seconds),
        "min..max": lambda each: f"{format_seconds(min(each.seconds))}..{format_seconds(max(each.seconds))}",
        "predicted off by": lambda each: f"{each.error:+.1%}",
        "answers a second": lambda each: f"{1 / each.median_seconds:.2f}",
        "times one device's": over_one,
        "sent, of raw": sent,
    }
    return Table.of_columns(title, columns, served)


def _stages(seconds: Iterable[float]) -> str:
    return " + ".join(map(format_seconds, seconds)) or "-"
