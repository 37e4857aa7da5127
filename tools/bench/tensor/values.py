"""Values of a task graph's inputs, block by block, and the four networks in numpy, whole.

Every block has its own generator, so that a file of weights is written without holding more than one block.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tools.bench.tensor.graphs import EPSILON, GraphSizes, LlamaSizes
from tools.bench.tensor.kernels import SCALE
from tools.bench.tensor.sharding import Block, CutTensor, ShardedGraph

Array = np.ndarray[Any, Any]
_ROTARY_BASE = 10_000.0


def input_block(tensor: CutTensor, block: Block, seed: int) -> Array:
    """A block of an input: positions, the rotary table as pairs of cosine and sine, or random numbers of a fitting size."""
    shape = tensor.block_shape
    first_row = block[0] * shape[0]
    if tensor.dtype == "int64":
        return np.arange(first_row, first_row + shape[0], dtype=np.int64)
    if tensor.dtype == "complex64":
        frequencies = _ROTARY_BASE ** -(np.arange(shape[1]) / shape[1])
        angles = np.outer(np.arange(first_row, first_row + shape[0]), frequencies)
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    random = np.random.default_rng([seed, zlib.crc32(tensor.block_name(block).encode())])
    values: Array = random.standard_normal(shape, np.float32)
    if len(shape) == 1:  # the weight of a norm
        values = np.float32(1) + np.float32(0.2) * values
    elif tensor.is_weight:
        values /= np.float32(np.sqrt(tensor.extents[0]))
    return values


def request(graph: ShardedGraph, seed: int) -> dict[str, Array]:
    """The inputs of one request, and a value of `SCALE`, which only graphs without other inputs have."""
    tensors = [tensor for tensor in graph.inputs if not tensor.is_weight]
    if not tensors:
        return {SCALE: np.random.default_rng(seed).uniform(0.5, 1.5, 1).astype(np.float32)}
    return {tensor.block_name(block): input_block(tensor, block, seed) for tensor in tensors for block in tensor.blocks}


def whole_input(graph: ShardedGraph, name: str, seed: int) -> Array:
    """An input of the uncut network."""
    tensor = graph.tensors[name]
    return _assembled(tensor, lambda block: input_block(tensor, block, seed))


def whole_result(graph: ShardedGraph, outputs: Mapping[str, Array]) -> Array:
    """The network's result, put together from the blocks that an inference returns."""
    tensor = list(graph.tensors.values())[-1]
    return _assembled(tensor, lambda block: outputs[graph.vertices[tensor.vertices[block]].name])


def result_blocks(graph: ShardedGraph, whole: Array) -> dict[str, Array]:
    """The blocks of the network's result that an inference returns, cut from the whole result."""
    tensor = list(graph.tensors.values())[-1]
    return {graph.vertices[tensor.vertices[block]].name: whole[_span(tensor, block)] for block in tensor.blocks}


def expected_result(graph: ShardedGraph, sizes: GraphSizes, seed: int) -> Array:
    """The result for `request(graph, seed)` with the weights of this seed, by the uncut network in numpy."""

    def value(name: str) -> Array:
        return whole_input(graph, name, seed)

    if graph.name == "chain-mm":
        total: Array = value("A") @ value("B") + value("C") @ (value("D") @ value("E"))
        total *= request(graph, seed)[SCALE]
        return total
    if graph.name == "ffnn":
        return _softmax(np.maximum(value("X") @ value("W1"), 0) @ value("W2"))
    return _llama(sizes.llama, value, has_head=graph.name == "llama-layer")


def _llama(sizes: LlamaSizes, value: Callable[[str], Array], has_head: bool) -> Array:
    """Indices: s rows, t keys, h hidden, H heads, d width of a head."""
    rows, heads = sizes.rows, sizes.heads

    def norm(x_sh: Array, name: str) -> Array:
        normed: Array = x_sh / np.sqrt((x_sh**2).mean(axis=1, keepdims=True) + EPSILON) * value(f"{name}.weight")
        return normed

    def split(x_sh: Array) -> Array:
        heads_first: Array = x_sh.reshape(rows, heads, -1).transpose(1, 0, 2)
        return heads_first

    def rotate(x_Hsd: Array) -> Array:
        table = value("table" if has_head else "rotary").view(np.complex64)[..., 0]
        turned: Array = (np.ascontiguousarray(x_Hsd).view(np.complex64) * table).view(np.float32)
        return turned

    x_sh: Array = value("x")
    normed = norm(x_sh, "norm1")
    q_Hsd, k_Htd, v_Htd = (split(normed @ value(f"{name}.weight")) for name in "qkv")
    scores_Hst = rotate(q_Hsd) @ rotate(k_Htd).transpose(0, 2, 1) / np.float32(np.sqrt(q_Hsd.shape[-1]))
    if has_head:
        scores_Hst = np.where(np.tri(rows, dtype=bool), scores_Hst, -np.inf)
    attended_sh = (_softmax(scores_Hst) @ v_Htd).transpose(1, 0, 2).reshape(rows, -1)
    x_sh = x_sh + attended_sh @ value("o.weight")
    normed = norm(x_sh, "norm2")
    gate = normed @ value("gate.weight")
    x_sh = x_sh + (gate / (1 + np.exp(-gate)) * (normed @ value("up.weight"))) @ value("down.weight")
    if has_head:
        x_sh = norm(x_sh, "norm3")[-1] @ value("head.weight")
    return x_sh


def _softmax(x: Array) -> Array:
    powers: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def _assembled(tensor: CutTensor, block_of: Callable[[Block], Array]) -> Array:
    whole: Array | None = None
    for block in tensor.blocks:
        values = block_of(block)
        if whole is None:
            whole = np.empty((*tensor.extents, *values.shape[len(tensor.extents) :]), values.dtype)
        whole[_span(tensor, block)] = values
    assert whole is not None
    return whole


def _span(tensor: CutTensor, block: Block) -> tuple[slice, ...]:
    sizes = zip(block, tensor.block_shape, strict=True)
    return tuple(slice(piece * size, (piece + 1) * size) for piece, size in sizes)
