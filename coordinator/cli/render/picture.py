"""A graph coloured by device, as SVG, or as PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from coordinator.cli.render.picture_layout import Edge, Layout, Part, lay_out, parts_of
from hearth.errors import BadSetting
from hearth.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.patches import FancyBboxPatch

FORMATS = (".svg", ".png")
# Light enough for black text, and apart also for the colour-blind (after Okabe and Ito, then Tol).
_COLOURS = (
    "#8ec7ee", "#f6c26b", "#8fd6b0", "#f4a6a0", "#cdb4e8", "#f1e27a", "#b5b5b5", "#e8b4d4", "#b9d77e", "#7fd0d3",
    "#d9b38c", "#a9b4f0",
)  # fmt: skip
_MARGIN = 24.0
_HEAD = 22.0  # height of a line above the graph
_MAX_TEXT = 26


@dataclass(frozen=True)
class Drawing:
    """`devices` are lines of the legend: a name, and what it does."""

    title: str
    devices: tuple[str, ...]
    layout: Layout


def drawing_of(
    title: str,
    devices: Sequence[str],
    names: Sequence[str],
    kinds: Sequence[str],
    assignment: Sequence[int],
    edges: Sequence[tuple[int, int]],
) -> Drawing:
    """Operators with these names and kinds (kinds may be empty), on the devices that `assignment` says."""
    parts, between = parts_of(assignment, edges)
    labels = [_label(part, names, kinds) for part in parts]
    return Drawing(title, tuple(devices), lay_out(labels, [part.device for part in parts], between))


def save_picture(path: Path, drawing: Drawing) -> None:
    """By the file's ending (see `check_picture`). Raises BadSetting where it cannot be written."""
    try:
        if path.suffix.lower() == ".svg":
            write_atomically(path, svg(drawing))
        else:
            _save_png(path, drawing)
    except OSError as error:
        raise BadSetting(setting="--picture", reason=f"{path} cannot be written ({error.strerror})") from None


def check_picture(path: Path) -> None:
    """Raises BadSetting for what could not be drawn, before anything is planned."""
    if path.suffix.lower() not in FORMATS:
        raise BadSetting(setting="--picture", reason=f"{path} ends neither in .svg nor in .png")
    if path.suffix.lower() == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise BadSetting(
                setting="--picture", reason="PNG needs matplotlib, which is not installed here; SVG needs nothing"
            ) from None


def svg(drawing: Drawing) -> str:
    layout, top = drawing.layout, _top(drawing)
    width, height = _size(drawing)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN}" font-size="15" font-weight="bold">{escape(drawing.title)}</text>',
    ]
    for index, text in enumerate(drawing.devices):
        y = _MARGIN + _HEAD * (index + 1)
        lines.append(
            f'<rect x="{_MARGIN}" y="{y - 11:.1f}" width="14" height="14" fill="{_colour(index)}" stroke="#555"/>'
            f'<text x="{_MARGIN + 22}" y="{y:.1f}" font-size="12">{escape(text)}</text>'
        )
    for edge in layout.edges:
        first, *others = [(point.x + _MARGIN, point.y + top) for point in edge.points]
        path = f"M{first[0]:.1f},{first[1]:.1f}"
        x, y = first
        for x2, y2 in others:  # down in a soft curve; straight where it goes back up, to the next column
            bend = (y2 - y) / 2
            path += (
                f"C{x:.1f},{y + bend:.1f} {x2:.1f},{y2 - bend:.1f} {x2:.1f},{y2:.1f}"
                if bend > 0
                else (f"L{x2:.1f},{y2:.1f}")
            )
            x, y = x2, y2
        lines.append(f'<path d="{path}" fill="none" stroke="{_stroke(edge)}" stroke-width="{_thickness(edge)}"/>')
    for box in layout.boxes:
        x, y = box.x + _MARGIN, box.y + top
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="4" '
            f'fill="{_colour(box.device)}" stroke="#555" stroke-width="0.8"/>'
        )
        start = y + (box.height - 15 * len(box.lines)) / 2 + 11
        for index, text in enumerate(box.lines):
            lines.append(
                f'<text x="{x + box.width / 2:.1f}" y="{start + 15 * index:.1f}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def _save_png(path: Path, drawing: Drawing) -> None:
    """The same shapes, drawn by matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    layout, top = drawing.layout, _top(drawing)
    width, height = _size(drawing)
    per_inch = 100.0
    figure = Figure(figsize=(width / per_inch, height / per_inch), dpi=per_inch)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    points = 72 / per_inch  # of a pixel
    axes.text(_MARGIN, _MARGIN, drawing.title, fontsize=15 * points, weight="bold")
    for index, text in enumerate(drawing.devices):
        y = _MARGIN + _HEAD * (index + 1)
        square = (_MARGIN, y - 11)
        axes.add_patch(_rounded(square, 14, 14, _colour(index), 0.0))
        axes.text(_MARGIN + 22, y, text, fontsize=12 * points)
    for edge in layout.edges:
        (x, y), *others = [(point.x + _MARGIN, point.y + top) for point in edge.points]
        vertices, codes = [(x, y)], [Curve.MOVETO]
        for x2, y2 in others:
            bend = (y2 - y) / 2
            if bend > 0:
                vertices += [(x, y + bend), (x2, y2 - bend), (x2, y2)]
                codes += [Curve.CURVE4] * 3
            else:
                vertices.append((x2, y2))
                codes.append(Curve.LINETO)
            x, y = x2, y2
        curve = Curve(vertices, codes)
        axes.add_patch(PathPatch(curve, fill=False, edgecolor=_stroke(edge), linewidth=_thickness(edge) * points))
    for box in layout.boxes:
        x, y = box.x + _MARGIN, box.y + top
        axes.add_patch(_rounded((x, y), box.width, box.height, _colour(box.device), 4.0))
        axes.text(
            x + box.width / 2, y + box.height / 2, "\n".join(box.lines), fontsize=11 * points, ha="center", va="center"
        )
    figure.savefig(path)


def _rounded(corner: tuple[float, float], width: float, height: float, colour: str, radius: float) -> FancyBboxPatch:
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
    return FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=colour, edgecolor="#555555", linewidth=0.6)


def _label(part: Part, names: Sequence[str], kinds: Sequence[str]) -> tuple[str, ...]:
    """One operator: its kind and name. Several: how many of which kinds, the commonest first."""
    first = part.operators[0]
    if len(part.operators) == 1:
        return (_cut(kinds[first]), _short(names[first])) if kinds else (_short(names[first]),)
    count = f"{len(part.operators)} operators"
    if not kinds:
        return (count, _short(f"{names[first]} ..."))
    seen: dict[str, int] = {}
    for operator in part.operators:
        seen[kinds[operator]] = seen.get(kinds[operator], 0) + 1
    often = sorted(seen, key=lambda kind: -seen[kind])
    return (count, _cut(", ".join(often[:3])))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def _short(text: str) -> str:
    """The end of a name says more than its start."""
    return text if len(text) <= _MAX_TEXT else f"…{text[-_MAX_TEXT + 1 :]}"


def _top(drawing: Drawing) -> float:
    return _MARGIN + _HEAD * (len(drawing.devices) + 1) + 12


def _size(drawing: Drawing) -> tuple[float, float]:
    head = max(len(text) for text in (drawing.title, *drawing.devices)) * 8.0
    return max(drawing.layout.width, head) + 2 * _MARGIN, _top(drawing) + drawing.layout.height + _MARGIN


def _colour(device: int) -> str:
    return _COLOURS[device % len(_COLOURS)]


def _stroke(edge: Edge) -> str:
    return "#b03030" if edge.crosses else "#9a9a9a"


def _thickness(edge: Edge) -> float:
    return 1.8 if edge.crosses else 1.0
