"""Findings of the graph experiments, for pipelines and for latency placements. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hearth.platform.units import format_seconds
from tools.bench.findings import COUNT, RATIO, Finding, at_least, at_most, equal, within, without_target
from tools.bench.graph_home import Served
from tools.bench.results import Table
from tools.bench.stats import paired_ratio

TARGET_GAIN = 2.2  # inferences per second of three devices over one
TARGET_ERROR = 0.15  # relative error of the predicted bottleneck
ONE_DEVICE = "local"
NO_GAIN = 1.01  # below this gain the planner uses fewer devices
# Largest accepted difference for each wire format, relative to the largest output value. `exact` allows for other kernels
# and summation orders, not for a wrong tensor; the others for the rounding of their values.
_TOLERANCE = {"exact": 1e-4, "fp16": 0.02, "bf16": 0.1, "int8": 0.3}


def of_pipelines(one: Served, pipelines: Sequence[Served], target_gain: float | None) -> list[Finding]:
    """Findings of pipelines against one device. `target_gain`: target for the best pipeline; None: no target."""
    detail = f"{_range(one.seconds)} each"
    findings = [without_target(f"{one.label}: inferences a second", 1 / one.median_seconds, "{:.2f}".format, detail)]
    best = max(pipelines, key=lambda each: paired_ratio(one.seconds, each.seconds).median)
    for each in pipelines:
        gain = paired_ratio(one.seconds, each.seconds)
        figure = f"{each.label}: inferences a second, over one device's"
        detail = f"{gain.interval}, {1 / each.median_seconds:.2f} a second"
        if target_gain is not None and each is best:
            findings.append(at_least(figure, gain.median, target_gain, RATIO, detail))
        else:
            findings.append(without_target(figure, gain.median, RATIO, detail))
    for each in (one, *pipelines):
        figure = f"{each.label}: bottleneck, predicted against measured"
        findings.append(within(figure, each.error, TARGET_ERROR, _prediction(each)))
    return [*findings, *of_answers((one, *pipelines))]


def of_placements(groups: Iterable[Sequence[Served]]) -> list[Finding]:
    """Findings by link rate; each group: one device, moirai, auto and, if there is one, a forced plan.

    The forced plan is on several devices although it is not predicted to be faster.
    """
    findings: list[Finding] = []
    winners: set[str] = set()
    for one, moirai, auto, *forced in groups:
        several = len(moirai.devices) > 1 and one.predicted_seconds > NO_GAIN * moirai.predicted_seconds
        winners.add("several devices" if several else "one device")
        findings += _of_several(one, moirai, auto) if several else _of_one(one, auto, forced)
        for each in (one, moirai, auto, *forced):
            figure = f"{each.label}: latency, predicted against measured"
            findings.append(without_target(figure, each.error, "{:+.1%}".format, _prediction(each)))
        findings += of_answers((one, moirai, auto, *forced))
    figure = "rates at which several devices win, and at which one does, according to the simulator"
    missing = {"several devices", "one device"} - winners
    measured = f"none for {', '.join(sorted(missing))}" if missing else "both"
    return [*findings, Finding(figure=figure, measured=measured, target="both", holds=not missing)]


def _of_several(one: Served, moirai: Served, auto: Served) -> list[Finding]:
    """Where several devices are predicted to win, they must be faster."""
    at, expected = f"{one.mbit:g} Mbit/s", one.predicted_seconds / moirai.predicted_seconds
    gain, best = paired_ratio(one.seconds, moirai.seconds), paired_ratio(one.seconds, auto.seconds)
    on = f"{auto.strategy} on {len(auto.devices)}"
    figure = f"{at}: moirai over the best single device; predicted {expected:.2f}"
    return [
        at_least(figure, gain.median, 1.0, RATIO, f"{gain.interval}, {_medians(moirai, one)}"),
        at_least(f"{at}: auto over the best single device ({on})", best.median, 1.0, RATIO, best.interval),
    ]


def _of_one(one: Served, auto: Served, forced: Sequence[Served]) -> list[Finding]:
    """Where one device is predicted to win, `auto` must take one, and a plan on several must be slower."""
    at = f"{one.mbit:g} Mbit/s"
    figure = f"{at}: devices that auto takes where no plan on several is predicted to be faster"
    findings = [equal(figure, len(auto.devices), 1, COUNT)]
    for each in forced:
        loss, expected = paired_ratio(each.seconds, one.seconds), each.predicted_seconds / one.predicted_seconds
        figure = f"{at}: a plan on {len(each.devices)} devices, latency over one device's; predicted {expected:.2f}"
        findings.append(at_least(figure, loss.median, 1.0, RATIO, f"{loss.interval}, {_medians(each, one)}"))
    return findings


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


_COLUMNS = (
    "plan", "devices", "segments", "stages, predicted", "segments, measured", "predicted", "measured", "min..max",
    "predicted off by", "sent, of raw",
)  # fmt: skip


def served_table(title: str, served: Sequence[Served]) -> Table:
    """The measurements, one row for each plan."""
    return Table.of(title, _COLUMNS, map(_row, served))


def _row(served: Served) -> tuple[str, ...]:
    stages, busy = (
        " + ".join(map(format_seconds, each)) or "-" for each in (served.stage_seconds, served.busy_seconds)
    )
    raw, sent = sum(each.raw_bytes for each in served.rounds), sum(each.sent_bytes for each in served.rounds)
    return (
        served.label, ", ".join(served.devices), str(served.segments), stages, busy,
        format_seconds(served.predicted_seconds), format_seconds(served.median_seconds), _range(served.seconds),
        f"{served.error:+.1%}", f"{sent / raw:.0%}" if raw else "-",
    )  # fmt: skip


def _prediction(each: Served) -> str:
    return f"{format_seconds(each.predicted_seconds)} against {format_seconds(each.median_seconds)}"


def _medians(one: Served, other: Served) -> str:
    return f"{format_seconds(one.median_seconds)} against {format_seconds(other.median_seconds)}"


def _range(seconds: Sequence[float]) -> str:
    return f"{format_seconds(min(seconds))}..{format_seconds(max(seconds))}"
