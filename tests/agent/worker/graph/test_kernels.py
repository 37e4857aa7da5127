"""Mapping of onnxruntime's kernels to the operators of the graph. Pure, without onnxruntime."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from agent.worker.graph.kernels import operators_of


class Node(NamedTuple):
    name: str
    op_type: str
    input: tuple[str, ...]
    output: tuple[str, ...]


def graph(*lines: str) -> list[Node]:
    """A graph from lines `name kind a,b -> c`."""
    nodes = []
    for line in lines:
        made_of, made = line.split(" -> ")
        name, kind, taken = made_of.split(" ")
        nodes.append(Node(name, kind, tuple(taken.split(",")), tuple(made.split(","))))
    return nodes


# A residual block in onnxruntime's blocked layout: sums and activations are fused into convolutions, and their tensors
# have lost their names.
RESIDUAL = graph(
    "c1 Conv x,w1 -> a", "r1 Relu a -> b", "c2 Conv b,w2 -> c", "add Add c,b -> d", "r2 Relu d -> e", "pad Pad e,p -> f",
    "c3 Conv f,w3 -> g", "flat Flatten g -> y",
)  # fmt: skip
BLOCKED = graph(
    "b_nchwc Conv x,w1 -> token_0", "c_nchwc Conv token_0,w2,token_0 -> token_1", "g_nchwc Conv token_1,w3 -> token_2",
    "ReorderOutput ReorderOutput token_2 -> g", "flat Flatten g -> y",
)  # fmt: skip


@pytest.mark.parametrize(
    ("original", "optimised", "expected"),
    [
        (
            RESIDUAL, BLOCKED,
            {"b_nchwc": ("c1", "r1"), "c_nchwc": ("c2", "add", "r2"), "g_nchwc": ("pad", "c3"), "ReorderOutput": (),
             "flat": ("flat",)},
        ),
        (  # a chain whose last tensor keeps its name
            graph("d Div x,k -> a", "e Erf a -> b", "p Add b,one -> c", "m Mul x,c -> y", "r Relu y -> z"),
            graph("Gelu Gelu x -> y", "r Relu y -> z"),
            {"Gelu": ("d", "e", "p", "m"), "r": ("r",)},
        ),
        (  # a product between two inserted reshapes keeps its name, with a suffix
            graph("l/m MatMul x,w -> a", "l/b Add a,bias -> y"),
            graph("in Reshape x -> t1", "l/m/MatMulAddFusion Gemm t1,w,bias -> t2", "out Reshape t2 -> y"),
            {"in": (), "l/m/MatMulAddFusion": ("l/m", "l/b"), "out": ()},
        ),
        (  # operators without inputs are computed at load
            graph("c Mul w,k -> v", "s Shape x -> n", "m MatMul x,v -> y"),
            graph("m MatMul x,v -> y"),
            {"m": ("m",)},
        ),
        (  # nothing fused: unchanged
            graph("s Split x -> a,b", "c Concat b,a -> y"),
            graph("s Split x -> a,b", "c Concat b,a -> y"),
            {"s": ("s",), "c": ("c",)},
        ),
    ],
)  # fmt: skip
def test_kernels_are_mapped_to_operators(
    original: list[Node], optimised: list[Node], expected: dict[str, tuple[str, ...]]
) -> None:
    assert operators_of(original, optimised, ["x"]) == expected
