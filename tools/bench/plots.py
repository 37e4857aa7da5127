"""Plots of rows, readable at 1000 pixels. Imports matplotlib late, because it is optional and slow to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hearth.errors import BadSetting
from tools.bench.paper import scaling_of
from tools.bench.rows import Row, by_setting

_WIDTH, _HEIGHT, _DPI = 10.0, 5.6, 100  # inches: 1000 pixels wide
# Okabe and Ito's palette for colour-blind readers; markers also distinguish the lines without colours.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_MARKERS = "osD^vPX*"
_MAX_BARS = 60  # groups of bars in one plot

Draw = Callable[[Any, Sequence[Row]], None]


def check_plots() -> None:
    """Raise BadSetting if matplotlib is missing. Call it before measuring."""
    try:
        import matplotlib
    except ImportError:
        raise BadSetting(setting="--plot", reason="matplotlib is not installed: `pip install matplotlib`") from None
    matplotlib.use("Agg")


def save_plot(path: Path, rows: Sequence[Row], draw: Draw, title: str) -> None:
    """Draw and save a plot. Raises BadSetting for a file type that matplotlib does not support."""
    check_plots()
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    try:
        draw(axes, rows)
        axes.set_title(title, loc="left", fontsize=12)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.savefig(path)
    except ValueError as error:
        raise BadSetting(setting="--plot", reason=str(error)) from None
    finally:
        plt.close(figure)


def latency_bars(axes: Any, rows: Sequence[Row]) -> None:
    """Bars: median of each row, with error bars from the fastest to the slowest round and a line at the bound."""
    groups = [[row for row in group if row.median_seconds is not None] for group in by_setting(rows)]
    groups = [group for group in groups if group][:_MAX_BARS]
    labels = list(dict.fromkeys(row.label for group in groups for row in group))
    width = 0.84 / max(len(labels), 1)
    bound_drawn = False
    for index, label in enumerate(labels):
        found = [(at, row) for at, group in enumerate(groups) for row in group if row.label == label]
        xs = [at + (index - (len(labels) - 1) / 2) * width for at, _ in found]
        medians = [row.median_seconds or 0.0 for _, row in found]
        low = [(row.median_seconds or 0.0) - (row.min_seconds or 0.0) for _, row in found]
        high = [(row.max_seconds or 0.0) - (row.median_seconds or 0.0) for _, row in found]
        axes.bar(xs, medians, width * 0.92, yerr=[low, high], color=_COLOURS[index % len(_COLOURS)], label=label,
                 error_kw={"lw": 1, "capsize": 2})  # fmt: skip
        for x, (_, row) in zip(xs, found, strict=True):
            if row.bound_seconds is not None:
                axes.plot([x - width * 0.46, x + width * 0.46], [row.bound_seconds] * 2, color="black", lw=2,
                          label="" if bound_drawn else "bound")  # fmt: skip
                bound_drawn = True
    _ticks(axes, [_short(group[0], rows) for group in groups])
    axes.set_ylabel("time of one step [s]")
    axes.legend(fontsize=9, ncols=2, frameon=False)
    axes.margins(y=0.2)


def speedup_bars(axes: Any, rows: Sequence[Row]) -> None:
    """Bars: speed-up over the baseline with confidence intervals."""
    groups = [[row for row in group if row.speedup_over_baseline is not None] for group in by_setting(rows)]
    groups = [group for group in groups if group][:_MAX_BARS]
    labels = list(dict.fromkeys(row.label for group in groups for row in group))
    width = 0.84 / max(len(labels), 1)
    for index, label in enumerate(labels):
        found = [(at, row) for at, group in enumerate(groups) for row in group if row.label == label]
        xs = [at + (index - (len(labels) - 1) / 2) * width for at, _ in found]
        heights = [row.speedup_over_baseline or 0.0 for _, row in found]
        low = [(row.speedup_over_baseline or 0.0) - (row.speedup_low or 0.0) for _, row in found]
        high = [(row.speedup_high or 0.0) - (row.speedup_over_baseline or 0.0) for _, row in found]
        axes.bar(xs, heights, width * 0.92, yerr=[low, high], color=_COLOURS[index % len(_COLOURS)], label=label,
                 error_kw={"lw": 1, "capsize": 2})  # fmt: skip
    axes.axhline(1.0, color="black", lw=1)
    _ticks(axes, [_short(group[0], rows) for group in groups])
    baselines = list(dict.fromkeys(row.baseline for row in rows if row.baseline))
    axes.set_ylabel(f"speed-up over {baselines[0] if len(baselines) == 1 else 'the baseline'} [times]")
    axes.legend(fontsize=9, ncols=2, frameon=False)
    axes.margins(y=0.2)


def bandwidth_lines(axes: Any, rows: Sequence[Row]) -> None:
    """Lines: time against link rate, one per strategy (and per model, if there are several)."""
    timed = [row for row in rows if row.median_seconds is not None and _rate(row) is not None]
    several = len({row.model for row in timed}) > 1
    names = {row: f"{row.model} {row.label}" if several else row.label for row in timed}
    for index, name in enumerate(dict.fromkeys(names.values())):
        points = sorted((_rate(row) or 0.0, row.median_seconds) for row in timed if names[row] == name)
        axes.plot([x for x, _ in points], [y for _, y in points], marker=_MARKERS[index % len(_MARKERS)],
                  color=_COLOURS[index % len(_COLOURS)], label=name)  # fmt: skip
    axes.set_xscale("log")
    ticks = sorted({_rate(row) or 1.0 for row in timed})
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.minorticks_off()
    of_paper = all(row.paper_mbit is not None for row in timed)
    axes.set_xlabel("link of every device [Mbit/s" + (", in the paper's ratio to compute]" if of_paper else "]"))
    axes.set_ylabel("time of one step [s]")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, frameon=False)


def scaling_lines(hidden_of: Callable[[str], int]) -> Draw:
    """Lines: work per second relative to one device, with a line for linear scaling."""

    def draw(axes: Any, rows: Sequence[Row]) -> None:
        most = 1
        for index, (model, points) in enumerate(scaling_of(rows, hidden_of).items()):
            axes.plot([count for count, _, _ in points], [speedup for _, speedup, _ in points],
                      marker=_MARKERS[index], color=_COLOURS[index], label=model)  # fmt: skip
            count, speedup, share = points[-1]
            axes.annotate(f"{share:.0%}", (count, speedup), xytext=(6, -4), textcoords="offset points")
            most = max(most, count)
        axes.plot([1, most], [1, most], color="grey", ls="--", label="linear")
        axes.set_xticks(range(1, most + 1))
        axes.set_xlabel("devices")
        axes.set_ylabel("work per second over one device [times]")
        axes.legend(fontsize=9, frameon=False)

    return draw


def predicted_against_measured(axes: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator

    timed = [row for row in rows if row.median_seconds is not None and row.predicted_seconds is not None]
    for index, strategy in enumerate(dict.fromkeys(row.strategy for row in timed)):
        chosen = [row for row in timed if row.strategy == strategy]
        axes.scatter([row.median_seconds for row in chosen], [row.predicted_seconds for row in chosen], s=26,
                     marker=_MARKERS[index % len(_MARKERS)], color=_COLOURS[index % len(_COLOURS)], label=strategy,
                     alpha=0.75)  # fmt: skip
    if timed:
        ends = [f(row.median_seconds or 1.0 for row in timed) for f in (min, max)]
        axes.plot(ends, ends, color="black", lw=1, label="as predicted")
        axes.plot(ends, [end * 1.1 for end in ends], color="grey", lw=1, ls=":", label="10 % off")
        axes.plot(ends, [end * 0.9 for end in ends], color="grey", lw=1, ls=":")
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xlabel("measured time of one step, median [s]")
    axes.set_ylabel("predicted time of one step [s]")
    axes.legend(fontsize=9, frameon=False)


def _rate(row: Row) -> float | None:
    return row.paper_mbit if row.paper_mbit is not None else row.mbit


def _short(row: Row, rows: Sequence[Row]) -> str:
    """A label of the row's setting, without the parts that all rows share."""
    parts = {
        "scenario": row.scenario,
        "devices": f"{row.devices} devices",
        "model": row.model,
        "seq_len": f"{row.seq_len} tokens",
        "mbit": "" if row.mbit is None else f"{row.mbit:.0f} Mbit/s",
    }
    told: list[str] = []
    for name in parts:
        settings = [tuple(getattr(other, each) for each in (*told, name)) for other in rows]
        if len(set(settings)) > len({setting[:-1] for setting in settings}):
            told.append(name)
    return "\n".join([parts[name] for name in told] or [row.scenario, row.model])


def _ticks(axes: Any, names: Sequence[str]) -> None:
    many = len(names) > 8
    names = [name.replace("\n", " ") for name in names] if many else names
    axes.set_xticks(range(len(names)), names, fontsize=8 if many else 9, rotation=60 if many else 0,
                    ha="right" if many else "center")  # fmt: skip
