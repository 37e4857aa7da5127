"""Layered layout of a drawn graph: layers by longest path, few edge crossings, several columns for tall graphs. Pure.

Large graphs are drawn coarser: first chains of operators on one device become one box, then larger parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import NamedTuple

MAX_BOXES = 140  # more boxes are unreadable on one page
_SWEEPS = 6  # passes that order each layer by its neighbours: more gain little and take longer on large graphs
_MAX_ROUTED_LAYERS = 8  # an edge over more layers is drawn straight: routing it through all of them widens every layer
# Sizes are in pixels, chosen by eye for 11-pixel text.
_LINE_HEIGHT, _GAP_X, _GAP_Y, _PADDING = 15.0, 14.0, 26.0, 14.0
_CHARACTER_WIDTH = 6.3  # average of the characters of a label
_COLUMN_HEIGHT = 1500.0  # taller graphs continue in the next column, so that the picture fits a screen or a page
_COLUMN_GAP = 46.0  # room for the edges that lead up to the next column
_ROUTE_WIDTH = 10.0  # reserved for an edge that passes through a layer


class Point(NamedTuple):
    """A position in pixels, from the top left corner."""

    x: float
    y: float


@dataclass(frozen=True)
class Box:
    """A box with lines of text. Position and size are in pixels."""

    lines: tuple[str, ...]
    device: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Edge:
    """A line through `points`. `crosses`: it connects different devices."""

    points: tuple[Point, ...]
    crosses: bool


@dataclass(frozen=True)
class PictureLayout:
    """Boxes and edges with their coordinates, and the size of the whole drawing in pixels."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    width: float
    height: float


class BoxGroup(NamedTuple):
    """Operators drawn as one box; all on one device."""

    operators: tuple[int, ...]
    device: int


def group_operators(
    assignment: Sequence[int], edges: Sequence[tuple[int, int]], max_boxes: int = MAX_BOXES
) -> tuple[list[BoxGroup], list[tuple[int, int]]]:
    """Group operators into at most `max_boxes` boxes if possible.

    Tried in this order: single operators, chains on one device, all that a device computes between two exchanges.
    """
    num_operators = len(assignment)
    for group_of in (list(range(num_operators)), _chains(assignment, edges), _stages(assignment, edges)):
        members: dict[int, list[int]] = {}
        for operator, group in enumerate(group_of):
            members.setdefault(group, []).append(operator)
        if len(members) <= max_boxes:
            break
    number = {group: index for index, group in enumerate(members)}
    groups = [BoxGroup(tuple(operators), assignment[operators[0]]) for operators in members.values()]
    group_edges = {(number[group_of[a]], number[group_of[b]]) for a, b in edges}
    return groups, sorted((a, b) for a, b in group_edges if a != b)


def _chains(assignment: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """For each operator, the first operator of its chain (one device, one edge in and out)."""
    out, into = Counter(a for a, _ in edges), Counter(b for _, b in edges)
    group = list(range(len(assignment)))
    for a, b in sorted(edges, key=lambda edge: edge[1]):
        if out[a] == 1 and into[b] == 1 and assignment[a] == assignment[b]:
            group[b] = group[a]
    return group


def _stages(assignment: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """For each operator, the first operator of its group: same device, and same number of device changes before it.

    Edges lead to a group with more device changes or stay in the group, so groups cannot depend on each other in a cycle.
    """
    stage = [0] * len(assignment)
    for a, b in sorted(edges, key=lambda edge: edge[1]):
        stage[b] = max(stage[b], stage[a] + (assignment[a] != assignment[b]))
    first: dict[tuple[int, int], int] = {}
    return [first.setdefault((stage[each], assignment[each]), each) for each in range(len(assignment))]


# ---- layers -----------------------------------------------------------------------------------------------------------


def lay_out(labels: Sequence[Sequence[str]], devices: Sequence[int], edges: Sequence[tuple[int, int]]) -> PictureLayout:
    """Place boxes with these lines of text in layers; every edge leads to a lower layer."""
    level = _levels(len(labels), edges)
    layers: list[list[int]] = [[] for _ in range(max(level, default=0) + 1)]
    for node, layer in enumerate(level):
        layers[layer].append(node)
    # An edge that passes through layers gets a point in each of them, which is ordered like the boxes.
    routes: list[list[int]] = []
    num_nodes = len(labels)
    neighbours: list[tuple[int, int]] = []
    for a, b in edges:
        route = [a]
        if level[b] - level[a] <= _MAX_ROUTED_LAYERS:
            for layer in range(level[a] + 1, level[b]):
                layers[layer].append(num_nodes)
                route.append(num_nodes)
                num_nodes += 1
        route.append(b)
        routes.append(route)
        neighbours += zip(route, route[1:], strict=False)
    _reduce_crossings(layers, neighbours, num_nodes)
    widths = [max(len(line) for line in lines) * _CHARACTER_WIDTH + _PADDING for lines in labels]
    widths += [_ROUTE_WIDTH] * (num_nodes - len(labels))
    height = max((len(lines) for lines in labels), default=1) * _LINE_HEIGHT + 8.0
    return _place_boxes(labels, devices, routes, layers, widths, height)


def _levels(num_nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Length of the longest path from a source to each node. Node numbers need not be in topological order."""
    before: list[list[int]] = [[] for _ in range(num_nodes)]
    for a, b in edges:
        before[b].append(a)
    level = [0] * num_nodes
    for node in TopologicalSorter(dict(enumerate(before))).static_order():
        level[node] = max((level[each] + 1 for each in before[node]), default=0)
    return level


def _reduce_crossings(layers: list[list[int]], neighbours: Sequence[tuple[int, int]], num_nodes: int) -> None:
    """Barycentre heuristic: sort each layer by the mean position of its neighbours above, then below, in turns."""
    before: list[list[int]] = [[] for _ in range(num_nodes)]
    after: list[list[int]] = [[] for _ in range(num_nodes)]
    for a, b in neighbours:
        after[a].append(b)
        before[b].append(a)
    for sweep in range(_SWEEPS):
        place = {node: index - (len(layer) - 1) / 2 for layer in layers for index, node in enumerate(layer)}
        down = sweep % 2 == 0
        adjacent = before if down else after
        for layer in layers if down else layers[::-1]:
            weight = {
                node: sum(place[each] for each in adjacent[node]) / len(adjacent[node])
                if adjacent[node]
                else place[node]
                for node in layer
            }
            layer.sort(key=lambda node: weight[node])
            place.update({node: index - (len(layer) - 1) / 2 for index, node in enumerate(layer)})


def _place_boxes(
    labels: Sequence[Sequence[str]],
    devices: Sequence[int],
    routes: Sequence[Sequence[int]],
    layers: Sequence[Sequence[int]],
    widths: Sequence[float],
    height: float,
) -> PictureLayout:
    """Compute coordinates; layers that exceed the height continue in the next column."""
    step = height + _GAP_Y
    per_column = max(int(_COLUMN_HEIGHT // step), 1)
    num_columns = -(-len(layers) // per_column)
    per_column = -(-len(layers) // num_columns)  # of equal height
    spans = [sum(widths[node] for node in layer) + _GAP_X * (len(layer) - 1) for layer in layers]
    top: dict[int, Point] = {}
    bottom: dict[int, Point] = {}
    column_left: dict[int, float] = {}
    boxes: dict[int, Box] = {}
    left = 0.0
    for column in range(num_columns):
        first = column * per_column
        members = range(first, min(first + per_column, len(layers)))
        width = max(spans[on] for on in members)
        for index in members:
            x, y = left + (width - spans[index]) / 2, (index - first) * step
            for node in layers[index]:
                middle = x + widths[node] / 2
                top[node], bottom[node] = Point(middle, y), Point(middle, y + height)
                column_left[node] = left
                if node < len(labels):
                    boxes[node] = Box(tuple(labels[node]), devices[node], x, y, widths[node], height)
                x += widths[node] + _GAP_X
        left += width + _COLUMN_GAP
    edges = []
    for route in routes:
        points = [bottom[route[0]]]
        for node in route[1:]:
            (x, y), (x2, y2) = points[-1], top[node]
            if y2 < y:  # to the next column: below the box, up in the gap, and in from above
                gap, half = column_left[node] - _COLUMN_GAP / 2, _GAP_Y / 2
                points += [Point(x, y + half), Point(gap, y + half), Point(gap, y2 - half), Point(x2, y2 - half)]
            points.append(top[node])
            if node != route[-1]:
                points.append(bottom[node])
        edges.append(Edge(tuple(points), devices[route[0]] != devices[route[-1]]))
    return PictureLayout(
        boxes=tuple(boxes[node] for node in range(len(labels))),
        edges=tuple(edges),
        width=max(left - _COLUMN_GAP, 0.0),
        height=per_column * step - _GAP_Y / 2,
    )
