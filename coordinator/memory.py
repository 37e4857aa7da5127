"""Every byte that a device will hold under a plan (Galaxy's constraint counts weights alone; ALGORITHMS.md section 1)."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from hearth.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grains_of, spans
from hearth.model.sharding import ChunkKind, chunk_weights
from hearth.model.spec import ModelSpec
from hearth.plan import Holding, MemoryUse, TransformerPlan

# Measured on x86-64: a worker process that has imported torch, numpy and zmq and run its first GEMM, and holds no shard,
# has 239 MiB resident (psutil, torch 2.13 CPU); rounded up for the allocator's slack and its threads' stacks.
WORKER_PROCESS_BYTES = 288 << 20
COMPUTE_BYTES = 4  # workers compute in float32


def weights_of(spec: ModelSpec, kind: ChunkKind, span: Span, total: int, grain: int) -> int:
    """Bytes in memory of the chunks that make up `span`; only the last grain of a kind may be smaller."""
    chunks = grains_of(span, total, grain)
    if not chunks:
        return 0
    whole = chunk_weights(spec, kind, 0)
    last = chunk_weights(spec, kind, chunks[-1])
    return (whole * (len(chunks) - 1) + last) * COMPUTE_BYTES


@lru_cache(maxsize=4096)
def layer_bytes(spec: ModelSpec, held: Holding) -> int:
    """Bytes in memory of one layer's weights on a rank."""
    group = spec.num_heads // spec.num_kv_heads
    return (
        weights_of(spec, "qkv", held.qkv, spec.num_heads, group)
        + weights_of(spec, "out", held.out, spec.num_heads, group)
        + weights_of(spec, "mlp", held.columns, spec.ffn_size, COLUMN_GRAIN)
        + chunk_weights(spec, "connective") * COMPUTE_BYTES  # allocated on every rank
    )


def memory_use(spec: ModelSpec, body: TransformerPlan, rank: int, seq_len: int) -> MemoryUse:
    """What rank `rank` holds for steps of at most `seq_len` rows (S), at the worst moment of a layer.

    Activations: the gathered input and a partial sum [S,H] each with its receive buffer, the rank's rows and their
    residual [s,H] counted as [S,H] each; and the larger of attention (QKV [S,3w], context [S,w], one sequence's scores
    [heads,S,S], which a fused kernel needs only in part) and the MLP ([S,c] before and after the activation).
    """
    vocabulary = spans(body.vocabulary)[rank]
    holdings = [body.holding(rank, layer) for layer in range(spec.num_layers)]
    weights = sum(count * layer_bytes(spec, held) for held, count in Counter(holdings).items())
    embeddings = weights_of(spec, "vocabulary", vocabulary, spec.vocab_size, VOCABULARY_GRAIN)
    embeddings += chunk_weights(spec, "embedding") * COMPUTE_BYTES
    heads = max(body.heads[rank], max(held.qkv.size for held in holdings))
    columns = max(held.columns.size for held in holdings)
    w = heads * spec.head_dim
    rows = 6 * seq_len * spec.hidden_size
    attention = seq_len * 4 * w + heads * seq_len * seq_len
    mlp = 2 * seq_len * columns
    activations = (rows + max(attention, mlp)) * COMPUTE_BYTES if body.has_rows(rank) or w or columns else 0
    return MemoryUse(
        weights=weights,
        embeddings=embeddings,
        activations=activations,
        workspace=WORKER_PROCESS_BYTES + largest_chunk_bytes(spec),
    )


def largest_chunk_bytes(spec: ModelSpec) -> int:
    """What lies beside the shard while it is loaded."""
    kinds: tuple[ChunkKind, ...] = ("qkv", "out", "mlp", "connective", "vocabulary", "embedding")
    return max(chunk_weights(spec, kind) for kind in kinds) * spec.bytes_per_weight
