"""Maps the nodes of a graph optimised by onnxruntime to the original operators that they compute. Pure.

onnxruntime fuses operators, renames them and inserts nodes. The mapping uses names that it preserves: the output tensor of a
fusion keeps its name, or the node gets the tensor's name (blocked layout of convolutions); some fusions keep the name of the
main node, with a suffix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

_BLOCKED_SUFFIX = "_nchwc"
# Never fused into a preceding operator: each of these has its own kernel, and Pad is fused into the following operator.
_NEVER_FUSED = frozenset(
    {
        "Conv", "ConvTranspose", "MatMul", "Gemm", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Softmax",
        "LayerNormalization", "Gather", "Transpose", "Resize", "LSTM", "GRU", "RNN", "Pad",
    }
)  # fmt: skip


# Inserted by onnxruntime around its kernels: such a node restores the shape or layout of a tensor, but has not computed it.
_LAYOUT = frozenset({"Reshape", "Transpose", "Cast", "ReorderInput", "ReorderOutput"})


class Node(Protocol):
    """A node of an ONNX graph (NodeProto)."""

    @property
    def name(self) -> str: ...
    @property
    def op_type(self) -> str: ...
    @property
    def input(self) -> Sequence[str]: ...
    @property
    def output(self) -> Sequence[str]: ...


class _Original(NamedTuple):
    nodes: Sequence[Node]
    producer: Mapping[str, int]  # the node that produces a tensor
    by_name: Mapping[str, int]
    constant: frozenset[int]  # nodes that onnxruntime evaluates while loading


def operators_of(
    original: Sequence[Node], optimised: Sequence[Node], inputs: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """For each optimised node's name, the names of the original nodes that it computes, in graph order.

    Both graphs are in topological order; `inputs` are the graph's inputs without initialisers. An original node is assigned to
    at most one optimised node; nodes that are evaluated while loading are assigned to none.
    """
    graph = _read(original, inputs)
    anchors = [_anchors(graph, node) for node in optimised]
    owner: dict[int, int] = {}
    for optimised_index, indices in enumerate(anchors):
        for index in indices:
            owner.setdefault(index, optimised_index)
    _assign_hidden_consumers(graph, {name for node in optimised for name in node.output}, owner)
    for optimised_index, indices in enumerate(anchors):
        for index in _unassigned_predecessors(graph, indices, owner):
            owner[index] = optimised_index
    names: dict[str, list[str]] = {node.name: [] for node in optimised}
    for index in sorted(owner):
        names[optimised[owner[index]].name].append(graph.nodes[index].name)
    return {name: tuple(originals) for name, originals in names.items()}


def _read(nodes: Sequence[Node], inputs: Iterable[str]) -> _Original:
    varying, constant = set(inputs), set[int]()
    for index, node in enumerate(nodes):
        if varying.isdisjoint(node.input):
            constant.add(index)
        else:
            varying.update(node.output)
    return _Original(
        nodes=nodes,
        producer={name: index for index, node in enumerate(nodes) for name in node.output if name},
        by_name={node.name: index for index, node in enumerate(nodes) if node.name},
        constant=frozenset(constant),
    )


def _anchors(graph: _Original, node: Node) -> list[int]:
    """The original nodes that an optimised node certainly computes, by the tensors that it produces and by its name."""
    tensors = [*node.output, node.name.removesuffix(_BLOCKED_SUFFIX)]
    anchors = [graph.producer[name] for name in tensors if name in graph.producer]
    if node.op_type in _LAYOUT:
        anchors = [index for index in anchors if graph.nodes[index].op_type == node.op_type]
    name = node.name
    while name:
        if name in graph.by_name:
            anchors.append(graph.by_name[name])
            break
        name = name.rpartition("/")[0]
    return [index for index in dict.fromkeys(anchors) if index not in graph.constant]


def _assign_hidden_consumers(graph: _Original, exposed: set[str], owner: dict[int, int]) -> None:
    """Assign consumers of tensors that exist only inside a fusion to that fusion.

    For example, a residual addition is part of a convolution's fusion. If several fusions are possible, the last one to run
    is chosen.
    """
    for index, node in enumerate(graph.nodes):
        if index in owner or index in graph.constant or node.op_type in _NEVER_FUSED:
            continue
        producers = {name: graph.producer[name] for name in node.input if name in graph.producer}
        owners = {name: owner[producer] for name, producer in producers.items() if producer in owner}
        last = max(owners.values(), default=-1)
        if any(optimised_index == last and name not in exposed for name, optimised_index in owners.items()):
            owner[index] = last


def _unassigned_predecessors(graph: _Original, anchors: Sequence[int], owner: Mapping[int, int]) -> list[int]:
    """The unassigned nodes between the anchors and the tensors that other optimised nodes produce."""
    predecessors: list[int] = []
    pending = list(anchors)
    while pending:
        for name in graph.nodes[pending.pop()].input:
            index = graph.producer.get(name)
            if index is not None and index not in owner and index not in graph.constant and index not in predecessors:
                predecessors.append(index)
                pending.append(index)
    return predecessors
