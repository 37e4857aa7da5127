"""GCOF, Moirai's graph coarsening with operator fusion (arXiv 2312.04025, Algorithm 1). Pure.

Operators that the backend fuses are placed together. The rules are sequences of ONNX operator types that onnxruntime
fuses; each operator is visited once with each edge, so the work is O(V + E).

It differs from the published Algorithm 1 in two ways. Chains begin in topological order, not in depth-first order: where
two branches could both continue with one operator (an addition of two convolutions), the branch that begins first gets it,
and in the published form the one that the search enters first. And a chain follows its rule from its first operator on, so
that nothing is bound before it is known to complete a rule, and nothing is unbound; the published search calls itself for
every edge, and as written visits an operator once for each path that leads to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hearth.plan.graph_spec import GraphSpec, Operator, Tensor

_ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "HardSigmoid")

FusionRule = tuple[str, ...]

_EPILOGUES: tuple[FusionRule, ...] = ((), ("BatchNormalization",), ("Add",), ("BatchNormalization", "Add"))

# Sequences that onnxruntime's graph optimisations fuse into one CPU kernel: padding, bias and batch normalisation become
# part of the convolution, an addition and an activation its epilogue; decomposed norms and Gelu become one kernel.
_CONVOLUTIONS: tuple[FusionRule, ...] = tuple(
    ("Conv", *epilogue, *last) for epilogue in _EPILOGUES for last in ((), *((kind,) for kind in _ACTIVATIONS))
)
FUSION_RULES: tuple[FusionRule, ...] = (
    *(rule for rule in _CONVOLUTIONS if len(rule) > 1),
    *(("Pad", *rule) for rule in _CONVOLUTIONS),
    ("MatMul", "Add"),
    *(("Gemm", kind) for kind in _ACTIVATIONS),
    ("Div", "Erf", "Add", "Mul", "Mul"),  # Gelu, written out
    ("Div", "Erf", "Add", "Mul"),
    ("Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul", "Add"),  # LayerNormalization, written out
    ("Add", "LayerNormalization"),  # SkipLayerNormalization
    ("Sigmoid", "Mul"),  # Swish: QuickGelu
)


@dataclass(frozen=True)
class CoarseGraph:
    """The coarse graph. `groups[g]` are the operators of the original graph in operator g of `spec`, in their order."""

    spec: GraphSpec
    groups: tuple[tuple[int, ...], ...]

    def expand_assignment(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """A device for each original operator, from one for each group."""
        devices = [0] * sum(map(len, self.groups))
        for group, device in zip(self.groups, assignment, strict=True):
            for operator in group:
                devices[operator] = device
        return tuple(devices)

    def group_seconds(self, of_operators: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        """[groups][K] from [n][K]: a fused kernel takes the sum of its operators' times."""
        return tuple(tuple(map(sum, zip(*(of_operators[i] for i in group), strict=True))) for group in self.groups)

    def operator_starts(
        self, of_groups: Sequence[float], assignment: Sequence[int], of_operators: Sequence[Sequence[float]]
    ) -> tuple[float, ...]:
        """The start of each original operator: those of a group follow one another. Empty if `of_groups` is empty."""
        if not of_groups:
            return ()
        starts = [0.0] * len(assignment)
        for group, start in zip(self.groups, of_groups, strict=True):
            for operator in group:
                starts[operator] = start
                start += of_operators[operator][assignment[operator]]
        return tuple(starts)


def coarsen(spec: GraphSpec) -> CoarseGraph:
    """Fuse chains of operators that match a rule, never across a tensor that has another consumer."""
    complete = set(FUSION_RULES)
    partial = {rule[:length] for rule in FUSION_RULES for length in range(1, len(rule))}
    begun = complete | partial
    taken: set[int] = set()
    chains: list[list[int]] = []
    for first in range(spec.num_operators):
        if first in taken:
            continue
        chain, length = [first], 1
        kinds: tuple[str, ...] = (spec.operators[first].kind,)
        # Extend the chain while it is a prefix of a rule; at the end keep only the part that completed one.
        while kinds in partial:
            follower = _only_successor(spec, chain[-1])
            if follower is None or follower in taken:
                break
            kinds += (spec.operators[follower].kind,)
            if kinds not in begun or not _operands_match(spec, chain[-1], follower, kinds):
                break
            chain.append(follower)
            if kinds in complete:
                length = len(chain)
        if length > 1:
            taken.update(chain[:length])
            chains.append(chain[:length])
    return _merge(spec, chains)


def _operands_match(spec: GraphSpec, last: int, follower: int, kinds: FusionRule) -> bool:
    """Whether the operands match the rule: a bias must be a weight, and Swish must gate its own input."""
    if kinds == ("MatMul", "Add"):
        return bool(spec.operators[follower].parameters)
    if kinds == ("Sigmoid", "Mul"):
        consumed = {tensor.name for tensor in spec.consumed[follower]}
        return all(tensor.name in consumed for tensor in spec.consumed[last])
    return True


def _only_successor(spec: GraphSpec, operator: int) -> int | None:
    """The only consumer of the operator's only output; None if there are several, or if it is an output of the graph."""
    outputs = spec.produced[operator]
    if len(outputs) != 1 or outputs[0].is_output or len(set(outputs[0].consumers)) != 1:
        return None
    return outputs[0].consumers[0]


def _merge(spec: GraphSpec, chains: Sequence[Sequence[int]]) -> CoarseGraph:
    """Each group takes the position of its last operator, which keeps the order topological."""
    by_last = {chain[-1]: tuple(chain) for chain in chains}
    inside = {operator for chain in chains for operator in chain[:-1]}
    groups = tuple(by_last.get(i, (i,)) for i in range(spec.num_operators) if i not in inside)
    group_of = {operator: index for index, group in enumerate(groups) for operator in group}
    operators = tuple(
        Operator(
            spec.operators[group[-1]].name,
            "+".join(spec.operators[i].kind for i in group),
            sum(spec.operators[i].flops for i in group),
            tuple(sorted({parameter for i in group for parameter in spec.operators[i].parameters})),
            spec.operators[group[-1]].group,
        )
        for group in groups
    )
    tensors: list[Tensor] = []
    for tensor in spec.tensors:
        if tensor.source not in inside:  # tensors inside a group never leave the kernel
            source = None if tensor.source is None else group_of[tensor.source]
            consumers = tuple(sorted({group_of[i] for i in tensor.consumers} - {source}))
            tensors.append(tensor._replace(source=source, consumers=consumers))
    return CoarseGraph(GraphSpec(spec.name, operators, tuple(tensors), spec.parameters), groups)
