"""The baseline: Megatron-LM's tensor parallelism with torch.distributed's AllReduce on gloo. Nothing of ours in it.

`python -m tools.bench.gloo ipc://PATH RANK NUM_RANKS STORE_HOST STORE_PORT`. Heads and columns are split equally; the
connective blocks are repeated on every device, as in Megatron-LM.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from torch import Tensor

from tools.bench.runner import serve


@dataclass
class _Layer:
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm1: tuple[Tensor, Tensor]
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor
    norm2: tuple[Tensor, Tensor]


class GlooTensorParallel:
    """A BERT encoder stack under tensor parallelism; `wire` is the precision that the AllReduce carries."""

    def __init__(self, rank: int, num_ranks: int, host: str, port: int) -> None:
        torch.set_num_threads(1)
        self._rank, self._num_ranks = rank, num_ranks
        store = dist.TCPStore(host, port, num_ranks, is_master=rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
        self._layers: list[_Layer] = []

    def load(self, path: str, num_heads: int, num_layers: int) -> dict[str, Any]:
        with safe_open(path, framework="pt") as stored:
            names = list(stored.keys())
            prefix = "bert." if any(name.startswith("bert.") for name in names) else ""

            def get(name: str) -> Tensor:
                tensor: Tensor = stored.get_tensor(prefix + name)
                return tensor

            word = get("embeddings.word_embeddings.weight")
            self._embedding = (
                word, get("embeddings.position_embeddings.weight"),
                get("embeddings.token_type_embeddings.weight")[0],
                (get("embeddings.LayerNorm.weight"), get("embeddings.LayerNorm.bias")),
            )  # fmt: skip
            hidden = word.shape[1]
            self._head_dim = hidden // num_heads
            heads = _share(num_heads, self._rank, self._num_ranks)
            rows = slice(heads.start * self._head_dim, heads.stop * self._head_dim)
            ffn = get("encoder.layer.0.intermediate.dense.weight").shape[0]
            columns = _share(ffn, self._rank, self._num_ranks)
            self._layers = []
            for index in range(num_layers):
                at = f"encoder.layer.{index}"
                qkv = [f"{at}.attention.self.{name}" for name in ("query", "key", "value")]
                self._layers.append(
                    _Layer(
                        torch.cat([get(f"{name}.weight")[rows] for name in qkv]),
                        torch.cat([get(f"{name}.bias")[rows] for name in qkv]),
                        get(f"{at}.attention.output.dense.weight")[:, rows].contiguous(),
                        get(f"{at}.attention.output.dense.bias"),
                        (get(f"{at}.attention.output.LayerNorm.weight"), get(f"{at}.attention.output.LayerNorm.bias")),
                        get(f"{at}.intermediate.dense.weight")[columns],
                        get(f"{at}.intermediate.dense.bias")[columns],
                        get(f"{at}.output.dense.weight")[:, columns].contiguous(),
                        get(f"{at}.output.dense.bias"),
                        (get(f"{at}.output.LayerNorm.weight"), get(f"{at}.output.LayerNorm.bias")),
                    )
                )
        return {}

    def run(self, num_rows: int, wire: str) -> dict[str, Any]:
        word, position, token_type, norm = self._embedding
        dist.barrier()
        began, cpu = time.monotonic(), time.process_time()
        with torch.inference_mode():
            ids = (torch.arange(num_rows) * 7919) % word.shape[0]
            x_TH = F.layer_norm(word[ids] + token_type + position[:num_rows], norm[0].shape, *norm, 1e-12)
            for layer in self._layers:
                x_TH = self._layer(layer, x_TH, wire)
            sums = x_TH.sum(dim=0)
        ended = time.monotonic()
        return {"began": began, "ended": ended, "cpu_seconds": time.process_time() - cpu, "sums": sums.tolist()}

    def _layer(self, layer: _Layer, x_TH: Tensor, wire: str) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self._head_dim)).transpose(0, 1)[None]
            for part in F.linear(x_TH, layer.qkv_weight, layer.qkv_bias).chunk(3, dim=1)
        )
        context = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        y_TH = self._all_reduce(F.linear(context, layer.out_weight), wire)
        x_TH = F.layer_norm(x_TH + y_TH + layer.out_bias, layer.out_bias.shape, *layer.norm1, 1e-12)
        hidden = F.gelu(F.linear(x_TH, layer.up_weight, layer.up_bias))
        y_TH = self._all_reduce(F.linear(hidden, layer.down_weight), wire)
        return F.layer_norm(x_TH + y_TH + layer.down_bias, layer.down_bias.shape, *layer.norm2, 1e-12)

    def _all_reduce(self, y_TH: Tensor, wire: str) -> Tensor:
        if self._num_ranks == 1:
            return y_TH
        if wire == "fp16":
            half = y_TH.half()
            dist.all_reduce(half)
            return half.float()
        dist.all_reduce(y_TH)
        return y_TH


def _share(total: int, rank: int, num_ranks: int) -> slice:
    return slice(total * rank // num_ranks, total * (rank + 1) // num_ranks)


if __name__ == "__main__":
    address, rank, num_ranks, host, port = sys.argv[1:]
    serve(address, GlooTensorParallel(int(rank), int(num_ranks), host, int(port)))
