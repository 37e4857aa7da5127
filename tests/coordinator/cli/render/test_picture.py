"""The picture of a plan: colours by device, edges between devices, and names with special characters."""

from __future__ import annotations

from coordinator.cli.render.picture import dot_graph


def test_dot_file_has_legend_colours_and_edges_between_devices() -> None:
    operators = [("Conv", 'x"y'), ("Conv", "a\\b"), ("Relu", "relu")]
    lines = dot_graph("model <1>", ["a: 2 operators", "c"], operators, [0, 0, 1], [(0, 1), (1, 2)]).splitlines()
    assert (lines[0], lines[-1]) == ("digraph {", "}")
    assert 'label="model <1>"' in lines[2]
    nodes = [line.partition(", fillcolor=") for line in lines if "fillcolor" in line]
    assert [label for label, _, _ in nodes] == [
        'device0 [label="a: 2 operators"', 'device1 [label="c"',
        r'0 [label="Conv\nx\"y"', r'1 [label="Conv\na\\b"', r'2 [label="Relu\nrelu"',
    ]  # fmt: skip
    first, second = nodes[0][2], nodes[1][2]
    assert first != second
    assert [colour for _, _, colour in nodes] == [first, second, first, first, second]
    assert [line for line in lines if "->" in line] == ["0 -> 1;", "1 -> 2 [color=red];"]
