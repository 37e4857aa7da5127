"""Draws a graph coloured by device, as SVG, or as PNG if matplotlib is installed."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape

from coordinator.cli.output import write_file
from coordinator.cli.render.picture_layout import BoxGroup, PictureLayout, group_operators, lay_out
from hearth.errors import BadSetting

# Light enough for black text, and distinguishable for colour-blind readers (after Okabe and Ito, then Tol).
_COLOURS = (
    "#8ec7ee", "#f6c26b", "#8fd6b0", "#f4a6a0", "#cdb4e8", "#f1e27a", "#b5b5b5", "#e8b4d4", "#b9d77e", "#7fd0d3",
    "#d9b38c", "#a9b4f0",
)  # fmt: skip
# Sizes are in pixels, chosen by eye for 11-pixel text.
_MARGIN = 24.0  # around the drawing
_LEGEND_LINE_HEIGHT = 22.0  # a swatch of 14 pixels and a gap
_MAX_LABEL_LENGTH = 26  # characters; longer labels make boxes too wide for graphs with many branches
_CORNER_RADIUS = 4.0  # of boxes

Corner: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Drawing:
    """What to draw. `devices` are the lines of the legend, one per device."""

    title: str
    devices: tuple[str, ...]
    layout: PictureLayout


def make_drawing(
    title: str,
    devices: Sequence[str],
    names: Sequence[str],
    kinds: Sequence[str],
    assignment: Sequence[int],
    edges: Sequence[tuple[int, int]],
) -> Drawing:
    """Lay out operators with these names and kinds (kinds may be empty); `assignment` gives the device of each."""
    groups, group_edges = group_operators(assignment, edges)
    labels = [_label(group, names, kinds) for group in groups]
    return Drawing(title, tuple(devices), lay_out(labels, [group.device for group in groups], group_edges))


def save_picture(path: Path, drawing: Drawing) -> None:
    """Write the drawing in the format of the suffix (see `check_picture`). Raises BadSetting if it cannot be written."""
    write_file("--picture", path, render_picture(drawing, path.suffix))


def check_picture(path: Path) -> None:
    """Raise BadSetting for a file format that cannot be drawn, before anything is planned."""
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise BadSetting(setting="--picture", reason=f"{path} must end in .svg or .png")
    if suffix == ".png" and find_spec("matplotlib") is None:
        reason = "PNG needs matplotlib, which is not installed; use .svg"
        raise BadSetting(setting="--picture", reason=reason)


def render_picture(drawing: Drawing, suffix: str) -> bytes:
    """The content of the file; both formats have the same shapes."""
    layout = drawing.layout
    top = _MARGIN + _LEGEND_LINE_HEIGHT * (len(drawing.devices) + 1) + 12
    head = max(len(text) for text in (drawing.title, *drawing.devices)) * 8.0
    canvas_of = _Svg if suffix.lower() == ".svg" else _Png
    canvas = canvas_of(max(layout.width, head) + 2 * _MARGIN, top + layout.height + _MARGIN)
    canvas.text(_MARGIN, _MARGIN, drawing.title, size=15, weight="bold")
    for index, text in enumerate(drawing.devices):
        y = _MARGIN + _LEGEND_LINE_HEIGHT * (index + 1)
        canvas.rectangle(_MARGIN, y - 11, 14, 14, _colour(index))
        canvas.text(_MARGIN + 22, y, text, size=12)
    for edge in layout.edges:
        points = [(point.x + _MARGIN, point.y + top) for point in edge.points]
        canvas.curve(points, *(("#b03030", 1.8) if edge.crosses else ("#9a9a9a", 1.0)))
    for box in layout.boxes:
        x, y = box.x + _MARGIN, box.y + top
        canvas.rectangle(x, y, box.width, box.height, _colour(box.device))
        start = y + (box.height - 15 * len(box.lines)) / 2 + 11
        for index, text in enumerate(box.lines):
            canvas.text(x + box.width / 2, start + 15 * index, text, anchor="middle")
    return canvas.content()


def _curve_segments(points: Sequence[Corner]) -> Iterator[tuple[Corner, Corner, Corner]]:
    """Control points and end of a cubic curve to each next point.

    Curves are rounded downwards, and straight upwards (to the next column).
    """
    for (x, y), (x2, y2) in zip(points, points[1:], strict=False):
        bend = max((y2 - y) / 2, 0.0)
        yield (x, y + bend), (x2, y2 - bend), (x2, y2)


class _Svg:
    def __init__(self, width: float, height: float) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">',
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        ]

    def text(
        self, x: float, y: float, text: str, size: int = 11, weight: str = "normal", anchor: str = "start"
    ) -> None:
        style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
        self._lines.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{_CORNER_RADIUS}"'
        self._lines.append(f'<rect {place} fill="{colour}" stroke="#555" stroke-width="0.8"/>')

    def curve(self, points: Sequence[Corner], colour: str, thickness: float) -> None:
        path = "M{:.1f},{:.1f}".format(*points[0])
        for bend in _curve_segments(points):
            path += "C" + " ".join(f"{x:.1f},{y:.1f}" for x, y in bend)
        self._lines.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thickness}"/>')

    def content(self) -> bytes:
        return "\n".join([*self._lines, "</svg>", ""]).encode()


class _Png:
    """A matplotlib canvas with coordinates in pixels."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        per_inch = 100.0
        self._points = 72 / per_inch  # of a pixel
        self._figure = Figure(figsize=(width / per_inch, height / per_inch), dpi=per_inch)
        self._axes = self._figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)
        self._axes.set_axis_off()

    def text(
        self, x: float, y: float, text: str, size: int = 11, weight: str = "normal", anchor: str = "start"
    ) -> None:
        align = "center" if anchor == "middle" else "left"
        self._axes.text(x, y, text, fontsize=size * self._points, weight=weight, ha=align)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        from matplotlib.patches import FancyBboxPatch

        style, edge = f"round,pad=0,rounding_size={_CORNER_RADIUS}", "#555555"
        box = FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor=edge, linewidth=0.6)
        self._axes.add_patch(box)

    def curve(self, points: Sequence[Corner], colour: str, thickness: float) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Curve

        vertices = [points[0], *(corner for bend in _curve_segments(points) for corner in bend)]
        curve = Curve(vertices, [Curve.MOVETO, *[Curve.CURVE4] * (len(vertices) - 1)])
        self._axes.add_patch(PathPatch(curve, fill=False, edgecolor=colour, linewidth=thickness * self._points))

    def content(self) -> bytes:
        file = io.BytesIO()
        self._figure.savefig(file, format="png")
        return file.getvalue()


def _label(group: BoxGroup, names: Sequence[str], kinds: Sequence[str]) -> tuple[str, ...]:
    """One operator: kind and name. Several: their number and most common kinds."""
    first = group.operators[0]
    if len(group.operators) == 1:
        return (
            (_truncate_end(kinds[first]), _truncate_start(names[first])) if kinds else (_truncate_start(names[first]),)
        )
    count = f"{len(group.operators)} operators"
    if not kinds:
        return (count, _truncate_start(f"{names[first]} ..."))
    often = Counter(kinds[operator] for operator in group.operators).most_common(3)
    return (count, _truncate_end(", ".join(kind for kind, _ in often)))


def _truncate_end(text: str) -> str:
    return text if len(text) <= _MAX_LABEL_LENGTH else f"{text[: _MAX_LABEL_LENGTH - 1]}…"


def _truncate_start(text: str) -> str:
    """Cut a name at its start: its end is more specific."""
    return text if len(text) <= _MAX_LABEL_LENGTH else f"…{text[-_MAX_LABEL_LENGTH + 1 :]}"


def _colour(device: int) -> str:
    return _COLOURS[device % len(_COLOURS)]
