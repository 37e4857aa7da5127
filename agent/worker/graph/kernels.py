"""Which operators of a graph each node stands for that onnxruntime made of it. Pure.

onnxruntime fuses operators, renames them, and puts nodes of its own between them. What it leaves is enough to tell: the
tensor at the end of a fusion keeps its name, or gives it to the node (in the blocked layout of convolutions); some fusions
keep the name of the node that does the work, with a suffix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

_BLOCKED_SUFFIX = "_nchwc"
# Never fused behind another operator: kernels are made around them, one each, and a padding goes with what follows it.
_CORES = frozenset(
    {
        "Conv", "ConvTranspose", "MatMul", "Gemm", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Softmax",
        "LayerNormalization", "Gather", "Transpose", "Resize", "LSTM", "GRU", "RNN", "Pad",
    }
)  # fmt: skip


# What onnxruntime puts around its kernels: such a node has not computed the tensor that it gives back its shape to.
_LAYOUT = frozenset({"Reshape", "Transpose", "Cast", "ReorderInput", "ReorderOutput"})


class Node(Protocol):
    """As in an ONNX graph."""

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
    maker: Mapping[str, int]  # of a tensor
    by_name: Mapping[str, int]
    constant: frozenset[int]  # nodes that onnxruntime computes while it loads


def operators_of(
    original: Sequence[Node], optimised: Sequence[Node], inputs: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """By the name of each optimised node, the names of the original ones that it computes, in their order.

    Both graphs in an order in which they can run; `inputs` of the graph, without its initialisers. An original node is in
    one place at most; those that are computed at load are in none.
    """
    graph = _read(original, inputs)
    anchors = [_anchors(graph, node) for node in optimised]
    owner: dict[int, int] = {}
    for place, found in enumerate(anchors):
        for index in found:
            owner.setdefault(index, place)
    _follow_hidden(graph, {name for node in optimised for name in node.output}, owner)
    for place, found in enumerate(anchors):
        for index in _unowned_before(graph, found, owner):
            owner[index] = place
    names: dict[str, list[str]] = {node.name: [] for node in optimised}
    for index in sorted(owner):
        names[optimised[owner[index]].name].append(graph.nodes[index].name)
    return {name: tuple(found) for name, found in names.items()}


def _read(nodes: Sequence[Node], inputs: Iterable[str]) -> _Original:
    varying, constant = set(inputs), set[int]()
    for index, node in enumerate(nodes):
        if varying.isdisjoint(node.input):
            constant.add(index)
        else:
            varying.update(node.output)
    return _Original(
        nodes=nodes,
        maker={name: index for index, node in enumerate(nodes) for name in node.output if name},
        by_name={node.name: index for index, node in enumerate(nodes) if node.name},
        constant=frozenset(constant),
    )


def _anchors(graph: _Original, node: Node) -> list[int]:
    """The original nodes that a node computes for certain: by the tensors that it makes, and by its name."""
    tensors = [*node.output, node.name.removesuffix(_BLOCKED_SUFFIX)]
    found = [graph.maker[name] for name in tensors if name in graph.maker]
    if node.op_type in _LAYOUT:
        found = [index for index in found if graph.nodes[index].op_type == node.op_type]
    name = node.name
    while name:
        if name in graph.by_name:
            found.append(graph.by_name[name])
            break
        name = name.rpartition("/")[0]
    return [index for index in dict.fromkeys(found) if index not in graph.constant]


def _follow_hidden(graph: _Original, exposed: set[str], owner: dict[int, int]) -> None:
    """A tensor that nothing makes any more is inside of its maker's fusion, and so is what takes it.

    As a residual sum is in its convolution: of several that it could be in, the one that runs last.
    """
    for index, node in enumerate(graph.nodes):
        if index in owner or index in graph.constant or node.op_type in _CORES:
            continue
        makers = {name: graph.maker[name] for name in node.input if name in graph.maker}
        owners = {name: owner[maker] for name, maker in makers.items() if maker in owner}
        last = max(owners.values(), default=-1)
        if any(place == last and name not in exposed for name, place in owners.items()):
            owner[index] = last


def _unowned_before(graph: _Original, anchors: Sequence[int], owner: Mapping[int, int]) -> list[int]:
    """What leads to the anchors from the tensors that other nodes make."""
    found: list[int] = []
    todo = list(anchors)
    while todo:
        for name in graph.nodes[todo.pop()].input:
            index = graph.maker.get(name)
            if index is not None and index not in owner and index not in graph.constant and index not in found:
                found.append(index)
                todo.append(index)
    return found
