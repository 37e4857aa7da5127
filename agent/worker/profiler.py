"""The block profiler: `python -m agent.worker.profiler`, a short-lived child of the daemon.

Reads a `ProfilerRequest` as one JSON line on stdin, runs the real blocks on the real device on random input (Galaxy,
section III-C), and prints a `BlockProfile` as one JSON line.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from agent.worker import blocks
from agent.worker.shard import LayerShard, Shard, empty_shard
from agent.worker.staging import make_staging
from hearth.geometry import COLUMN_GRAIN, Span
from hearth.model.spec import ModelSpec
from hearth.profile import BlockProfile, LatencyCurve

NUM_SIZES = 4  # measured points per curve
_MIN_RUNS, _MAX_RUNS = 3, 15
_SECONDS_PER_POINT = 0.12  # at least _MIN_RUNS, then until this is used up


class ProfilerRequest(BaseModel):
    model: ModelSpec
    seq_len: int
    num_threads: int
    compute_device: Literal["cpu", "cuda"]


def profile(request: ProfilerRequest) -> BlockProfile:
    """Measure one layer's blocks; every point is the median of several runs after one to warm up."""
    torch.set_num_threads(request.num_threads)
    device = make_staging(request.compute_device).device
    spec, seq_len = request.model, request.seq_len
    layer_spec = spec.model_copy(update={"num_layers": 1})
    group = spec.num_heads // spec.num_kv_heads
    full = _random_shard(layer_spec, spec.num_heads, spec.ffn_size, device)
    x_TH = torch.randn(seq_len, spec.hidden_size, device=device)
    everything = Span(0, seq_len)

    def attention(heads: int) -> Callable[[], object]:
        layer = _random_shard(layer_spec, heads, 0, device).layers[0]
        return lambda: _attention_block(layer, x_TH, x_TH, spec.head_dim, everything)

    def mlp(columns: int) -> Callable[[], object]:
        layer = _random_shard(layer_spec, 0, columns, device).layers[0]
        return lambda: _mlp_block(layer, x_TH, spec.activation)

    def connective(rows: int) -> Callable[[], object]:
        layer, x_sH = full.layers[0], x_TH[:rows]
        return lambda: blocks.connective(x_sH, x_sH, layer.out_bias, layer.norm1, spec.norm_eps)

    def sequence_layer(rows: int) -> Callable[[], object]:
        layer = full.layers[0]

        def run() -> Tensor:
            x_sH = x_TH[:rows]
            y_sH = _attention_block(layer, x_sH, x_TH, spec.head_dim, Span(0, rows))
            x_sH = blocks.connective(x_sH, y_sH, layer.out_bias, layer.norm1, spec.norm_eps)
            y_sH = _mlp_block(layer, x_sH, spec.activation)
            return blocks.connective(x_sH, y_sH, layer.down_bias, layer.norm2, spec.norm_eps)

        return run

    def embedding(rows: int) -> Callable[[], object]:
        positions = torch.arange(rows, device=device) % spec.max_positions
        return lambda: blocks.finish_embedding(full.embedding, x_TH[:rows], positions, spec.norm_eps)

    def curve(sizes: Iterable[int], block: Callable[[int], Callable[[], object]]) -> LatencyCurve:
        measured = {size: _seconds(block(size), device) for size in sizes}
        return LatencyCurve(sizes=tuple(measured), seconds=tuple(measured.values()))

    with torch.inference_mode():
        return BlockProfile(
            seq_len=seq_len,
            attention=curve(_sizes(spec.num_heads, group), attention),
            mlp=curve(_sizes(spec.ffn_size, COLUMN_GRAIN), mlp),
            connective=curve(_sizes(seq_len, 1), connective),
            sequence_layer=curve(_sizes(seq_len, 1), sequence_layer),
            embedding=curve(_sizes(seq_len, 1), embedding),
        )


def _attention_block(layer: LayerShard, queries_sH: Tensor, x_TH: Tensor, head_dim: int, rows: Span) -> Tensor:
    """Attention of the rows `queries_sH` over themselves widened to all T rows, as the worker computes it."""
    w = layer.out_weight.shape[1]
    qkv = queries_sH.new_empty(queries_sH.shape[0], 3 * w)
    blocks.project_qkv(layer, queries_sH, qkv)
    q_sw, k_sw, v_sw = qkv.chunk(3, dim=1)
    # Under sequence parallelism K and V of the other rows come over the network; any rows do for timing.
    k_Tw, v_Tw = (part if len(part) == len(x_TH) else _repeat_rows(part, len(x_TH)) for part in (k_sw, v_sw))
    context_sw = blocks.attention(q_sw, k_Tw, v_Tw, head_dim, (Span(0, len(x_TH)),), rows)
    return context_sw @ layer.out_weight.t()


def _repeat_rows(part: Tensor, num_rows: int) -> Tensor:
    return part.repeat(-(-num_rows // len(part)), 1)[:num_rows]


def _mlp_block(layer: LayerShard, x_TH: Tensor, activation: str) -> Tensor:
    hidden_Tc = torch.addmm(layer.up_bias, x_TH, layer.up_weight.t())
    return blocks.ACTIVATIONS[activation](hidden_Tc) @ layer.down_weight.t()


def _random_shard(spec: ModelSpec, heads: int, columns: int, device: torch.device) -> Shard:
    shard = empty_shard(spec, heads, columns, Span(0, 0), device)
    layer = shard.layers[0]
    for weight in (layer.qkv_weight, layer.out_weight, layer.up_weight, layer.down_weight):
        weight.normal_(0, 0.02)
    for norm in (layer.norm1, layer.norm2, shard.embedding.norm):
        norm.weight.fill_(1.0)
        norm.bias.zero_()
    for rest in (layer.qkv_bias, layer.out_bias, layer.up_bias, layer.down_bias, shard.embedding.position):
        rest.zero_()
    if shard.embedding.token_type is not None:
        shard.embedding.token_type.zero_()
    return shard


def _sizes(total: int, grain: int) -> list[int]:
    """A few sizes up to the whole, on grains."""
    sizes = {min(-(-total * i // (NUM_SIZES * grain)) * grain, total) for i in range(1, NUM_SIZES + 1)}
    return sorted({min(grain, total), *sizes})


def _seconds(block: Callable[[], object], device: torch.device) -> float:
    block()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < _MIN_RUNS or (len(samples) < _MAX_RUNS and time.perf_counter() - began < _SECONDS_PER_POINT):
        _synchronise(device)
        start = time.perf_counter()
        block()
        _synchronise(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(profile(ProfilerRequest.model_validate_json(sys.stdin.readline())).model_dump_json())
