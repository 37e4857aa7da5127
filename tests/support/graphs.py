"""Graphs of operators for tests: small ones in memory, clusters for them, and ONNX files with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor


def from_edges(
    name: str,
    operators: Sequence[Operator],
    out_bytes: Sequence[int],
    edges: Iterable[tuple[int, int]],
    parameters: Sequence[Parameter] = (),
) -> GraphSpec:
    """A graph in which every operator produces one tensor, read by all its successors; those of sinks are outputs."""
    consumers: list[list[int]] = [[] for _ in operators]
    for source, target in edges:
        consumers[source].append(target)
    tensors = tuple(
        Tensor(operator.name, out_bytes[index], index, tuple(sorted(consumers[index])), is_output=not consumers[index])
        for index, operator in enumerate(operators)
    )
    return GraphSpec(name, tuple(operators), tensors, tuple(parameters))


def chain(seconds: int, out_bytes: Sequence[int], weights: Sequence[int] | None = None) -> GraphSpec:
    """Consecutive operators, each of `seconds` FLOPs."""
    count = len(out_bytes)
    weights = weights or [0] * count
    operators = [Operator(f"op{index}", "Conv", float(seconds), (index,)) for index in range(count)]
    parameters = [Parameter(f"w{index}", size) for index, size in enumerate(weights)]
    return from_edges("chain", operators, out_bytes, [(i, i + 1) for i in range(count - 1)], parameters)


def two_branches(flops: float = 1.0, out_bytes: int = 100, weights: int = 10) -> GraphSpec:
    """0 -> (1 -> 2 | 3 -> 4) -> 5, with equal operators."""
    operators = [Operator(f"op{index}", "Conv", flops, (index,)) for index in range(6)]
    parameters = [Parameter(f"w{index}", weights) for index in range(6)]
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]
    return from_edges("two-branches", operators, [out_bytes] * 6, edges, parameters)


def layered_graph(num_operators: int, fan_out: bool = False) -> GraphSpec:
    """Operators read one or two of the 20 before them, or the last reads all and these the first."""
    rng, n, edges = Random(0), num_operators, set[tuple[int, int]]()
    for target in range(1, n):
        edges.update((rng.randrange(max(0, target - 20), target), target) for _ in range(0 if fan_out else 2))
    if fan_out:
        edges = {(0, middle) for middle in range(1, n - 1)} | {(middle, n - 1) for middle in range(1, n - 1)}
    operators = [Operator(f"op{index}", "Conv", rng.uniform(1, 20), (index,)) for index in range(n)]
    parameters = [Parameter(f"w{index}", 1000) for index in range(n)]
    return from_edges("layered", operators, [10_000] * n, sorted(edges), parameters)


def cluster_of(
    spec: GraphSpec,
    flops_per_second: Sequence[float],
    bytes_per_second: float,
    budget_bytes: int | Sequence[int] = 1 << 30,
    latency_seconds: float = 0.0,
    **device: Any,
) -> GraphCluster:
    """Devices a, b, ..., with equal links; `device` has further fields of each."""
    ranks = range(len(flops_per_second))
    budgets = [budget_bytes] * len(ranks) if isinstance(budget_bytes, int) else budget_bytes
    return GraphCluster(
        devices=tuple(ClusterDevice(f"id-{'abcdefgh'[k]}", "abcdefgh"[k], budgets[k], **device) for k in ranks),
        seconds=tuple(tuple(operator.flops / rate for rate in flops_per_second) for operator in spec.operators),
        bytes_per_second=tuple(tuple(math.inf if a == b else bytes_per_second for b in ranks) for a in ranks),
        latency_seconds=tuple(tuple(0.0 if a == b else latency_seconds for b in ranks) for a in ranks),
        measured=bool(device),
    )


def save_graph(path: Path, spec: GraphSpec) -> Path:
    """Save as the JSON that `hearth plan --cluster` reads."""
    nodes = [
        {
            "id": index, "op": operator.kind, "name": operator.name, "out_shape": [1], "flops": operator.flops,
            "out_bytes": spec.produced[index][0].num_bytes, "param_bytes": spec.parameter_bytes([index]),
        }
        for index, operator in enumerate(spec.operators)
    ]  # fmt: skip
    edges = [[before, index] for index in range(spec.num_operators) for before in spec.predecessors[index]]
    path.write_text(json.dumps({"name": spec.name, "nodes": nodes, "edges": edges}))
    return path


def save_two_branch_model(path: Path, channels: int = 8, size: int = 16, depth: int = 2, batch: int | str = 1) -> Path:
    """A stem, two branches of convolutions, and a head over both, as ONNX. The input is `image`, the output `scores`."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(7)
    weights, nodes = [], []

    def conv(name: str, source: str, inputs: int, kernel: int = 3) -> str:
        scale = 1.0 / math.sqrt(inputs * kernel * kernel)
        values = (random.standard_normal((channels, inputs, kernel, kernel)) * scale).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"{name}.weight"))
        weights.append(numpy_helper.from_array(random.standard_normal(channels).astype(np.float32), f"{name}.bias"))
        pads = [kernel // 2] * 4
        taken = [source, f"{name}.weight", f"{name}.bias"]
        nodes.append(helper.make_node("Conv", taken, [f"{name}.conv"], name, pads=pads))
        nodes.append(helper.make_node("Relu", [f"{name}.conv"], [name], f"{name}.relu"))
        return name

    stem = conv("stem", "image", 3)
    ends = []
    for branch in ("left", "right"):
        tensor = stem
        for index in range(depth):
            tensor = conv(f"{branch}{index}", tensor, channels)
        ends.append(tensor)
    nodes.append(helper.make_node("Concat", ends, ["both"], "concat", axis=1))
    head = conv("head", "both", 2 * channels, 1)
    nodes.append(helper.make_node("GlobalAveragePool", [head], ["pooled"], "pool"))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["scores"], "flatten"))
    graph = helper.make_graph(
        nodes, "two-branches",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, size, size])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, channels])],
        weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def save_bfloat16_model(path: Path) -> Path:
    """A graph whose input `x` has a type that numpy lacks."""
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], "cast", to=TensorProto.FLOAT)], "bfloat16",
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
