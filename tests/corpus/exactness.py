"""Outputs of fixed plans, bit for bit; on another processor or with other libraries, within a tolerance.

Only `support.outputs` knows how a plan is run.
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from corpus.compare import Difference
from support.outputs import graph_outputs, transformer_outputs

_SAMPLES = 24  # values of an array that are recorded besides its hash
_CLOSE = 1e-3
# Of sums in bfloat16, whose last bit is 4e-3: processors with and without units for it round elsewhere.
_CLOSE_BFLOAT16 = 1e-2
_LIBRARIES = ("torch", "numpy", "onnxruntime")

_SAMPLING = {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 11}
# Family, strategy, shares of devices, lengths of sequences, and further arguments of `transformer_outputs`.
TRANSFORMERS: dict[str, tuple[str, str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "bert-local": ("bert", "local", (1,), (17, 5), {}),
    "bert-megatron-tp": ("bert", "megatron-tp", (3, 1), (17, 5), {}),
    "bert-megatron-tp-5": ("bert", "megatron-tp", (5, 1, 2, 1, 1), (33,), {}),
    "bert-sp": ("bert", "sp", (2, 1, 3), (17, 5), {}),
    "bert-sp-empty": ("bert", "sp", (1, 0, 2), (40,), {}),
    "bert-hmp": ("bert", "hmp", (2, 1, 3), (17, 5), {}),
    "bert-hmp-5": ("bert", "hmp", (5, 1, 2, 1, 1), (64,), {}),
    "bert-hmp-rows": ("bert", "hmp", (1, 0, 2), (13, 20), {"row_weights": (1, 2, 0)}),
    "bert-hmp-qkv": ("bert", "hmp", (2, 1, 1), (31,), {"replicated": ("qkv",)}),
    "bert-hmp-out-mlp": ("bert", "hmp", (2, 1, 1), (31,), {"replicated": ("out", "mlp")}),
    "bert-hmp-all": ("bert", "hmp", (1, 2), (31,), {"replicated": ("qkv", "out", "mlp")}),
    "bert-hmp-fp16": ("bert", "hmp", (1, 1, 1), (40,), {"values": "fp16"}),
    "bert-sp-bf16": ("bert", "sp", (1, 1, 1), (40,), {"values": "bf16"}),
    "bert-megatron-tp-int8": ("bert", "megatron-tp", (1, 2), (40,), {"values": "int8"}),
    "bert-pipeline": ("bert", "pipeline", (2, 1, 1), (17, 5), {}),
    "distilbert-hmp": ("distilbert", "hmp", (3, 1), (17, 5), {}),
    "distilbert-pipeline": ("distilbert", "pipeline", (1, 1), (17, 5), {}),
    "gpt2-local": ("gpt2", "local", (1,), (7, 61), {}),
    "gpt2-hmp": ("gpt2", "hmp", (2, 1, 1), (7, 61), {}),
    "gpt2-megatron-tp": ("gpt2", "megatron-tp", (1, 2), (7, 61), {}),
    "gpt2-sp": ("gpt2", "sp", (2, 1), (7, 61), {}),
    "gpt2-pipeline": ("gpt2", "pipeline", (2, 2), (7, 61), {"prefill_rows": 16}),
    "opt-hmp": ("opt", "hmp", (1, 1), (7, 30), {}),
    "llama-local": ("llama", "local", (1,), (7, 61), {}),
    "llama-hmp": ("llama", "hmp", (2, 1), (7, 61), {}),
    "llama-hmp-chunks": ("llama", "hmp", (1, 1, 1), (70, 3), {"prefill_rows": 32}),
    "llama-hmp-micro": ("llama", "hmp", (2, 1), (150, 40), {"micro_batches": 2}),
    "llama-hmp-out": ("llama", "hmp", (1, 2), (37,), {"replicated": ("out", "mlp")}),
    "llama-megatron-tp": ("llama", "megatron-tp", (2, 1), (7, 61), {}),
    "llama-sp": ("llama", "sp", (1, 1), (7, 61), {}),
    "llama-pipeline": ("llama", "pipeline", (1, 2, 1), (7, 61), {}),
    "llama-pipeline-fp16": ("llama", "pipeline", (2, 2), (40,), {"values": "fp16"}),
    "llama-hmp-bfloat16": ("llama", "hmp", (2, 1), (25,), {"weights": "bfloat16"}),
    "llama-hmp-float16": ("llama", "hmp", (2, 1), (25,), {"weights": "float16"}),
    "llama-hmp-int8": ("llama", "hmp", (2, 1), (25,), {"weights": "int8"}),
    "llama-pipeline-int4": ("llama", "pipeline", (2, 2), (25,), {"weights": "int4"}),
    "llama-hmp-sampled": ("llama", "hmp", (2, 1), (20, 9), {"sampling": _SAMPLING}),
    "qwen3-hmp": ("qwen3", "hmp", (1, 2), (7, 40), {}),
    "mistral-pipeline": ("mistral", "pipeline", (3, 1), (7, 70), {}),
    "mistral-hmp": ("mistral", "hmp", (1, 1), (7, 70), {}),
}  # fmt: skip
# Seed, operators, segments, ranks, and the value format on the wire.
GRAPHS: dict[str, tuple[int, int, int, int, str]] = {
    f"graph-{seed}-{values}": (seed, 8 + 2 * seed, 2 + seed, 1 + seed % 4, values)
    for values, seeds in (("exact", (1, 2, 3, 5, 6, 7)), ("fp16", (3,)), ("bf16", (6,)))
    for seed in seeds
}


def names() -> list[str]:
    return [*TRANSFORMERS, *GRAPHS]


def outputs_of(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """By array: a hash of its bytes, and sampled values."""
    if name in GRAPHS:
        arrays = graph_outputs(folder, *GRAPHS[name])
    else:
        family, strategy, split, lengths, more = TRANSFORMERS[name]
        arrays = transformer_outputs(folder, family, strategy, split, lengths, **more)
    return {each: _described(array) for each, array in sorted(arrays.items())}


def _described(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    places = np.linspace(0, array.size - 1, min(_SAMPLES, array.size)).astype(int)
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
        "samples": [float(each) for each in array.reshape(-1)[places]],
    }


def machine() -> dict[str, str]:
    """What the bits depend on: the processor's model and features, and the versions of the libraries."""
    found = {"machine": platform.machine(), **{library: version(library) for library in _LIBRARIES}}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {**found, "processor": platform.processor()}
    first = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    parts = [first.get(name, "") for name in ("vendor_id", "model name", "cpu family", "model", "stepping")]
    flags = " ".join(sorted(first.get("flags", first.get("Features", "")).split()))
    return {**found, "processor": " ".join(parts), "flags": flags}


def compare_outputs(
    name_of_case: str, recorded: dict[str, Any], found: dict[str, Any], same_machine: bool
) -> list[Difference]:
    """On another machine only shapes and sampled values are compared, and no tokens, since near ties may change."""
    if recorded.keys() != found.keys():
        return [Difference("arrays", sorted(recorded), sorted(found))]
    wrong = []
    tolerance = _CLOSE_BFLOAT16 if name_of_case.endswith("bfloat16") else _CLOSE
    for name, before in recorded.items():
        after = found[name]
        for field in ("dtype", "shape", *(("sha256",) if same_machine else ())):
            if before[field] != after[field]:
                wrong.append(Difference(f"{name}.{field}", before[field], after[field]))
        if not same_machine and name != "tokens":
            close = np.allclose(before["samples"], after["samples"], rtol=tolerance, atol=tolerance, equal_nan=True)
            if not close:
                wrong.append(Difference(f"{name}.samples", before["samples"], after["samples"]))
    return wrong
