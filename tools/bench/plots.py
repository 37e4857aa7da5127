"""Plots of the strategies' rows, readable at 1000 pixels. Imports matplotlib late, because it is slow to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hearth.errors import BadSetting
from tools.bench.experiment import Experiment
from tools.bench.rows import Row, by_setting

_SIZE, _DPI = (10.0, 5.6), 100  # inches: 1000 pixels wide
# Okabe and Ito's palette for colour-blind readers; markers also distinguish the lines without colours.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_MARKERS = "osD^vPX*"
_MAX_BARS = 60  # groups of bars in one plot

Draw = Callable[[Any, Sequence[Row]], None]


def save_plot(path: Path, experiment: Experiment, rows: Sequence[Any]) -> bool:
    """Draw and save an experiment's plot, if it has one. Raises BadSetting if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise BadSetting(setting="matplotlib", reason="it is not installed: `pip install matplotlib`") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    try:
        if drawn := experiment.draw(rows, figure):
            figure.savefig(path)
        return drawn
    finally:
        plt.close(figure)


def _draw(axes: Any, points: Mapping[str, Sequence[tuple[float, float]]], **options: Any) -> None:
    """One line for each label, with its own marker and colour."""
    for index, (label, pairs) in enumerate(points.items()):
        marker, colour = _MARKERS[index % len(_MARKERS)], _COLOURS[index % len(_COLOURS)]
        axes.plot(*zip(*pairs, strict=True), marker=marker, color=colour, label=label, **options)


def finish(axes: Any, title: str) -> None:
    """The title and the frame that all plots share."""
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9, ncols=2, frameon=False)


def latency_bars(axes: Any, rows: Sequence[Row]) -> None:
    """Bars: median of each row, with error bars from the fastest to the slowest round and a line at the bound."""
    timed = [row for row in rows if row.seconds]
    bars = _bars(axes, timed, lambda row: (row.median_seconds, min(row.seconds), max(row.seconds)))
    bounds = [(row.bound_seconds, x - width / 2, x + width / 2) for x, width, row in bars if row.bound_seconds]
    if bounds:
        axes.hlines(*zip(*bounds, strict=True), color="black", lw=2, label="bound")
    axes.set_ylabel("time of one step [s]")


def speedup_bars(axes: Any, rows: Sequence[Row]) -> None:
    """Bars: speed-up over the baseline with confidence intervals."""
    _bars(axes, [row for row in rows if row.speedup is not None], lambda row: row.speedup or (0.0, 0.0, 0.0))
    axes.axhline(1.0, color="black", lw=1)
    baselines = list(dict.fromkeys(row.baseline for row in rows if row.baseline))
    axes.set_ylabel(f"speed-up over {baselines[0] if len(baselines) == 1 else 'the baseline'} [times]")


def _bars(
    axes: Any, rows: Sequence[Row], height: Callable[[Row], tuple[float, float, float]]
) -> list[tuple[float, float, Row]]:
    """Bars grouped by setting, with the height and both ends of the error bar. Returns x, width and row of each bar.

    The bars of a single setting are named below them, since more of them than colours can be told apart.
    """
    groups = by_setting(rows)[:_MAX_BARS]
    labels = list(dict.fromkeys(row.label for group in groups for row in group))
    width, drawn, alone = 0.84 / max(len(labels), 1), [], len(groups) == 1
    for index, label in enumerate(labels):
        found = [(at, row) for at, group in enumerate(groups) for row in group if row.label == label]
        xs = [at + (index - (len(labels) - 1) / 2) * width for at, _ in found]
        heights = [height(row) for _, row in found]
        errors = [[middle - low for middle, low, _ in heights], [high - middle for middle, _, high in heights]]
        hatch = "" if alone else "///" * (index // len(_COLOURS))  # for labels beyond the colours
        axes.bar(xs, [middle for middle, _, _ in heights], width * 0.92, yerr=errors, label=None if alone else label,
                 color=_COLOURS[0 if alone else index % len(_COLOURS)], hatch=hatch, edgecolor="white", linewidth=0,
                 error_kw={"lw": 1, "capsize": 2})  # fmt: skip
        drawn += [(x, width * 0.92, row) for x, (_, row) in zip(xs, found, strict=True)]
    if alone:
        axes.set_xticks(
            [x for x, _, _ in drawn], [row.label for _, _, row in drawn], fontsize=9, rotation=60, ha="right"
        )
        axes.margins(y=0.2)
        return drawn
    many = len(groups) > 8
    names = [_short(group[0], rows, " " if many else "\n") for group in groups]
    axes.set_xticks(range(len(names)), names, fontsize=8 if many else 9, rotation=60 if many else 0,
                    ha="right" if many else "center")  # fmt: skip
    axes.margins(y=0.2)
    return drawn


def rate_lines(axes: Any, rows: Sequence[Row]) -> None:
    """Lines: time against link rate, one per strategy (and per model, if there are several)."""
    timed = [(rate, row) for row in rows if row.seconds and (rate := row.paper_mbit or row.mbit) is not None]
    several = len({row.model for _, row in timed}) > 1
    lines: dict[str, list[tuple[float, float]]] = {}
    for rate, row in sorted(timed, key=lambda pair: pair[0]):
        lines.setdefault(f"{row.model} {row.label}" if several else row.label, []).append((rate, row.median_seconds))
    _draw(axes, lines)
    ticks = sorted({rate for rate, _ in timed})
    of_paper = ", in the paper's ratio to compute" if all(row.paper_mbit is not None for _, row in timed) else ""
    axes.set(xscale="log", xlabel=f"link of every device [Mbit/s{of_paper}]", ylabel="time of one step [s]")
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


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


def scaling_lines(axes: Any, rows: Sequence[Row]) -> None:
    """Lines: work per second relative to one device, with a line for linear scaling."""
    scaling = scaling_of(rows)
    _draw(axes, {model: [(count, speedup) for count, speedup, _ in points] for model, points in scaling.items()})
    for points in scaling.values():
        count, speedup, share = points[-1]
        axes.annotate(f"{share:.0%}", (count, speedup), xytext=(6, -4), textcoords="offset points")
    most = max((points[-1][0] for points in scaling.values()), default=1)
    axes.plot([1, most], [1, most], color="grey", ls="--", label="linear")
    axes.set(xticks=range(1, most + 1), xlabel="devices", ylabel="work per second over one device [times]")


def predicted_against_measured(axes: Any, rows: Sequence[Row]) -> None:
    """Points: predicted against measured time, with lines where they agree and where they differ by 10 %."""
    from matplotlib.ticker import LogLocator

    # Results from before 2026-11-27 have only the rescaled predictions.
    timed = [row for row in rows if row.seconds and (row.predicted_seconds or row.rescaled_seconds)]
    points: dict[str, list[tuple[float, float]]] = {}
    for row in timed:
        points.setdefault(row.strategy, []).append(
            (row.median_seconds, row.predicted_seconds or row.rescaled_seconds or 0.0)
        )
    _draw(axes, points, ls="", ms=5, alpha=0.75)
    if timed:
        ends = [f(row.median_seconds for row in timed) for f in (min, max)]
        axes.plot(ends, ends, color="black", lw=1, label="as predicted")
        for factor, label in ((1.1, "10 % off"), (0.9, "")):
            axes.plot(ends, [end * factor for end in ends], color="grey", lw=1, ls=":", label=label)
    axes.set(xscale="log", xlabel="measured time of one step, median [s]")
    axes.set(yscale="log", ylabel="predicted time of one step [s]")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def _short(row: Row, rows: Sequence[Row], separator: str) -> str:
    """A label of the row's setting, without what all rows share and without what a scenario determines."""
    scenarios = {other.scenario for other in rows}
    parts = [row.scenario] if len(scenarios) > 1 else []
    texts = {"devices": f"{row.devices} devices", "model": row.model, "seq_len": f"{row.seq_len} tokens",
             "mbit": "" if row.mbit is None else f"{row.mbit:.0f} Mbit/s"}  # fmt: skip
    for name, text in texts.items():
        if len({(other.scenario, getattr(other, name)) for other in rows}) > len(scenarios):
            parts.append(text)
    return separator.join(parts or [row.scenario, row.model])
