"""Graphs described in JSON: valid ones, and error messages with the place of the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.models.graph_file import read_graph_json
from hearth.errors import BadModelFile


def node(index: int, **changes: Any) -> dict[str, Any]:
    shape = {"id": index, "op": "Conv2D", "name": f"layer{index}", "out_shape": [1, 4], "out_bytes": 16}
    return {**shape, "param_bytes": 8 * index, "flops": 100.0 * index, **changes}


def diamond() -> dict[str, Any]:
    return {
        "name": "diamond", "source": "by hand", "params": 12, "input_shape": [1, 4],
        "nodes": [node(0, op="InputLayer"), node(1), node(2), node(3, op="Add")],
        "edges": [[0, 1], [0, 2], [1, 3], [2, 3]],
    }  # fmt: skip


def saved(tmp_path: Path, graph: Any) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(graph if isinstance(graph, str) else json.dumps(graph))
    return path


def test_graph_fields_are_read(tmp_path: Path) -> None:
    spec = read_graph_json(saved(tmp_path, diamond()))
    assert spec.name == "diamond"
    assert [(each.name, each.kind, each.flops) for each in spec.operators] == [
        ("layer0", "InputLayer", 0), ("layer1", "Conv2D", 100), ("layer2", "Conv2D", 200), ("layer3", "Add", 300),
    ]  # fmt: skip
    assert spec.successors == ((1, 2), (3,), (3,), ())
    assert [tensor.name for tensor in spec.outputs] == ["layer3"]
    assert spec.tensors[1].shape == (1, 4)
    assert [spec.parameter_bytes([index]) for index in range(4)] == [0, 8, 16, 24]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda graph: graph["nodes"][2].pop("out_bytes"), r"nodes\.2\.out_bytes"),
        (lambda graph: graph["nodes"][1].update(flops=-1), r"nodes\.1\.flops"),
        (lambda graph: graph["nodes"][1].update(id=7), "node 1 has the id 7"),
        (lambda graph: graph["nodes"][1].update(name="layer0"), "same name"),
        (lambda graph: graph["edges"].append([3, 1]), r"\[3, 1\] does not go"),
        (lambda graph: graph["edges"].append([0, 9]), r"\[0, 9\] does not go"),
        (lambda graph: graph["edges"].append([0, 1]), r"\[0, 1\] appears twice"),
        (lambda graph: graph.update(nodes=[]), "nodes"),
    ],
)
def test_graph_errors_name_their_place(tmp_path: Path, damage: Callable[[Any], Any], reason: str) -> None:
    graph = diamond()
    damage(graph)
    with pytest.raises(BadModelFile, match=reason):
        read_graph_json(saved(tmp_path, graph))


def test_other_json_is_rejected(tmp_path: Path) -> None:
    for text in ("", "[1, 2]", '{"name": '):
        with pytest.raises(BadModelFile):
            read_graph_json(saved(tmp_path, text))
    with pytest.raises(BadModelFile, match="No such file"):
        read_graph_json(tmp_path / "missing.json")
