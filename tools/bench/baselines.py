"""Baselines that compute without Hearth's code: `python -m tools.bench.baselines ipc://PATH gloo|transformers`.

`gloo`: Megatron-LM's tensor parallelism with torch.distributed's AllReduce on gloo, for BERT, GPT-2 and OPT. Hearth's code only
reads the checkpoint. With packed matrices it takes Hearth's `PackedMatrix`, too, so that a comparison with it shows what the
communication alone makes of the difference. A request selects the devices that take part. Heads and columns are split equally;
the connective blocks are replicated on every device, as in Megatron-LM.

`transformers`: the reference of generation, on one device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from torch import Tensor

from agent.worker.transformer.kernels.base import Partition
from agent.worker.transformer.kernels.onednn import PackedMatrix
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.families import FAMILIES, TensorNames, TensorSource, read_spec
from tools.bench.processes import serve

_TIMEOUT = timedelta(seconds=60)  # of gloo operations: ten times the longest step
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"), "relu": F.relu,
}  # fmt: skip
_WeightAndBias = tuple[Tensor, Tensor]
_Matmul = Callable[[Tensor, Tensor | None], Tensor]  # x and bias to x W^T + bias


class _Linear:
    """A matrix and its bias, plain or packed. `o` and `down` have the whole bias, added once after the AllReduce."""

    def __init__(self, weight: Tensor, bias: Tensor, packed: bool) -> None:
        self.bias = bias
        self.matmul: _Matmul = lambda x, bias: F.linear(x, weight, bias)
        num_outputs, num_inputs = weight.shape
        if packed and PackedMatrix.supports(num_outputs, num_inputs, weight.device):
            matrix = PackedMatrix(num_outputs, num_inputs, Partition(0, (0, num_outputs)))
            matrix.load(slice(None), slice(None), weight)
            self.matmul = matrix.matmul

    def __call__(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.bias)


class _Layer:
    """This rank's heads and columns of a layer: matrices and norms by name."""

    def __init__(self, parts: dict[str, _WeightAndBias], packed: bool) -> None:
        self.norms = {name: pair for name, pair in parts.items() if name.startswith("norm")}
        self.linears = {name: _Linear(*pair, packed) for name, pair in parts.items() if name not in self.norms}


class GlooTensorParallel:
    """One rank of a tensor-parallel model. `wire`: precision of the values in the AllReduce."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._layers: dict[bool, list[_Layer]] = {}  # by whether matrices are packed

    def join(self, rank: int, num_ranks: int, host: str, port: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        store = dist.TCPStore(host, port, num_ranks, is_master=rank == 0, timeout=_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)

    def leave(self) -> None:
        dist.barrier()  # no rank leaves while another still uses the group
        dist.destroy_process_group()

    def unload(self) -> None:
        self._layers = {}

    def load(self, model_dir: str, packed: bool) -> None:
        """Load this rank's heads and columns from a checkpoint."""
        spec = self._spec = read_spec(Path(model_dir))
        checkpoint = Checkpoint(Path(model_dir))
        names = TensorNames(FAMILIES[spec.family], checkpoint)
        head_shares = self._share(spec.num_heads)
        heads = slice(head_shares.start * spec.head_dim, head_shares.stop * spec.head_dim)
        columns = self._share(spec.ffn_size)
        with safe_open(Path(model_dir) / "model.safetensors", framework="pt") as stored:

            def read(source: TensorSource) -> Tensor:
                tensor = stored.get_tensor(source.name)
                index, parts = source.part
                return (tensor.T if source.transposed else tensor).chunk(parts)[index]

            def embedding(name: str) -> Tensor:
                return read(names.embedding(name))

            def pair(index: int, name: str) -> _WeightAndBias:
                return read(names.layer(index, f"{name}.weight")), read(names.layer(index, f"{name}.bias"))

            def layer(index: int) -> _Layer:
                parts = {name: pair(index, name) for name in ("q", "k", "v", "o", "up", "down", "norm1", "norm2")}
                for name, rows in {"q": heads, "k": heads, "v": heads, "up": columns}.items():
                    weight, bias = parts[name]
                    parts[name] = weight[rows].clone(), bias[rows].clone()  # column-parallel
                for name, inputs in {"o": heads, "down": columns}.items():
                    weight, bias = parts[name]
                    parts[name] = weight[:, inputs].clone(), bias  # row-parallel
                return _Layer(parts, packed)

            last = "final" if spec.causal else "norm"
            self._norm = embedding(f"{last}.weight"), embedding(f"{last}.bias")
            self._word, self._position = embedding("word.weight"), embedding("position.weight")
            if spec.type_vocab_size:
                self._position = self._position + embedding("type.weight")[0]
            self._layers[packed] = [layer(index) for index in range(spec.num_layers)]

    def run(self, num_rows: int, wire: str, packed: bool) -> dict[str, Any]:
        sent = _interface_bytes()
        dist.barrier()
        began = time.monotonic()
        with torch.inference_mode():
            ids = (torch.arange(num_rows) * 7919) % self._word.shape[0]
            x_TH = self._word[ids] + self._position[self._spec.position_offset :][:num_rows]
            if not self._spec.causal:
                x_TH = self._normed(x_TH, self._norm)
            for layer in self._layers[packed]:
                x_TH = self._layer(layer, x_TH, wire)
            if self._spec.causal:
                x_TH = self._normed(x_TH, self._norm)
            sums = x_TH.sum(dim=0)
        ended = time.monotonic()
        return {"began": began, "ended": ended, "sums": sums.tolist(), "sent_bytes": _interface_bytes() - sent}

    def _layer(self, layer: _Layer, x_TH: Tensor, wire: str) -> Tensor:
        spec, pre_norm = self._spec, self._spec.norm_place == "pre"
        linears, norms = layer.linears, layer.norms
        attention_in = self._normed(x_TH, norms["norm1"]) if pre_norm else x_TH
        q, k, v = (
            linears[name](attention_in).unflatten(-1, (-1, spec.head_dim)).transpose(0, 1) for name in ("q", "k", "v")
        )
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=spec.causal)
        context = attended[0].transpose(0, 1).flatten(1)
        x_TH = self._reduced(x_TH, context, linears["o"], norms["norm1"], wire)
        mlp_in = self._normed(x_TH, norms["norm2"]) if pre_norm else x_TH
        hidden = _ACTIVATIONS[spec.activation](linears["up"](mlp_in))
        return self._reduced(x_TH, hidden, linears["down"], norms["norm2"], wire)

    def _reduced(self, x_TH: Tensor, part: Tensor, linear: _Linear, norm: _WeightAndBias, wire: str) -> Tensor:
        """A row-parallel matrix, AllReduce, then bias, residual and, for post-norm models, the norm; on every rank."""
        x_TH = x_TH + self._all_reduce(linear.matmul(part, None), wire) + linear.bias
        return x_TH if self._spec.norm_place == "pre" else self._normed(x_TH, norm)

    def _normed(self, x: Tensor, norm: _WeightAndBias) -> Tensor:
        gain, bias = norm
        return F.layer_norm(x, gain.shape, gain, bias, self._spec.norm_eps)

    def _all_reduce(self, y_TH: Tensor, wire: str) -> Tensor:
        if wire == "fp16":
            half = y_TH.half()
            dist.all_reduce(half)
            return half.float()
        dist.all_reduce(y_TH)
        return y_TH

    def _share(self, total: int) -> slice:
        return slice(total * self._rank // self._num_ranks, total * (self._rank + 1) // self._num_ranks)


def _interface_bytes() -> int:
    """Bytes that this device's network interface has sent since it was created."""
    return psutil.net_io_counters(pernic=True)["eth0"].bytes_sent


# ---- transformers -----------------------------------------------------------------------------------------------------


class Transformers:
    """A model in `transformers`, in one or more formats, on one thread, as the reference."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._models: dict[str, Any] = {}

    def load(self, model_dir: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._models[dtype] = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompt: list[int], num_tokens: int, dtype: str) -> dict[str, Any]:
        """Generate greedily with the library's KV cache; returns the seconds of prefill and of all tokens after the first."""
        model = self._models[dtype]
        with torch.inference_mode():
            began = time.perf_counter()
            out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            tokens = [int(out.logits[0, -1].argmax())]
            first = time.perf_counter()
            for _ in range(num_tokens - 1):
                out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
                tokens.append(int(out.logits[0, -1].argmax()))
            ended = time.perf_counter()
        return {"tokens": tokens, "prefill": first - began, "decode": ended - first}


if __name__ == "__main__":
    serve(sys.argv[1], GlooTensorParallel() if sys.argv[2] == "gloo" else Transformers())
