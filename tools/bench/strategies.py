"""Kind `strategies`: a transformer's strategies in interleaved rounds, over scenarios, models, lengths and link rates.

It reproduces the Galaxy paper's Table IV and Figures 8 to 11, and measures predictions, `auto` and lz4.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, product
from typing import Annotated, Literal

from pydantic import Field

from hearth.errors import BadSetting
from hearth.plan.common import ValueFormatName
from tools.bench.experiment import Context, Experiment
from tools.bench.measure import MIN_ROUNDS, Bench, Models, Setting
from tools.bench.plans import GLOO, Lz4, Name, Row, by_setting, entries, table_of
from tools.bench.results import Summary
from tools.bench.shapes import Shape, find_shape
from tools.bench.stats import percentile
from tools.testbed import Scenario, load_scenario

Mbit = Annotated[float, Field(ge=0.01, le=100_000)]  # what can be emulated
Count = Annotated[int, Field(ge=1)]


class Strategies(Experiment[Row]):
    """All combinations of scenarios, models, lengths, numbers of devices and rates; one table each."""

    scenarios: tuple[str, ...] = Field(("galaxy-a",), min_length=1)  # names, or TOML files
    models: tuple[str, ...] = Field(("bert-large",), min_length=1)  # names of shapes, or config.json files
    layers: Count = 4  # of the model; fewer than it has
    seq_lens: tuple[Count, ...] = Field((284,), min_length=1)  # tokens
    rows_per_device: Count | None = None  # weak scaling: that many tokens for each device, instead of `seq_lens`
    devices: tuple[Count, ...] = ()  # numbers of devices, from the first; empty: all
    strategies: tuple[Name, ...] = (
        "local", "gloo-tp", "gloo-tp-packed", "megatron-tp", "sp", "hmp-no-overlap", "galaxy", "exact", "hmp", "auto",
    )  # fmt: skip
    strategies_of_one: tuple[Name, ...] = ()  # run on one device; empty: those of `strategies` that can
    wires: tuple[ValueFormatName, ...] = ("exact",)
    lz4: tuple[Lz4, ...] = ("auto",)
    plain: bool = False  # also hmp without encryption
    baseline: Name | Literal["lz4 off"] = "gloo-tp"  # that speed-ups are relative to; "lz4 off": the same without lz4
    mbit: tuple[Mbit, ...] = ()  # real rates of every link; one device needs only the first
    paper_mbit: tuple[Mbit, ...] = ()  # rates of the paper, converted to the same ratio of compute to traffic
    rounds: int = Field(15, ge=MIN_ROUNDS)
    repeat_disturbed: bool = True  # measure again what other programs disturbed
    interleave: bool = False  # interleave all settings of a model, because they are compared with each other
    conclusions: tuple[Literal["speedup", "prediction", "auto", "scaling"], ...] = ("speedup", "prediction", "auto")

    def measure(self, context: Context) -> Iterator[Row]:
        if self.mbit and self.paper_mbit:
            raise BadSetting(setting="mbit", reason="give either real rates or the paper's")
        shapes, scenarios = [find_shape(name) for name in self.models], [load_scenario(name) for name in self.scenarios]
        settings = [each for scenario, shape in product(scenarios, shapes) for each in self._settings(scenario, shape)]
        for each in settings:
            if each.num_devices > (most := len(each.scenario.devices)):
                raise BadSetting(setting="devices", reason=f"{each.scenario.name} has only {most}")
            each.shape.shortened(self.layers, each.seq_len)
        yield from context.known
        missing = settings[len(by_setting(context.known)) :]  # they are always in the same order
        models = Models(context.folder)
        for scenario, of_scenario in groupby(missing, lambda each: each.scenario):
            with ExitStack() as stack:
                bench = Bench(
                    stack, scenario, context.folder, models, context.report, real_mbit=bool(self.mbit),
                    gloo=any(name in GLOO for name in self.strategies), repeat_disturbed=self.repeat_disturbed,
                )  # fmt: skip
                for _, of_shape in groupby(of_scenario, lambda each: each.shape):
                    for together in [of_shape] if self.interleave else [[each] for each in of_shape]:
                        yield from bench.measure(*together)

    def _settings(self, scenario: Scenario, shape: Shape) -> Iterator[Setting]:
        rates = [*((rate, None) for rate in self.mbit), *((None, rate) for rate in self.paper_mbit)] or [(None, None)]
        for count in self.devices or (len(scenario.devices),):
            chosen = (self.strategies_of_one if count == 1 else ()) or self.strategies
            compared = entries(chosen, self.wires, self.lz4, self.plain)
            lengths = self.seq_lens if self.rows_per_device is None else (self.rows_per_device * count,)
            for seq_len in lengths:
                for rate in rates if count > 1 else rates[:1]:
                    yield Setting(
                        scenario, shape, self.layers, seq_len, count, *rate, compared, self.baseline, self.rounds
                    )

    def summary(self, rows: Sequence[Row]) -> Summary:
        wrong = "an output differs from that of a single device; its row is marked"
        said = [line for name in self.conclusions for line in _CONCLUSIONS[name](rows)]
        return Summary(
            conclusions=tuple(said),
            tables=tuple(map(table_of, by_setting(rows))),
            failure=wrong if any(row.wrong for row in rows) else "",
        )


# ---- conclusions ------------------------------------------------------------------------------------------------------


def say_speedup(rows: Sequence[Row]) -> list[str]:
    """Speed-up of hmp and auto over the baseline, for each setting."""
    return [
        f"{row.setting}: {row.label} is {row.speedup.median:.2f} times as fast as {row.baseline} {row.speedup.interval}"
        for row in rows
        if row.strategy in ("hmp", "auto") and row.speedup is not None and row.label != row.baseline
    ]


def say_prediction(rows: Sequence[Row]) -> Iterator[str]:
    """Errors of the predicted times: as planned, and of the profile scaled by steps of one device before each setting."""
    as_planned = [row.prediction_error for row in rows if row.prediction_error is not None]
    rescaled = [row.rescaled_error for row in rows if row.rescaled_error is not None]
    for errors, scaled in ((as_planned, ""), (rescaled, ", rescaled by steps of one device")):
        if sizes := [abs(error) for error in errors]:
            yield (
                f"prediction error over {len(sizes)} runs{scaled}: median {statistics.median(sizes):.1%}, "
                f"90th percentile {percentile(sizes, 0.9):.1%}"
            )


def say_auto(rows: Sequence[Row]) -> Iterator[str]:
    """Compare auto with the best single device, and with the best strategy measured in the same setting."""
    gains, regrets = [], []
    for group in by_setting(rows):
        medians = {row.strategy: row.median_seconds for row in group if row.seconds and row.wire == "exact"}
        auto = medians.pop("auto", None)
        if auto and medians:
            regrets.append(auto / min(medians.values()))
        if auto and "local" in medians:
            gains.append(medians["local"] / auto)
    if gains:
        yield (
            f"auto against the best single device, {len(gains)} settings: median {statistics.median(gains):.2f} times as "
            f"fast, worst {min(gains):.2f}, best {max(gains):.2f}"
        )
    if regrets:
        yield (
            f"auto against the best strategy that was measured: median {statistics.median(regrets):.2f} of its time, "
            f"90th percentile {percentile(regrets, 0.9):.2f}, worst {max(regrets):.2f}"
        )


def say_scaling(rows: Sequence[Row]) -> list[str]:
    """Speed-up of each model by number of devices, and its share of linear speed-up."""
    return [
        f"{model}: " + ", ".join(f"{count} devices {speedup:.2f}x ({share:.0%} of linear)"
                                 for count, speedup, share in points if count > 1)
        for model, points in scaling_of(rows).items()
    ]  # fmt: skip


def scaling_of(rows: Sequence[Row]) -> dict[str, list[tuple[int, float, float]]]:
    """By model: number of devices, speed-up in work per second over one device, fraction of linear speed-up."""
    rates: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.seconds:
            flops = layer_flops(row.seq_len, row.hidden_size)
            rates.setdefault(row.model, {})[row.devices] = flops / row.median_seconds
    return {
        model: [(count, rate / found[1], rate / found[1] / count) for count, rate in sorted(found.items())]
        for model, found in rates.items()
        if 1 in found
    }


def layer_flops(seq_len: int, hidden: int) -> float:
    """FLOPs of one encoder layer with an MLP of four times the hidden size: projections, MLP, attention."""
    return 24.0 * seq_len * hidden**2 + 4.0 * seq_len**2 * hidden


_CONCLUSIONS: Mapping[str, Callable[[Sequence[Row]], Iterable[str]]] = {
    "speedup": say_speedup, "prediction": say_prediction, "auto": say_auto, "scaling": say_scaling,
}  # fmt: skip
