"""Every byte that a device will hold under a plan (Galaxy's constraint counts weights alone; ALGORITHMS.md section 1).

S rows of a step, H hidden, w = heads * head_dim of a rank and q its QKV width (3w without grouped queries), c its MLP
columns, V its share of the vocabulary, B sequences that are decoded in one step, L tokens of one sequence.
"""

from __future__ import annotations

import math
from functools import lru_cache

from coordinator.models.checkpoint.chunk_layout import chunk_weights
from hearth.plan.chunks import ChunkKind
from hearth.plan.geometry import COLUMN_GRAIN, Span, grains_of
from hearth.plan.model_spec import ModelSpec
from hearth.plan.transformer import GenerationLimits, Holding

# Measured on x86-64: a worker process that has imported torch, numpy and zmq and run its first GEMM, and holds no shard,
# has 239 MiB resident (psutil, torch 2.13 CPU); rounded up for the allocator's slack and its threads' stacks.
WORKER_PROCESS_BYTES = 288 << 20
COMPUTE_BYTES = 4  # workers compute in float32, and keep keys and values in it
# What sampling holds per candidate of the one sequence that is sampled: its id and logit, sorted, partly in float64.
VALUES_PER_CANDIDATE = 12


_BYTES_OF_KIND = {"connective": COMPUTE_BYTES, "embedding": COMPUTE_BYTES}


def bytes_per_weight(spec: ModelSpec, kind: ChunkKind) -> float:
    """In a device's memory. Biases count as the matrices beside them."""
    if kind == "vocabulary":
        return spec.word_bytes
    return _BYTES_OF_KIND.get(kind, spec.matrix_bytes)


@lru_cache(maxsize=4096)
def weights_of(spec: ModelSpec, kind: ChunkKind, span: Span, total: int, grain: int) -> int:
    """Bytes in memory of the chunks that make up `span`; only the last grain of a kind may be smaller."""
    chunks = grains_of(span, total, grain)
    if not chunks:
        return 0
    whole = chunk_weights(spec, kind, 0)
    last = chunk_weights(spec, kind, chunks[-1])
    return math.ceil((whole * (len(chunks) - 1) + last) * bytes_per_weight(spec, kind))


@lru_cache(maxsize=4096)
def layer_bytes(spec: ModelSpec, held: Holding) -> int:
    """Bytes in memory of one layer's weights on a rank."""
    return (
        weights_of(spec, "qkv", held.qkv, spec.num_heads, spec.group_size)
        + weights_of(spec, "out", held.out, spec.num_heads, spec.group_size)
        + weights_of(spec, "mlp", held.columns, spec.ffn_size, COLUMN_GRAIN)
        + chunk_weights(spec, "connective") * COMPUTE_BYTES  # allocated on every rank
    )


def kv_bytes(spec: ModelSpec, heads: int, generation: GenerationLimits, num_layers: int | None = None) -> int:
    """The KV cache of so many query heads, for all tokens that are promised; without `num_layers`, of all layers."""
    layers = spec.num_layers if num_layers is None else num_layers
    return 2 * spec.kv_width(heads) * layers * generation.kv_tokens * COMPUTE_BYTES


def step_rows(seq_len: int, generation: GenerationLimits | None) -> int:
    """S: the most rows of any step, be it prefill or decoding."""
    return max(seq_len, generation.max_sequences) if generation else seq_len


def attention_values(spec: ModelSpec, heads: int, seq_len: int, generation: GenerationLimits | None) -> int:
    """At the worst moment of attention.

    An encoder: QKV [S,3w], context [S,w], and one sequence's scores [heads,S,S], of which a fused kernel needs a part.
    A decoder: QKV [S,q] and what turning its positions takes beside it, context [S,w]. Its sequences are long: scores
    are counted as the fused kernel has them, block by block; what grows is the mask [S,L], made from another one.
    """
    S = step_rows(seq_len, generation)
    if not spec.causal:
        return S * (spec.qkv_width(heads) + spec.q_width(heads)) + heads * S * S
    length = (generation.context or generation.kv_tokens) if generation else S
    return S * (2 * spec.qkv_width(heads) + spec.q_width(heads)) + 2 * S * length


def mlp_values(spec: ModelSpec, columns: int, seq_len: int, generation: GenerationLimits | None) -> int:
    """[S,c] before and after the activation, and once more where it gates."""
    return (3 if spec.gated else 2) * step_rows(seq_len, generation) * columns


def logit_values(vocabulary: int, generation: GenerationLimits | None) -> int:
    """Logits [B,V] and the candidates of one sequence."""
    return (generation.max_sequences + VALUES_PER_CANDIDATE) * vocabulary if generation else 0


@lru_cache(maxsize=256)
def largest_chunk_bytes(spec: ModelSpec) -> int:
    """What lies beside the shard while it is loaded: a chunk, and a matrix that is quantised when all of it is there."""
    kinds: list[ChunkKind] = ["qkv", "out", "mlp", "connective", "vocabulary", "embedding"]
    if spec.has_separate_head:
        kinds.append("head")
    chunk = max(chunk_weights(spec, kind) for kind in kinds) * spec.bytes_per_weight
    if spec.weights not in ("int8", "int4"):
        return chunk
    matrix = max(spec.ffn_size, spec.qkv_width(spec.num_heads)) * spec.hidden_size
    head = spec.vocab_size * spec.hidden_size if spec.has_separate_head else 0
    return chunk + max(matrix, head) * COMPUTE_BYTES
