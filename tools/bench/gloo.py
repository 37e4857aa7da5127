"""The baseline: Megatron-LM's tensor parallelism with torch.distributed's AllReduce on gloo.

Nothing of ours computes or communicates in it; the checkpoint's names are read by ours.

`python -m tools.bench.gloo ipc://PATH`; who takes part is said later. Heads and columns are split equally; the
connective blocks are repeated on every device, as in Megatron-LM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from torch import Tensor

from hearth.model.checkpoint import Checkpoint
from hearth.model.families import FAMILIES, Source, TensorNames, read_spec
from tools.bench.runner import serve

_TIMEOUT = timedelta(seconds=60)
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


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
    """An encoder stack under tensor parallelism; `wire` is the precision that the AllReduce carries."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._rank, self._num_ranks = 0, 1
        self._layers: list[_Layer] = []

    def join(self, rank: int, num_ranks: int, host: str, port: int) -> dict[str, Any]:
        self._rank, self._num_ranks = rank, num_ranks
        store = dist.TCPStore(host, port, num_ranks, is_master=rank == 0, timeout=_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
        return {}

    def leave(self) -> dict[str, Any]:
        dist.barrier()  # nobody leaves while another is still busy with the group
        dist.destroy_process_group()
        return {}

    def unload(self) -> dict[str, Any]:
        self._layers = []
        return {}

    def load(self, model_dir: str) -> dict[str, Any]:
        """Our heads and columns; the checkpoint's names are the family's."""
        spec = self._spec = read_spec(Path(model_dir))
        family = FAMILIES[spec.family]
        with Checkpoint(Path(model_dir)) as checkpoint:
            names = TensorNames(family, checkpoint)
        with safe_open(Path(model_dir) / "model.safetensors", framework="pt") as stored:

            def embedding(name: str) -> Tensor:
                return _tensor(stored, names.embedding(name))

            def layer(index: int, name: str) -> Tensor:
                return _tensor(stored, names.layer(index, name))

            d = spec.head_dim
            heads = _share(spec.num_heads, self._rank, self._num_ranks)
            rows = slice(heads.start * d, heads.stop * d)
            columns = _share(spec.ffn_size, self._rank, self._num_ranks)
            self._word, self._position = embedding("word.weight"), embedding("position.weight")
            if spec.type_vocab_size:
                self._position = self._position + embedding("type.weight")[0]
            self._norm = embedding("norm.weight"), embedding("norm.bias")
            self._layers = [
                _Layer(
                    torch.cat([layer(index, f"{name}.weight")[rows] for name in "qkv"]),
                    torch.cat([layer(index, f"{name}.bias")[rows] for name in "qkv"]),
                    layer(index, "o.weight")[:, rows].contiguous(),
                    layer(index, "o.bias"),
                    (layer(index, "norm1.weight"), layer(index, "norm1.bias")),
                    layer(index, "up.weight")[columns].clone(),
                    layer(index, "up.bias")[columns].clone(),
                    layer(index, "down.weight")[:, columns].contiguous(),
                    layer(index, "down.bias"),
                    (layer(index, "norm2.weight"), layer(index, "norm2.bias")),
                )
                for index in range(spec.num_layers)
            ]
        return {}

    def run(self, num_rows: int, wire: str) -> dict[str, Any]:
        norm = self._norm
        sent = _interface_bytes()
        dist.barrier()
        began, cpu = time.monotonic(), time.process_time()
        with torch.inference_mode():
            ids = (torch.arange(num_rows) * 7919) % self._word.shape[0]
            x_TH = F.layer_norm(self._word[ids] + self._position[:num_rows], norm[0].shape, *norm, self._spec.norm_eps)
            for layer in self._layers:
                x_TH = self._layer(layer, x_TH, wire)
            sums = x_TH.sum(dim=0)
        ended = time.monotonic()
        return {
            "began": began,
            "ended": ended,
            "cpu_seconds": time.process_time() - cpu,
            "sums": sums.tolist(),
            "sent_bytes": _interface_bytes() - sent,
        }

    def _layer(self, layer: _Layer, x_TH: Tensor, wire: str) -> Tensor:
        eps = self._spec.norm_eps
        q, k, v = (
            part.unflatten(-1, (-1, self._spec.head_dim)).transpose(0, 1)[None]
            for part in F.linear(x_TH, layer.qkv_weight, layer.qkv_bias).chunk(3, dim=1)
        )
        context = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        y_TH = self._all_reduce(F.linear(context, layer.out_weight), wire)
        x_TH = F.layer_norm(x_TH + y_TH + layer.out_bias, layer.out_bias.shape, *layer.norm1, eps)
        hidden = _ACTIVATIONS[self._spec.activation](F.linear(x_TH, layer.up_weight, layer.up_bias))
        y_TH = self._all_reduce(F.linear(hidden, layer.down_weight), wire)
        return F.layer_norm(x_TH + y_TH + layer.down_bias, layer.down_bias.shape, *layer.norm2, eps)

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


def _tensor(stored: Any, source: Source) -> Tensor:
    tensor: Tensor = source.view(stored.get_tensor(source.name))
    return tensor


def _interface_bytes() -> int:
    """What this device has sent since it is up, as its network interface counts it."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == "eth0":
            return int(counters.split()[8])
    return 0


if __name__ == "__main__":
    serve(sys.argv[1], GlooTensorParallel())
