"""The tensors of a transformer as one table, and the chunks in which they are stored. Pure.

By this table the coordinator cuts checkpoints, workers allocate and fill shards, and planners price memory. A new part of a
layer is a row of `layer_tensors`, and its arithmetic in the worker's `blocks`.

A chunk holds one KV group's QKV or output projection, 64 MLP columns, one layer's replicated vectors, 1024 vocabulary rows
of the word embedding or of the head, or the rest of the embedding. Chunk boundaries (grains) do not depend on the plan, so a
new plan moves chunks between devices and leaves their content and names unchanged.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grain_span
from hearth.plan.model_spec import ModelSpec

ChunkKind: TypeAlias = Literal["qkv", "out", "mlp", "connective", "vocabulary", "head", "embedding"]
LAYER_CHUNK_KINDS: tuple[ChunkKind, ...] = ("qkv", "out", "mlp", "connective")


class ModelTensor(NamedTuple):
    """One tensor of a layer or of the embedding.

    Its rows are outputs, its columns inputs. Row-parallel weights (`o`, `down`) are cut along their inputs; their biases are
    whole, since they are added once, to the sum. The tensors of one `part` (Q, K and V) are one matrix in memory.
    """

    name: str  # our name, such as `q.weight`; families map the word before the dot to the checkpoint's name
    shape: tuple[int, ...]
    kind: ChunkKind  # of the chunks that hold it
    role: Literal["matrix", "bias", "norm"]  # norms are weights or biases of a norm
    part: str
    axis: int | None = None  # along which chunks and shards cut it; None: never cut
    num_items: int = 1  # heads, MLP columns or vocabulary rows along that axis

    def span(self, items: Span) -> Span:
        """The indices along the axis that belong to a span of items on grain borders."""
        start, stop = (item * self.shape[self.axis or 0] // self.num_items for item in items)
        return Span(start, stop)


class LayerMatrix(NamedTuple):
    """A matrix of a layer in memory: tensors that are concatenated along their outputs."""

    part: str
    kind: ChunkKind
    axis: int
    tensors: tuple[ModelTensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs of the whole matrix."""
        return sum(tensor.shape[0] for tensor in self.tensors), self.tensors[0].shape[1]

    def size(self, items: int) -> int:
        """Size along the axis for a number of heads (whole KV groups) or columns."""
        return sum(tensor.span(Span(0, items)).size for tensor in self.tensors)


class TensorSlice(NamedTuple):
    """The part of a tensor that one chunk holds: a span along the tensor's axis (None: all)."""

    tensor: ModelTensor
    span: Span | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this part."""
        axis = self.tensor.axis
        if axis is None or self.span is None:
            return self.tensor.shape
        return (*self.tensor.shape[:axis], self.span.size, *self.tensor.shape[axis + 1 :])

    def place(self, first: int = 0) -> tuple[slice, ...]:
        """The index of this part in a tensor that begins with element `first` of the axis."""
        axis = self.tensor.axis
        if axis is None or self.span is None:
            return (slice(None),)
        return (*[slice(None)] * axis, slice(self.span.start - first, self.span.stop - first))


@lru_cache(maxsize=64)
def layer_tensors(spec: ModelSpec) -> tuple[ModelTensor, ...]:
    """All tensors of a layer. Within a chunk they are stored in this order."""
    H, F, heads = spec.hidden_size, spec.ffn_size, spec.num_heads
    q, kv = spec.q_width(heads), spec.kv_width(heads)
    qkv = [
        tensor
        for name, width in (("q", q), ("k", kv), ("v", kv))
        for tensor in _linear(name, (width, H), "qkv", 0, heads, spec.qkv_bias, part="qkv")
    ]
    by_column = ("gate", "up") if spec.gated else ("up",)
    mlp = [tensor for name in by_column for tensor in _linear(name, (F, H), "mlp", 0, F, spec.mlp_bias)]
    qk_norms = ("q_norm", "k_norm") if spec.qk_norm else ()
    return (
        *qkv,
        *_linear("o", (H, q), "out", 1, heads, spec.out_bias),
        *mlp,
        *_linear("down", (H, F), "mlp", 1, F, spec.mlp_bias),
        *_norm("norm1", H, "connective", bias=spec.norm == "layer"),
        *_norm("norm2", H, "connective", bias=spec.norm == "layer"),
        *(tensor for name in qk_norms for tensor in _norm(name, spec.head_dim, "connective", bias=False)),
    )


@lru_cache(maxsize=64)
def embedding_tensors(spec: ModelSpec) -> tuple[ModelTensor, ...]:
    """All tensors outside the layers. Within a chunk they are stored in this order."""
    H, V = spec.hidden_size, spec.vocab_size
    num_positions = spec.max_positions + spec.position_offset
    rest = [("position", num_positions)] if spec.rotary is None else []
    rest += [("type", spec.type_vocab_size)] if spec.type_vocab_size else []
    return (
        *_linear("word", (V, H), "vocabulary", 0, V),
        *(_linear("head", (V, H), "head", 0, V) if spec.has_separate_head else ()),
        *(ModelTensor(f"{name}.weight", (rows, H), "embedding", "matrix", name) for name, rows in rest),
        *_norm("final" if spec.causal else "norm", H, "embedding", bias=spec.norm == "layer"),
    )


def _linear(
    name: str, shape: tuple[int, int], kind: ChunkKind, axis: int, items: int, bias: bool = False, part: str = ""
) -> list[ModelTensor]:
    """The rows of a linear layer that is cut along `axis` into `items`."""
    part = part or name
    rows = [ModelTensor(f"{name}.weight", shape, kind, "matrix", part, axis, items)]
    if bias and axis == 0:
        rows.append(ModelTensor(f"{name}.bias", shape[:1], kind, "bias", part, 0, items))
    elif bias:
        rows.append(ModelTensor(f"{name}.bias", shape[:1], "connective", "bias", part))
    return rows


def _norm(name: str, size: int, kind: ChunkKind, bias: bool) -> list[ModelTensor]:
    suffixes = ("weight", "bias") if bias else ("weight",)
    return [ModelTensor(f"{name}.{suffix}", (size,), kind, "norm", name) for suffix in suffixes]


@lru_cache(maxsize=64)
def layer_matrices(spec: ModelSpec) -> tuple[LayerMatrix, ...]:
    """The matrices of a layer in memory, in the order of `layer_tensors`."""
    parts: dict[str, list[ModelTensor]] = {}
    for tensor in layer_tensors(spec):
        if tensor.role == "matrix":
            parts.setdefault(tensor.part, []).append(tensor)
    return tuple(
        LayerMatrix(part, tensors[0].kind, tensors[0].axis or 0, tuple(tensors)) for part, tensors in parts.items()
    )


def chunk_items(spec: ModelSpec, kind: ChunkKind) -> tuple[int, int]:
    """The items of a kind in one layer or in the embedding, and those of one chunk; only the last may hold fewer."""
    if kind in ("qkv", "out"):
        return spec.num_heads, spec.group_size
    if kind == "mlp":
        return spec.ffn_size, COLUMN_GRAIN
    if kind in ("vocabulary", "head"):
        return spec.vocab_size, VOCABULARY_GRAIN
    return 1, 1


def chunk_slices(spec: ModelSpec, kind: ChunkKind, grain: int) -> list[TensorSlice]:
    """The parts of tensors that one chunk holds."""
    tensors = layer_tensors(spec) if kind in LAYER_CHUNK_KINDS else embedding_tensors(spec)
    total, size = chunk_items(spec, kind)
    items = grain_span(grain, total, size)
    own = (tensor for tensor in tensors if tensor.kind == kind)
    return [TensorSlice(tensor, None if tensor.axis is None else tensor.span(items)) for tensor in own]
