"""The picture of a plan: boxes do not overlap, are few enough to read, and are coloured by device."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli.render.picture import check_picture, make_drawing, render_picture, save_picture
from coordinator.cli.render.picture_layout import MAX_BOXES, group_operators, lay_out
from hearth.errors import BadSetting

Edges = list[tuple[int, int]]


@st.composite
def placed(draw: st.DrawFn) -> tuple[list[int], Edges]:
    """A random assignment of a random graph to three devices, and its edges."""
    count = draw(st.integers(1, 24))
    edges = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=40))
    return draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), sorted((a, b) for a, b in edges if a < b)


@given(placed(), st.integers(1, 12))
def test_parts_partition_operators_without_cycles(graph: tuple[list[int], Edges], most: int) -> None:
    assignment, edges = graph
    parts, between = group_operators(assignment, edges, most)
    assert sorted(each for part in parts for each in part.operators) == list(range(len(assignment)))
    assert all(assignment[each] == part.device for part in parts for each in part.operators)
    before = {index: {a for a, b in between if b == index} for index in range(len(parts))}
    while ready := [index for index, needed in before.items() if not needed & before.keys()]:
        for index in ready:
            del before[index]
    assert not before


@given(placed())
def test_boxes_do_not_overlap_and_edges_connect_them(graph: tuple[list[int], Edges]) -> None:
    assignment, edges = graph
    layout = lay_out([(f"operator {each}",) for each in range(len(assignment))], assignment, edges)
    boxes = layout.boxes
    for index, one in enumerate(boxes):
        assert 0 <= one.x <= one.x + one.width <= layout.width + 1e-6
        assert 0 <= one.y <= one.y + one.height <= layout.height
        for other in boxes[index + 1 :]:
            apart = one.x + one.width <= other.x or other.x + other.width <= one.x
            assert apart or one.y + one.height <= other.y or other.y + other.height <= one.y
    for (a, b), edge in zip(edges, layout.edges, strict=True):
        assert edge.points[0] == (boxes[a].x + boxes[a].width / 2, boxes[a].y + boxes[a].height)
        assert edge.points[-1] == (boxes[b].x + boxes[b].width / 2, boxes[b].y)
        assert edge.crosses == (assignment[a] != assignment[b])


def chain(count: int, devices: int) -> tuple[list[int], Edges]:
    return [index * devices // count for index in range(count)], [(i, i + 1) for i in range(count - 1)]


def test_large_graph_is_merged_until_readable() -> None:
    assignment, edges = chain(MAX_BOXES, 3)
    assert len(group_operators(assignment, edges)[0]) == MAX_BOXES
    assignment, edges = chain(10 * MAX_BOXES, 3)
    assert len(group_operators(assignment, edges)[0]) == 3
    # A ladder has no chains: the operators of a device between two exchanges are one box.
    steps = 2 * MAX_BOXES
    rungs = [(i, i + j) for i in range(steps) for j in (1, 2) if i + j < steps]
    assert len(group_operators([min(i // 100, 2) for i in range(steps)], rungs)[0]) == 3


def test_tall_graph_is_wrapped_into_columns() -> None:
    assignment, edges = chain(100, 2)
    layout = lay_out([(f"op{index}",) for index in range(100)], assignment, edges)
    assert layout.height < 2000
    assert len({box.x for box in layout.boxes}) > 1
    assert any(b.y < a.y for edge in layout.edges for a, b in zip(edge.points, edge.points[1:], strict=False))


def test_svg_has_boxes_and_legend_and_escapes_names() -> None:
    drawing = make_drawing(
        "model <1>", ["a & b: 2 operators", "c"], ["x<y", "conv2", "relu"], ["Conv", "Conv", "Relu"], [0, 0, 1],
        [(0, 1), (1, 2)],
    )  # fmt: skip
    root = ElementTree.fromstring(render_picture(drawing, ".svg"))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:3] == ["model <1>", "a & b: 2 operators", "c"]
    assert texts[3:] == ["Conv", "x<y", "Conv", "conv2", "Relu", "relu"]
    fills = [each.get("fill") for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert fills[1:3] == [fills[3], fills[5]]  # the legend uses the colours of the boxes
    assert fills[3] == fills[4] != fills[5]
    strokes = [each.get("stroke") for each in root.iter("{http://www.w3.org/2000/svg}path")]
    assert strokes[0] != strokes[1]  # the second edge crosses to another device


def test_picture_format_follows_the_file_extension(tmp_path: Path) -> None:
    drawing = make_drawing("model", ["a"], ["x", "y"], (), [0, 0], [(0, 1)])
    save_picture(tmp_path / "plan.svg", drawing)
    ElementTree.parse(tmp_path / "plan.svg")
    with pytest.raises(BadSetting, match=r"must end in \.svg or \.png"):
        check_picture(tmp_path / "plan.pdf")
    with pytest.raises(BadSetting, match="cannot be written"):
        save_picture(tmp_path / "plan.svg" / "inside.svg", drawing)
    pytest.importorskip("matplotlib", reason="PNG needs matplotlib")
    save_picture(tmp_path / "plan.png", drawing)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_is_reported_before_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadSetting, match="PNG needs matplotlib"):
        check_picture(Path("plan.png"))
    check_picture(Path("plan.svg"))
