"""Memory of a device under a transformer plan, in bytes.

Galaxy's memory constraint counts weights only; this one counts activations, the KV cache and the worker process too.

Shape letters: S rows of a step, H hidden size, w = heads * head_dim of a rank, q its QKV width (3w without grouped
queries), k its key width, c its MLP columns, V its share of the vocabulary, B sequences decoded in one step, L tokens of one
sequence.
"""

from __future__ import annotations

import math
from functools import lru_cache

from coordinator.models.checkpoint.chunk_layout import num_chunk_weights
from hearth.plan.geometry import Span, grains_of
from hearth.plan.layer import LAYER_CHUNK_KINDS, ChunkKind, chunk_items, embedding_tensors, layer_matrices
from hearth.plan.model_spec import ModelSpec
from hearth.plan.transformer import KV_BLOCK_TOKENS, GenerationLimits, LayerShare

# Measured on x86-64: a worker process that has imported torch, numpy and zmq and run its first GEMM, and holds no shard,
# has 239 MiB resident (psutil, torch 2.13 CPU); rounded up for the allocator's slack and its threads' stacks.
WORKER_PROCESS_BYTES = 288 << 20
COMPUTE_BYTES = 4  # float32: workers compute in it
# Rows of a bfloat16 KV cache that prefill converts at a time (the worker's `causal_attention`); decoding converts none.
_CONVERTED_ROWS = 1024
# float32 values held per candidate while a sequence is sampled, one sequence at a time: ids and logits, sorted, partly float64.
VALUES_PER_CANDIDATE = 12


_BYTES_OF_KIND = {"connective": COMPUTE_BYTES, "embedding": COMPUTE_BYTES}


def bytes_per_weight(spec: ModelSpec, kind: ChunkKind) -> float:
    """Bytes per weight in a device's memory. Biases count like the matrices of their chunk."""
    if kind == "vocabulary":
        return spec.word_bytes
    return _BYTES_OF_KIND.get(kind, spec.matrix_bytes)


@lru_cache(maxsize=4096)
def span_weight_bytes(spec: ModelSpec, kind: ChunkKind, span: Span) -> int:
    """Bytes in memory of the chunks that make up `span`; only the last grain of a kind may be smaller."""
    chunks = grains_of(span, *chunk_items(spec, kind))
    if not chunks:
        return 0
    whole = num_chunk_weights(spec, kind, 0)
    last = num_chunk_weights(spec, kind, chunks[-1])
    return math.ceil((whole * (len(chunks) - 1) + last) * bytes_per_weight(spec, kind))


@lru_cache(maxsize=4096)
def layer_bytes(spec: ModelSpec, held: LayerShare) -> int:
    """Bytes in memory of one layer's weights on a rank."""
    shared = sum(span_weight_bytes(spec, kind, span) for kind, span in held.by_kind().items())
    return shared + num_chunk_weights(spec, "connective") * COMPUTE_BYTES  # the latter is allocated on every rank


def kv_bytes(spec: ModelSpec, heads: int, limits: GenerationLimits) -> int:
    """Bytes of the KV cache for `heads` query heads in all layers and all reserved tokens."""
    num_heads = heads // spec.group_size
    return 2 * num_heads * spec.kv_row_bytes * spec.num_layers * limits.num_kv_blocks * KV_BLOCK_TOKENS


def step_rows(seq_len: int, limits: GenerationLimits | None) -> int:
    """S: the maximum number of rows of any step, prefill or decoding."""
    return max(seq_len, limits.max_sequences) if limits else seq_len


def attention_values(spec: ModelSpec, heads: int, seq_len: int, limits: GenerationLimits | None) -> int:
    """Peak number of values of attention.

    Encoder: QKV [S,3w], context [S,w], and the scores of one sequence [heads,S,S], of which a fused kernel needs only a part.
    Decoder: QKV [S,q] and as much again for rotary embedding; the context [S,w], the queries in the order of heads, and the
    results for two ranges of keys, which are merged. Scores are computed block by block. A KV cache in another format than
    float32 is converted for one sequence and layer at a time: keys and values [L,k] each, of bfloat16 in parts.
    """
    S = step_rows(seq_len, limits)
    if not spec.causal:
        return S * (spec.qkv_width(heads) + spec.q_width(heads)) + heads * S * S
    length = (limits.context or limits.kv_tokens) if limits else S
    num_converted = {"float32": 0, "bfloat16": min(length, max(S, _CONVERTED_ROWS)), "int8": length}[spec.kv_cache]
    values = S * (2 * spec.qkv_width(heads) + 4 * spec.q_width(heads))
    return values + 2 * num_converted * spec.kv_width(heads)


def mlp_values(spec: ModelSpec, columns: int, seq_len: int, limits: GenerationLimits | None) -> int:
    """Peak number of values of the MLP: [S,c] before and after the activation, and once more for a gated MLP."""
    return (3 if spec.gated else 2) * step_rows(seq_len, limits) * columns


def logit_values(vocabulary: int, limits: GenerationLimits | None) -> int:
    """Number of values of the logits [B,V] and the candidates of one sequence."""
    return (limits.max_sequences + VALUES_PER_CANDIDATE) * vocabulary if limits else 0


@lru_cache(maxsize=256)
def loading_bytes(spec: ModelSpec) -> int:
    """Temporary bytes while a shard is loaded: a chunk, and, for int8 and int4, a whole matrix before it is quantised."""
    kinds = {*LAYER_CHUNK_KINDS, *(tensor.kind for tensor in embedding_tensors(spec))}
    chunk = max(num_chunk_weights(spec, kind) for kind in kinds) * spec.bytes_per_weight
    if spec.weights not in ("int8", "int4"):
        return chunk
    matrix = max(math.prod(matrix.shape) for matrix in layer_matrices(spec))
    head = spec.vocab_size * spec.hidden_size if spec.has_separate_head else 0
    return chunk + max(matrix, head) * COMPUTE_BYTES
