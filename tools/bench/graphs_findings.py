"""Findings of the graph benchmark, for pipelines and for latency placements. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from hearth.platform.units import format_seconds
from tools.bench.findings import Finding, at_least, at_most, equal, table
from tools.bench.stats import Ratio, paired_ratio

ASKED_GAIN = 2.2  # inferences per second of three devices over one
ASKED_ERROR = 0.15  # relative error of the predicted bottleneck
ONE_DEVICE = "local"
NO_GAIN = 1.01  # below this gain the planner uses fewer devices
_EQUAL = 1e-4  # relative to the largest output value: allows other kernels and summation orders, not a wrong tensor
# Largest accepted difference for each wire format.
_LOSSY = {"exact": _EQUAL, "fp16": 0.02, "bf16": 0.1, "int8": 0.3}


class Served(BaseModel):
    """Measurements of one plan. `seconds`: per answer of a full pipeline (throughput), or of one request (latency)."""

    model_config = ConfigDict(frozen=True)

    label: str
    strategy: str
    wire: str
    mbit: float = Field(gt=0)
    devices: tuple[str, ...]
    segments: int
    predicted_seconds: float
    stage_seconds: tuple[float, ...] = ()  # by rank, predicted; includes the CPU time of communication
    busy_seconds: tuple[float, ...] = ()  # by rank, of the segments at full load
    seconds: tuple[float, ...] = ()  # by round
    answers: int = 0
    difference: float = 0.0  # largest difference from the output of one device, relative to its largest value
    errors: tuple[str, ...] = ()
    raw_bytes: int = 0  # of all tensors between devices in a round
    sent_bytes: int = 0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_seconds / self.median_seconds - 1


def interval_seconds(done: Sequence[float]) -> float:
    """Mean interval between answers of a full pipeline, from their times. Raises ValueError for fewer than two."""
    if len(done) < 2:
        raise ValueError("at least two answers are needed")
    return (done[-1] - done[0]) / (len(done) - 1)


def of_pipelines(one: Served, pipelines: Sequence[Served], asked_gain: float | None) -> list[Finding]:
    """Findings of pipelines against one device. `asked_gain`: target for the best pipeline; None: no target."""
    findings = [
        Finding(
            what=f"{one.label}: inferences a second",
            measured=f"{1 / one.median_seconds:.2f} ({_spread(one.seconds)} each)",
            value=1 / one.median_seconds,
        )
    ]
    best = max(pipelines, key=lambda each: paired_ratio(one.seconds, each.seconds).median)
    for each in pipelines:
        gain = paired_ratio(one.seconds, each.seconds)
        what = f"{each.label}: inferences a second, over one device's"
        said = f"{gain.median:.2f} {_interval(gain)} ({1 / each.median_seconds:.2f} a second)"
        if asked_gain is not None and each is best:
            findings.append(at_least(what, gain.median, asked_gain, said, f"at least {asked_gain:g}"))
        else:
            findings.append(Finding(what=what, measured=said, value=gain.median))
    for each in (one, *pipelines):
        findings.append(
            at_most(
                f"{each.label}: bottleneck, predicted against measured", abs(each.error), ASKED_ERROR,
                f"{each.error:+.1%} ({format_seconds(each.predicted_seconds)} against "
                f"{format_seconds(each.median_seconds)})",
                f"within {ASKED_ERROR:.0%}",
            )
        )  # fmt: skip
    return [*findings, *of_answers((one, *pipelines))]


def of_placements(one: Served, moirai: Served, auto: Served, forced: Served | None) -> list[Finding]:
    """Findings at one link rate. `forced`: a plan on several devices that is not predicted to be faster."""
    at = f"{one.mbit:g} Mbit/s"
    expected = one.predicted_seconds / moirai.predicted_seconds
    findings = []
    if len(moirai.devices) > 1 and expected > NO_GAIN:
        gain, best = paired_ratio(one.seconds, moirai.seconds), paired_ratio(one.seconds, auto.seconds)
        findings += [
            at_least(f"{at}: moirai over the best single device; the simulator says {expected:.2f}", gain.median, 1.0,
                     f"{gain.median:.2f} {_interval(gain)} ({format_seconds(moirai.median_seconds)} against "
                     f"{format_seconds(one.median_seconds)})", "faster"),
            at_least(f"{at}: auto over the best single device ({_on(auto)})", best.median, 1.0,
                     f"{best.median:.2f} {_interval(best)}", "faster"),
        ]  # fmt: skip
    else:
        findings.append(
            equal(f"{at}: no plan on several devices is faster, says the simulator; devices that auto takes",
                  len(auto.devices), 1, f"{len(auto.devices)}", "one")
        )  # fmt: skip
        if forced is not None:
            loss = paired_ratio(forced.seconds, one.seconds)
            said = forced.predicted_seconds / one.predicted_seconds
            findings.append(
                at_least(f"{at}: a plan on {len(forced.devices)} devices all the same, latency over one device's; the "
                         f"simulator says {said:.2f}", loss.median, 1.0,
                         f"{loss.median:.2f} {_interval(loss)} ({format_seconds(forced.median_seconds)} against "
                         f"{format_seconds(one.median_seconds)})", "slower")
            )  # fmt: skip
    served = [each for each in (one, moirai, auto, forced) if each is not None]
    for each in served:
        findings.append(
            Finding(
                what=f"{each.label}: latency, predicted against measured",
                measured=f"{each.error:+.1%} ({format_seconds(each.predicted_seconds)} against "
                f"{format_seconds(each.median_seconds)})",
                value=each.error,
            )
        )
    return [*findings, *of_answers(served)]


def of_answers(served: Sequence[Served]) -> list[Finding]:
    """Findings on the correctness of the answers."""
    findings = []
    for wire in dict.fromkeys(each.wire for each in served):
        own = [each for each in served if each.wire == wire]
        worst = max(each.difference for each in own)
        limit = _LOSSY[wire]
        answers = sum(each.answers for each in own)
        findings.append(
            at_most(f"largest difference of an output from one device's, of its largest value ({wire} on the wire)", worst,
                    limit, f"{worst:.1e} in {answers} answers", f"at most {limit:g}")
        )  # fmt: skip
    errors = [error for each in served for error in each.errors]
    findings.append(equal("requests that failed", len(errors), 0, "; ".join(sorted(set(errors))) or "none", "none"))
    return findings


def served_table(served: Sequence[Served]) -> str:
    """The measurements as a Markdown table."""
    headings = (
        "plan",
        "devices",
        "segments",
        "stages, predicted",
        "segments, measured",
        "predicted",
        "measured",
        "min..max",
        "predicted off by",
        "sent, of raw",
    )
    return table(headings, [_row(each) for each in served])


def _row(each: Served) -> tuple[str, ...]:
    stages, busy = (
        " + ".join(map(format_seconds, seconds)) or "-" for seconds in (each.stage_seconds, each.busy_seconds)
    )
    return (
        each.label, ", ".join(each.devices), str(each.segments), stages, busy, format_seconds(each.predicted_seconds),
        format_seconds(each.median_seconds), _spread(each.seconds), f"{each.error:+.1%}",
        f"{each.sent_bytes / each.raw_bytes:.0%}" if each.raw_bytes else "-",
    )  # fmt: skip


def _on(each: Served) -> str:
    return f"{each.strategy} on {len(each.devices)}"


def _spread(seconds: Sequence[float]) -> str:
    return f"{format_seconds(min(seconds))}..{format_seconds(max(seconds))}"


def _interval(ratio: Ratio) -> str:
    return f"[{ratio.low:.2f}, {ratio.high:.2f}]"
