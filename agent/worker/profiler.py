"""Measures one layer's blocks on this device: `python -m agent.worker.profiler`, a child that the daemon starts.

Reads a `ProfilerRequest` as one line of JSON, answers with a `BlockProfile` as one line. Galaxy's profiler (section
III-C), with the attention block in its three parts, and with what communication costs the device.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from agent.worker import blocks
from agent.worker.allocator import keep_freed_buffers
from agent.worker.casts import TorchCasts
from agent.worker.shard import EmbeddingShard, LayerShard, empty_embedding, empty_layer
from agent.worker.staging import make_staging
from hearth.codec import Codec
from hearth.framing import Phase, TileKey, decode_tile, encode_tile
from hearth.geometry import COLUMN_GRAIN, ROW_GRAIN, Span
from hearth.messages import Peer
from hearth.model.spec import ModelSpec
from hearth.plan import Holding, Values, WireFormat
from hearth.profile import BlockProfile, LatencyCurve, WireCost, fit_curve, suspicious_point
from hearth.security import new_keypair
from hearth.transport.sockets import SocketTransport

_PARTS = (0.25, 0.5, 1.0)  # of the whole: the sizes that are measured
# A sample spans several periods of a CPU quota (the kernel's default is 100 ms, the testbed's 4): shorter work would run
# on what was saved up while idle.
_SAMPLE_SECONDS = 0.03
_SAMPLES = 3
_REPEATS = 3  # of points that a busy moment spoilt
_COPIES_BYTES = (
    160 << 20
)  # weights are cycled through copies, as a model's layers are: they come from memory, not cache
_MAX_COPIES = 4


class ProfilerRequest(BaseModel):
    model: ModelSpec
    seq_len: int
    num_threads: int
    compute_device: Literal["cpu", "cuda"]


def profile(request: ProfilerRequest) -> BlockProfile:
    """Measure one layer's blocks; every point is the median of several samples after one to warm up."""
    torch.set_num_threads(request.num_threads)
    device = make_staging(request.compute_device).device
    spec, S = request.model, request.seq_len
    H, d = spec.hidden_size, spec.head_dim
    layers = [random_layer(spec, device) for _ in range(_num_copies(spec))]
    embedding = _random_embedding(spec, device)
    x_TH = torch.randn(S, H, device=device)
    everything = Span(0, S)
    measure = _Meter(device)

    def gemm(weights: Callable[[LayerShard], Tensor], x: Tensor) -> Callable[[], object]:
        turn = cycle([weights(layer).t() for layer in layers])
        return lambda: x @ next(turn)

    def qkv(heads: int) -> Callable[[], object]:
        out = x_TH.new_empty(S, 3 * heads * d)
        turn = cycle([(layer.qkv_bias[: out.shape[1]], layer.qkv_weight[: out.shape[1]].t()) for layer in layers])

        def run() -> None:
            bias, weight = next(turn)
            torch.addmm(bias, x_TH, weight, out=out)

        return run

    def core(heads: int) -> Callable[[], object]:
        q_Tw, k_Tw, v_Tw = torch.randn(S, 3 * heads * d, device=device).chunk(3, dim=1)
        return lambda: blocks.attention(q_Tw, k_Tw, v_Tw, d, (everything,), everything)

    def out(heads: int) -> Callable[[], object]:
        context_Tw = torch.randn(S, heads * d, device=device)
        return gemm(lambda layer: layer.out_weight[:, : heads * d].contiguous(), context_Tw)

    def up(columns: int, rows: int = S) -> Callable[[], object]:
        hidden = x_TH.new_empty(rows, columns)
        turn = cycle([(layer.up_bias[:columns], layer.up_weight[:columns].t()) for layer in layers])

        def run() -> None:
            bias, weight = next(turn)
            torch.addmm(bias, x_TH[:rows], weight, out=hidden)
            hidden.copy_(blocks.ACTIVATIONS[spec.activation](hidden))

        return run

    def down(columns: int, rows: int = S) -> Callable[[], object]:
        hidden = torch.randn(rows, columns, device=device)
        return gemm(lambda layer: layer.down_weight[:, :columns].contiguous(), hidden)

    def mlp_rows(rows: int) -> Callable[[], object]:
        parts = up(spec.ffn_size, rows), down(spec.ffn_size, rows)
        return lambda: (parts[0](), parts[1]())

    def connective(rows: int) -> Callable[[], object]:
        layer, x_sH = layers[0], x_TH[:rows]
        return lambda: blocks.connective(x_sH, x_sH, layer.out_bias, layer.norm1, spec.norm_eps)

    def embed(rows: int) -> Callable[[], object]:
        positions = torch.arange(rows, device=device) % spec.max_positions
        return lambda: blocks.finish_embedding(embedding, x_TH[:rows], positions, spec.norm_eps)

    group = spec.num_heads // spec.num_kv_heads
    heads, columns, rows = (
        _sizes(spec.num_heads, group),
        _sizes(spec.ffn_size, COLUMN_GRAIN),
        _sizes(S, ROW_GRAIN),
    )
    with torch.inference_mode():
        curves = {
            "qkv": measure.curve(heads, qkv),
            "core": measure.curve(heads, core),
            "out": measure.curve(heads, out),
            "up": measure.curve(columns, up),
            "down": measure.curve(columns, down),
            "connective": measure.curve(rows, connective),
            "embedding": measure.curve(rows, embed),
            "mlp_rows": measure.curve(rows, mlp_rows),
        }
    return BlockProfile(seq_len=S, wire=_wire_cost(measure.cpu_per_second), **curves)


class _Meter:
    """Times blocks, and learns meanwhile how much of a core this process gets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu_seconds = self._wall_seconds = 0.0

    @property
    def cpu_per_second(self) -> float:
        """CPU seconds that the device does in one: its threads, or less under a quota or beside other load."""
        return max(self._cpu_seconds / self._wall_seconds, 0.01) if self._wall_seconds else 1.0

    def curve(self, sizes: Iterable[int], block: Callable[[int], Callable[[], object]]) -> LatencyCurve:
        """Measure each size; those that a busy moment spoilt are measured again, and the least time counts."""
        measured = {size: self.seconds(block(size)) for size in sizes}
        for _ in range(_REPEATS):
            again = suspicious_point(measured)
            if again is None:
                break
            measured[again] = min(measured[again], self.seconds(block(again)))
        return fit_curve(measured)

    def seconds(self, block: Callable[[], object]) -> float:
        block()
        samples = []
        for _ in range(_SAMPLES):
            self._synchronise()
            start, cpu, runs = time.perf_counter(), time.process_time(), 0
            while True:
                block()
                runs += 1
                self._synchronise()
                elapsed = time.perf_counter() - start
                if elapsed >= _SAMPLE_SECONDS:
                    break
            self._cpu_seconds += time.process_time() - cpu
            self._wall_seconds += elapsed
            samples.append(elapsed / runs)
        return statistics.median(samples)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


# ---- communication --------------------------------------------------------------------------------------------------

_SMALL_ROWS, _LARGE_ROWS, _ROW_VALUES = 4, 128, 512  # tiles of 8 and 256 KiB
_MESSAGES = 24


def _wire_cost(per_second: float) -> WireCost:
    """CPU time of tiles over a socket to ourselves, shared between both ends; the device does `per_second` of it."""
    encrypted, per_message = _socket_cost(encrypt=True)
    plain, _ = _socket_cost(encrypt=False)
    return WireCost(
        encrypted_seconds_per_byte=encrypted / per_second,
        plain_seconds_per_byte=plain / per_second,
        seconds_per_message=per_message / per_second,
        convert_seconds_per_value={
            values: _convert_cost(values) / per_second for values in ("exact", "bf16", "fp16", "int8")
        },
    )


def _socket_cost(encrypt: bool) -> tuple[float, float]:
    """CPU seconds per byte and per message at one end."""
    ends = [SocketTransport(rank, 2, "127.0.0.1", (0, 0), new_keypair() if encrypt else None) for rank in range(2)]
    try:
        for rank, end in enumerate(ends):
            other = ends[1 - rank]
            end.connect([Peer(rank=1 - rank, host="127.0.0.1", port=other.port, public_key=other.public_key,
                              bytes_per_second=1e9)])  # fmt: skip
        codec = Codec(WireFormat(lz4="off"), 1e9, time.perf_counter)

        def cpu_seconds(rows: int) -> float:
            tile = np.ones((rows, _ROW_VALUES), np.float32)
            start = time.process_time()
            for index in range(_MESSAGES):
                key = TileKey(0, index, 0, Phase.GATHER_MLP, 0, 0)
                ends[0].send(1, encode_tile(bytes(16), key, tile, codec))
                received = ends[1].receive(10.0)
                assert received is not None
                decode_tile(bytes(16), received.frames)
            return (time.process_time() - start) / _MESSAGES / 2

        cpu_seconds(_LARGE_ROWS)  # the handshake, and warm caches
        small, large = cpu_seconds(_SMALL_ROWS), cpu_seconds(_LARGE_ROWS)
    finally:
        for end in ends:
            end.close()
            end.release()
    row_bytes = _ROW_VALUES * 4
    per_byte = max(large - small, 0.0) / ((_LARGE_ROWS - _SMALL_ROWS) * row_bytes)
    return per_byte, max(small - per_byte * _SMALL_ROWS * row_bytes, 0.0)


def _convert_cost(values: Values) -> float:
    """CPU seconds per value to encode and to decode."""
    casts = TorchCasts()
    codec = Codec(WireFormat(values=values, lz4="off"), 1e9, time.perf_counter, casts)
    tile = np.random.default_rng(0).standard_normal((_LARGE_ROWS, _ROW_VALUES)).astype(np.float32)
    key = TileKey(0, 0, 0, Phase.GATHER_MLP, 0, 0)

    def once() -> None:
        decode_tile(bytes(16), [bytes(frame) for frame in encode_tile(bytes(16), key, tile, codec)])

    once()
    start = time.process_time()
    for _ in range(_MESSAGES):
        once()
    return (time.process_time() - start) / _MESSAGES / tile.size


# ---- random weights -------------------------------------------------------------------------------------------------


def random_layer(spec: ModelSpec, device: torch.device) -> LayerShard:
    heads = Span(0, spec.num_heads)
    layer = empty_layer(spec, Holding(heads, heads, Span(0, spec.ffn_size), True), (heads,), device)
    for weight in (layer.qkv_weight, layer.out_weight, layer.up_weight, layer.down_weight):
        weight.normal_(0, 0.02)
    for norm in (layer.norm1, layer.norm2):
        norm.weight.fill_(1.0)
        norm.bias.zero_()
    for bias in (layer.qkv_bias, layer.out_bias, layer.up_bias, layer.down_bias):
        bias.zero_()
    return layer


def _random_embedding(spec: ModelSpec, device: torch.device) -> EmbeddingShard:
    embedding = empty_embedding(spec, Span(0, 0), device)
    embedding.position.zero_()
    if embedding.token_type is not None:
        embedding.token_type.zero_()
    embedding.norm.weight.fill_(1.0)
    embedding.norm.bias.zero_()
    return embedding


def _num_copies(spec: ModelSpec) -> int:
    layer_bytes = 4 * spec.hidden_size * (4 * spec.num_heads * spec.head_dim + 2 * spec.ffn_size)
    return max(1, min(_MAX_COPIES, _COPIES_BYTES // layer_bytes))


def _sizes(total: int, grain: int) -> list[int]:
    """A few sizes up to the whole, on grains."""
    return sorted({min(-(-int(total * part) // grain) * grain or grain, total) for part in _PARTS})


if __name__ == "__main__":
    keep_freed_buffers()
    print(profile(ProfilerRequest.model_validate_json(sys.stdin.readline())).model_dump_json())
