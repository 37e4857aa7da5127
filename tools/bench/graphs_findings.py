"""What is said about graphs that were cut and placed: figures of pipelines and of placements for latency. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from hearth.platform.units import format_seconds
from tools.bench.findings import Finding, at_least, at_most, equal, table
from tools.bench.stats import Ratio, paired_ratio

ASKED_GAIN = 2.2  # inferences per second of three devices over one
ASKED_ERROR = 0.15  # of the predicted bottleneck
ONE_DEVICE = "local"
NO_GAIN = 1.01  # below, the planner takes fewer devices
_EQUAL = 1e-4  # of the largest output: other kernels and another order of sums; a wrong tensor is far beyond
# What a lossy format on the wire may do to it; measured, not promised.
_LOSSY = {"exact": _EQUAL, "fp16": 0.02, "bf16": 0.1, "int8": 0.3}


class Served(BaseModel):
    """One plan, deployed once in every round. `seconds`: per answer of a full pipeline, or of one request alone."""

    model_config = ConfigDict(frozen=True)

    label: str
    strategy: str
    wire: str
    mbit: float = Field(gt=0)
    devices: tuple[str, ...]
    segments: int
    predicted_seconds: float
    stage_seconds: tuple[float, ...] = ()  # by rank, as predicted; with what communication takes of the cores
    busy_seconds: tuple[float, ...] = ()  # by rank, of the segments as they ran at full load
    seconds: tuple[float, ...] = ()  # by round
    answers: int = 0
    difference: float = 0.0  # from what one device gave, over the largest value
    errors: tuple[str, ...] = ()
    raw_bytes: int = 0  # of all tensors between devices in a round, and as they travelled
    sent_bytes: int = 0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_seconds / self.median_seconds - 1


def interval_seconds(done: Sequence[float]) -> float:
    """Between two answers of a full pipeline: of all that came, first to last. Raises ValueError for fewer than two."""
    if len(done) < 2:
        raise ValueError("between fewer than two answers there is no interval")
    return (done[-1] - done[0]) / (len(done) - 1)


def of_pipelines(one: Served, pipelines: Sequence[Served], asked_gain: float | None) -> list[Finding]:
    """`asked_gain`: of the best of the pipelines; None: nothing is asked of this many devices."""
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
    """At one link rate. `forced`: a plan for several devices, where the planner takes none of its own accord."""
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
    """That what is fast is also right."""
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
    """Markdown."""
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
