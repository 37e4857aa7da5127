"""Baseline: Megatron-LM's tensor parallelism with torch.distributed's AllReduce on gloo.

Computes and communicates without Hearth's code, which is used only to read the checkpoint.

`python -m tools.bench.gloo ipc://PATH`; a request selects the devices that take part. Heads and columns are split equally;
the connective blocks are replicated on every device, as in Megatron-LM.
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

from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.families import FAMILIES, TensorNames, TensorSource, read_spec
from hearth.plan.rotary import rope_frequencies
from tools.bench.child import serve

_TIMEOUT = timedelta(seconds=60)  # of gloo operations
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


_Norm = tuple[Tensor, Tensor | None]  # gain and bias; no bias: RMS norm


@dataclass
class _Layer:
    """This rank's heads and columns of a layer. Biases that the model does not have are None."""

    q: tuple[Tensor, Tensor | None]
    k: tuple[Tensor, Tensor | None]
    v: tuple[Tensor, Tensor | None]
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: tuple[Tensor, Tensor | None]
    norm1: _Norm
    gate: tuple[Tensor, Tensor | None] | None
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    norm2: _Norm


class GlooTensorParallel:
    """One rank of a tensor-parallel model. `wire`: precision of the values in the AllReduce."""

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
        dist.barrier()  # no rank leaves while another still uses the group
        dist.destroy_process_group()
        return {}

    def unload(self) -> dict[str, Any]:
        self._layers = []
        return {}

    def load(self, model_dir: str) -> dict[str, Any]:
        """Load this rank's heads and columns from a checkpoint."""
        spec = self._spec = read_spec(Path(model_dir))
        family = FAMILIES[spec.family]
        with Checkpoint(Path(model_dir)) as checkpoint:
            names = TensorNames(family, checkpoint)
        with safe_open(Path(model_dir) / "model.safetensors", framework="pt") as stored:
            there = set(stored.keys())

            def tensor(source: TensorSource) -> Tensor | None:
                return source.view(stored.get_tensor(source.name)) if source.name in there else None

            def embedding(name: str) -> Tensor | None:
                known = name.partition(".")[0] in family.embedding
                return tensor(names.embedding(name)) if known else None

            def layer(index: int, name: str) -> Tensor | None:
                return tensor(names.layer(index, name)) if name.partition(".")[0] in family.layer else None

            def linear(index: int, name: str, rows: slice) -> tuple[Tensor, Tensor | None]:
                """This rank's outputs of a column-parallel matrix."""
                weight, bias = layer(index, f"{name}.weight"), layer(index, f"{name}.bias")
                assert weight is not None
                return weight[rows].clone(), None if bias is None else bias[rows].clone()

            def reduced(index: int, name: str, columns: slice) -> tuple[Tensor, Tensor | None]:
                """This rank's inputs of a row-parallel matrix. Its bias is added once, after the AllReduce."""
                weight = layer(index, f"{name}.weight")
                assert weight is not None
                return weight[:, columns].clone(), layer(index, f"{name}.bias")

            def norm(index: int, name: str) -> _Norm:
                weight = layer(index, f"{name}.weight")
                assert weight is not None
                return weight, layer(index, f"{name}.bias")

            d, group = spec.head_dim, spec.group_size
            groups = _share(spec.num_kv_heads, self._rank, self._num_ranks)
            heads = slice(groups.start * group * d, groups.stop * group * d)
            kv_heads = slice(groups.start * d, groups.stop * d)
            columns = _share(spec.ffn_size, self._rank, self._num_ranks)
            word, last = embedding("word.weight"), "final" if spec.causal else "norm"
            gain = embedding(f"{last}.weight")
            assert word is not None
            assert gain is not None
            self._word, self._position = word, embedding("position.weight")
            if self._position is not None and spec.type_vocab_size:
                self._position = self._position + embedding("type.weight")[0]  # type: ignore[index]
            self._norm = gain, embedding(f"{last}.bias")
            self._layers = [
                _Layer(
                    q=linear(index, "q", heads),
                    k=linear(index, "k", kv_heads),
                    v=linear(index, "v", kv_heads),
                    q_norm=norm(index, "q_norm") if spec.qk_norm else None,
                    k_norm=norm(index, "k_norm") if spec.qk_norm else None,
                    out=reduced(index, "o", heads),
                    norm1=norm(index, "norm1"),
                    gate=linear(index, "gate", columns) if spec.gated else None,
                    up=linear(index, "up", columns),
                    down=reduced(index, "down", columns),
                    norm2=norm(index, "norm2"),
                )
                for index in range(spec.num_layers)
            ]
        return {}

    def run(self, num_rows: int, wire: str) -> dict[str, Any]:
        sent = _interface_bytes()
        dist.barrier()
        began, cpu = time.monotonic(), time.process_time()
        with torch.inference_mode():
            ids = (torch.arange(num_rows) * 7919) % self._word.shape[0]
            x_TH = self._word[ids]
            if self._position is not None:
                x_TH = x_TH + self._position[self._spec.position_offset :][:num_rows]
            if not self._spec.causal:
                x_TH = self._normed(x_TH, self._norm)
            turns, mask = self._turns(num_rows), self._mask(num_rows)
            for layer in self._layers:
                x_TH = self._layer(layer, x_TH, wire, turns, mask)
            if self._spec.causal:
                x_TH = self._normed(x_TH, self._norm)
            sums = x_TH.sum(dim=0)
        ended = time.monotonic()
        return {
            "began": began,
            "ended": ended,
            "cpu_seconds": time.process_time() - cpu,
            "sums": sums.tolist(),
            "sent_bytes": _interface_bytes() - sent,
        }

    def _layer(
        self, layer: _Layer, x_TH: Tensor, wire: str, turns: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> Tensor:
        spec, before = self._spec, self._spec.norm_place == "pre"
        entered = self._normed(x_TH, layer.norm1) if before else x_TH
        q, k, v = (
            F.linear(entered, *each).unflatten(-1, (-1, spec.head_dim)).transpose(0, 1)
            for each in (layer.q, layer.k, layer.v)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        if turns is not None:
            q, k = _turned(q, *turns), _turned(k, *turns)
        attended = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=spec.causal and mask is None,
            enable_gqa=spec.group_size > 1,
        )  # fmt: skip
        context = attended[0].transpose(0, 1).flatten(1)
        x_TH = self._joined(x_TH, F.linear(context, layer.out[0]), layer.out[1], layer.norm1, wire)
        entered = self._normed(x_TH, layer.norm2) if before else x_TH
        hidden = F.linear(entered, *layer.up)
        act = _ACTIVATIONS[spec.activation]
        hidden = act(hidden) if layer.gate is None else act(F.linear(entered, *layer.gate)) * hidden
        return self._joined(x_TH, F.linear(hidden, layer.down[0]), layer.down[1], layer.norm2, wire)

    def _joined(self, x_TH: Tensor, part_TH: Tensor, bias: Tensor | None, norm: _Norm, wire: str) -> Tensor:
        """AllReduce, then bias, residual and, for post-norm models, the norm; replicated on every rank."""
        x_TH = x_TH + self._all_reduce(part_TH, wire)
        if bias is not None:
            x_TH = x_TH + bias
        return x_TH if self._spec.norm_place == "pre" else self._normed(x_TH, norm)

    def _normed(self, x: Tensor, norm: _Norm) -> Tensor:
        gain, bias = norm
        if bias is None:
            return F.rms_norm(x, gain.shape, gain, self._spec.norm_eps)
        return F.layer_norm(x, gain.shape, gain, bias, self._spec.norm_eps)

    def _turns(self, num_rows: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the rotary embedding [T, head_dim]."""
        spec = self._spec
        if spec.rotary is None:
            return None
        found = rope_frequencies(spec.rotary, spec.head_dim, spec.max_positions, num_rows)
        angles = torch.arange(num_rows)[:, None].float() * torch.tensor(found.inverse)
        twice = torch.cat([angles, angles], dim=-1)
        return twice.cos() * found.scale, twice.sin() * found.scale

    def _mask(self, num_rows: int) -> Tensor | None:
        """Attention mask of a sliding window; None: the default mask (causal for decoders, none for encoders)."""
        window = self._spec.window(0)
        if window is None or window >= num_rows:
            return None
        past = torch.arange(num_rows)[:, None] - torch.arange(num_rows)[None]
        return (past >= 0) & (past < window)

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


def _turned(x_hTd: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x_hTd.chunk(2, dim=-1)
    return x_hTd * cosines + torch.cat([-second, first], dim=-1) * sines


def _interface_bytes() -> int:
    """Bytes that this device's network interface has sent since it was created."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == "eth0":
            return int(counters.split()[8])
    return 0


if __name__ == "__main__":
    serve(sys.argv[1], GlooTensorParallel())
