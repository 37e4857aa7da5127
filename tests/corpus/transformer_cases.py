"""Generated profiles, and `hearth plan` for models of every family on them. Everything follows from seeds.

A device has a speed in FLOP/s and a memory bandwidth; its curves follow from these, with an overhead, noise and, on
some devices, kernels that are slow for small sizes. Links are equal, different by direction, or different by pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from corpus.cases import Case, rounded

MIB = 1 << 20
NUM_PROFILES = 44
STRATEGIES = ("auto", "local", "megatron-tp", "sp", "hmp", "pipeline")
NAMES = ("kitchen", "hall", "attic", "study", "cellar", "garage", "bedroom", "porch")
# Approximate memory of a process with torch and a chunk being loaded, which a device needs besides its share.
_WORKER_BYTES = 420 * MIB

_LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "minilm": {
        "model_type": "bert", "num_hidden_layers": 6, "num_attention_heads": 12, "hidden_size": 384,
        "intermediate_size": 1536, "vocab_size": 30522, "max_position_embeddings": 512,
    },
    "bert-base": {
        "model_type": "bert", "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768,
        "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
    },
    "bert-large": {
        "model_type": "bert", "num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024,
        "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512,
    },
    "distilbert": {
        "model_type": "distilbert", "n_layers": 6, "n_heads": 12, "dim": 768, "hidden_dim": 3072, "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "gpt2": {
        "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024,
    },
    "opt": {
        "model_type": "opt", "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768, "ffn_dim": 3072,
        "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
    },
    "llama": {
        **_LLAMA, "num_hidden_layers": 10, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048,
        "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 8192,
    },
    "qwen3": {
        **_LLAMA, "model_type": "qwen3", "num_hidden_layers": 10, "num_attention_heads": 16, "num_key_value_heads": 8,
        "hidden_size": 1024, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 32768,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
}  # fmt: skip


# Tensors by which a checkpoint's names and dtype are detected, and that dtype.
_PROBES = {
    "bert": ("F32", "embeddings.word_embeddings", "encoder.layer.0.attention.self.query"),
    "distilbert": ("F32", "embeddings.word_embeddings", "transformer.layer.0.attention.q_lin"),
    "gpt2": ("F32", "wte", "h.0.attn.c_attn"),
    "opt": ("F16", "decoder.embed_tokens", "decoder.layers.0.self_attn.q_proj"),
    "llama": ("BF16", "embed_tokens", "layers.0.self_attn.q_proj"),
    "qwen3": ("BF16", "embed_tokens", "layers.0.self_attn.q_proj"),
}


def _save_probes(family: str, path: Path) -> None:
    """A safetensors file of empty tensors: planning takes shapes from the config."""
    dtype, *tensors = _PROBES[family]
    entry = {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{tensor}.weight": entry for tensor in tensors}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@dataclass(frozen=True)
class Shape:
    """The sizes that costs depend on."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocabulary: int
    gated: bool
    causal: bool

    @property
    def weights(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn
        return self.layers * (attention + mlp) + self.vocabulary * self.hidden * (2 if self.gated else 1)


def shape_of(config: dict[str, Any]) -> Shape:
    def first(*names: str, default: int = 0) -> int:
        return next((config[name] for name in names if name in config), default)

    heads = first("num_attention_heads", "n_heads", "n_head")
    hidden = first("hidden_size", "dim", "n_embd")
    return Shape(
        layers=first("num_hidden_layers", "n_layers", "n_layer"),
        heads=heads,
        kv_heads=first("num_key_value_heads", default=heads),
        head_dim=first("head_dim", default=hidden // heads),
        hidden=hidden,
        ffn=first("intermediate_size", "hidden_dim", "ffn_dim", default=4 * hidden),
        vocabulary=config["vocab_size"],
        gated=config["model_type"] in ("llama", "qwen3"),
        causal=config["model_type"] not in ("bert", "distilbert"),
    )


# ---- devices ----------------------------------------------------------------------------------------------------------


def _curve(rng: Random, total: int, num_points: int, seconds: float, overhead: float) -> dict[str, Any]:
    """The curve of a block that takes `seconds` in total, plus an overhead for each call."""
    sizes = sorted({max(total * (i + 1) // num_points, 1) for i in range(num_points)})
    noise = [1 + 0.04 * rng.random() for _ in sizes]
    times = [rounded(overhead + seconds * size / total * each) for size, each in zip(sizes, noise, strict=True)]
    return {"sizes": sizes, "seconds": times, "error": rounded(0.03 * rng.random(), 3)}


def _blocks(rng: Random, shape: Shape, seq_len: int, flops: float, bandwidth: float, points: int) -> dict[str, Any]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    up = (4 if shape.gated else 2) * shape.hidden * shape.ffn
    down = 2 * shape.hidden * shape.ffn
    overhead = rounded(rng.choice((0.0, 2e-5, 2e-4)))

    def curve(total: int, work: float) -> dict[str, Any]:
        return _curve(rng, total, points, seq_len * work / flops, overhead)

    blocks: dict[str, Any] = {
        "seq_len": seq_len,
        "qkv": curve(shape.heads, 2 * shape.hidden * (queries + 2 * keys)),
        "core": curve(shape.heads, 4 * seq_len * queries * 1.5),
        "out": curve(shape.heads, 2 * shape.hidden * queries),
        "up": curve(shape.ffn, up),
        "down": curve(shape.ffn, down),
        "connective": curve(seq_len, 40 * shape.hidden),
        "embedding": curve(seq_len, 30 * shape.hidden),
        "mlp_rows": curve(seq_len, (up + down) * rng.choice((1.0, 1.1))),
    }
    if rng.random() < 0.5:
        blocks["wire"] = {
            "encrypted_seconds_per_byte": rounded(rng.uniform(2e-10, 2e-9)),
            "plain_seconds_per_byte": rounded(rng.uniform(5e-11, 2e-10)),
            "seconds_per_message": rounded(rng.uniform(2e-6, 5e-5)),
            "convert_seconds_per_value": {each: rounded(rng.uniform(1e-10, 2e-9)) for each in ("bf16", "fp16", "int8")},
        }
    if shape.causal:
        blocks["decode_seconds_per_byte"] = rounded(1 / bandwidth)
        blocks["decode_layer_seconds"] = rounded(rng.uniform(2e-5, 2e-4))
    return blocks


def _speeds(rng: Random, kind: str, count: int) -> list[float]:
    base = rng.uniform(5e9, 4e10)
    if kind == "equal":
        return [base] * count
    if kind == "pairs":
        return [base * (1 if index % 2 else 2.5) for index in range(count)]
    if kind == "one-fast":
        return [base * (12 if index == count - 1 else 1) for index in range(count)]
    return [base * rng.uniform(0.3, 3) for _ in range(count)]


def _budgets(rng: Random, kind: str, count: int, weight_bytes: int) -> list[int]:
    """`together`: the model needs all devices; `one`: it fits the last device only; `none`: it does not fit at all."""
    if kind == "roomy":
        return [_WORKER_BYTES + 2 * weight_bytes + rng.randrange(512, 4096) * MIB for _ in range(count)]
    if kind == "one":
        small = [_WORKER_BYTES + weight_bytes // 3 + rng.randrange(128) * MIB for _ in range(count - 1)]
        return [*small, _WORKER_BYTES + 2 * weight_bytes + 2048 * MIB]
    if kind == "none":
        return [_WORKER_BYTES + weight_bytes // (3 * count) for _ in range(count)]
    shares = [rng.uniform(0.6, 1.4) for _ in range(count)]
    spare = rng.uniform(1.25, 1.7)
    beside = max(weight_bytes // 6, 160 * MIB)
    return [int(_WORKER_BYTES + beside + spare * weight_bytes * share / sum(shares)) for share in shares]


def _links(rng: Random, kind: str, names: Sequence[str]) -> list[dict[str, Any]]:
    mbit, round_trip = {
        "lan": (940.0, 4e-4), "fast": (9400.0, 5e-5), "wifi": (60.0, 4e-3), "slow": (5.0, 0.03),
        "far": (300.0, 0.08), "asymmetric": (200.0, 2e-3), "mixed": (100.0, 2e-3), "hundred": (100.0, 5e-4),
    }[kind]  # fmt: skip

    def factor(source: int, target: int) -> float:
        if kind == "asymmetric":
            return 0.15 if source < target else 1.0
        return rng.uniform(0.1, 4.0) if kind == "mixed" else rng.uniform(0.95, 1.05)

    return [
        {
            "source": f"id-{names[a]}",
            "target": f"id-{names[b]}",
            "bytes_per_second": rounded(mbit * 1e6 / 8 * factor(a, b)),
            "round_trip_seconds": rounded(round_trip * rng.uniform(0.8, 1.3)),
        }
        for a in range(len(names))
        for b in range(len(names))
        if a != b
    ]


# ---- cases ------------------------------------------------------------------------------------------------------------

_COUNTS = (1, 2, 3, 4, 2, 5, 3, 8, 2, 6, 4, 3, 7)
_SPEEDS = ("equal", "drawn", "pairs", "drawn", "one-fast")
_MEMORY = ("roomy", "together", "roomy", "one", "together", "roomy", "none")
_LINKS = ("lan", "hundred", "mixed", "asymmetric", "slow", "fast", "hundred", "mixed", "far", "wifi", "asymmetric")


def _options(rng: Random, number: int, shape: Shape, names: Sequence[str]) -> tuple[str, ...]:
    options: list[str] = []
    if wire := ("", "", "fp16", "bf16", "", "int8", "exact")[number % 7]:
        options += ["--wire", wire]
    if lz4 := ("", "off", "", "on", "")[number % 5]:
        options += ["--lz4", lz4]
    if number % 3 == 1 and not (shape.causal and number % 2):
        options += ["--seq-len", str(rng.choice((16, 64, 128, 300)))]
    if shape.causal and number % 4 != 2:
        options += ["--context", str(rng.choice((256, 384, 512, 1000)))]
    if shape.causal and number % 5 == 3:
        options += ["--sequences", str(rng.choice((1, 2, 8)))]
    if weights := ("", "", "bfloat16", "", "int8", "", "", "int4", "", "float16", "")[number % 11]:
        options += ["--weights", weights, "--kv-cache", "float32"]  # the default when the plans were recorded
    if len(names) > 2 and number % 6 == 5:
        options += ["--exclude", names[rng.randrange(len(names))]]
    if len(names) > 1 and number % 8 == 6:
        options += ["--limit", f"{names[0]}={rng.choice(('60%', '900MiB'))}"]
    return tuple(options)


_BYTES = {"": 4.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.625}


def _profile(number: int) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The model's name, the profile, and further options."""
    rng = Random(9000 + number)
    model = list(MODELS)[number % len(MODELS)]
    shape = shape_of(MODELS[model])
    names = NAMES[: _COUNTS[number % len(_COUNTS)]]
    options = _options(rng, number, shape, names)
    given = dict(zip(options[::2], options[1::2], strict=True))
    seq_len = rng.choice((64, 256, 284, 512))
    flops = _speeds(rng, _SPEEDS[number % len(_SPEEDS)], len(names))
    weight_bytes = int(shape.weights * _BYTES[given.get("--weights", "")])
    memory = _MEMORY[number % len(_MEMORY)]
    budgets = _budgets(rng, memory, len(names), weight_bytes)
    points = (1, 3, 4, 2)[number % 4]
    devices = [
        {
            "device_id": f"id-{name}",
            "name": name,
            "budget_bytes": budget,
            "blocks": _blocks(rng, shape, seq_len, speed, 1e9 * rng.uniform(4, 30), points),
        }
        for name, budget, speed in zip(names, budgets, flops, strict=True)
    ]
    links = _links(rng, _LINKS[number % len(_LINKS)], names)
    return model, {"devices": devices, "links": links}, options


def transformer_cases() -> Iterator[Case]:
    """Every profile with each of `STRATEGIES`."""
    for number in range(NUM_PROFILES):
        model, profile, options = _profile(number)
        config = MODELS[model]
        files = {
            f"{model}/config.json": config,
            f"{model}/model.safetensors": partial(_save_probes, config["model_type"]),
            "profile.json": profile,
        }
        for strategy in STRATEGIES:
            yield Case(
                f"{number:02}-{model}-{strategy}",
                "transformer",
                (f"@{model}", "--load-profile", "@profile.json", "--strategy", strategy, *options, "--json"),
                files,
            )
