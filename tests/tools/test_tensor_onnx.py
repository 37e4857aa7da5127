"""The task graphs of Doppler's evaluation as ONNX files: they compute what numpy computes, vertex by vertex."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from support.onnx_models import run_whole

from coordinator.models.onnx.reader import read_onnx
from tools.bench.tensor.graphs import ChainSizes, FfnnSizes, GraphName, GraphSizes, LlamaSizes, tensor_graph
from tools.bench.tensor.onnx import write_onnx
from tools.bench.tensor.values import expected_result, request, whole_result

SMALL = GraphSizes(ChainSizes(16), FfnnSizes(32, 8, 16), LlamaSizes(12, 32, 4, 24, 40))
ALL = [("chain-mm", 4), ("ffnn", 4), ("llama-block", 4), ("llama-layer", 4), ("llama-block", 8), ("llama-layer", 8)]


@pytest.mark.parametrize(("name", "devices"), ALL)
def test_execution_equals_numpy(name: GraphName, devices: int, tmp_path: Path) -> None:
    graph = tensor_graph(name, SMALL, devices)
    path = write_onnx(graph, tmp_path / "graph.onnx", seed=3)
    found = whole_result(graph, run_whole(path, request(graph, seed=3)))
    np.testing.assert_allclose(found, expected_result(graph, SMALL, seed=3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "devices"), ALL)
def test_every_vertex_is_an_operator_of_the_file(name: GraphName, devices: int, tmp_path: Path) -> None:
    """No vertex is folded away as constant, and every edge is one between the nodes of the two vertices."""
    graph = tensor_graph(name, SMALL, devices)
    spec = read_onnx(write_onnx(graph, tmp_path / "graph.onnx")).spec
    vertices = {vertex.name: index for index, vertex in enumerate(graph.vertices)}
    owners = [vertices[operator.name.partition("/")[0]] for operator in spec.operators]
    edges = {(owners[p], owners[v]) for v in range(spec.num_operators) for p in spec.predecessors[v]}
    assert set(owners) == set(vertices.values())
    assert {(p, v) for p, v in edges if p != v} == {(p, v) for v in vertices.values() for p in graph.predecessors(v)}
    ours = {tensor.name: tensor for tensor in graph.spec().tensors if tensor.source is not None}
    written = {tensor.name: tensor for tensor in spec.tensors if tensor.name in ours}
    complex_ = {v.name for v in graph.vertices if graph.tensors[v.operator].dtype == "complex64"}
    assert {each for each in ours if written[each].num_bytes != ours[each].num_bytes} == complex_


def test_weights_are_written_once_and_depend_on_the_seed_only(tmp_path: Path) -> None:
    graph = tensor_graph("llama-layer", SMALL)
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        write_onnx(graph, tmp_path / name, seed)
    one, again, other = ((tmp_path / f"{name}.weights").read_bytes() for name in ("one", "again", "other"))
    assert one == again != other
    assert len(one) == sum(parameter.num_bytes for parameter in graph.spec().parameters)
