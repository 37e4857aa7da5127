"""The shape of a transformer, as needed for sharding, planning and computing. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from hearth.plan.rotary import RotarySpec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Activation = Literal["gelu", "gelu_new", "relu", "silu"]
WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "int4"]
KvFormat = Literal[
    "float32", "bfloat16", "int8"
]  # of keys and values in the KV cache; int8 has a scale per row and head
# Compute capability from which on torch has an int4 kernel for CUDA: Ampere, for instance a Jetson Orin.
INT4_MIN_CAPABILITY = (8, 0)
# Bytes per weight. int4 includes a scale and a zero point of 2 bytes each for every 32 weights.
_MATRIX_BYTES: dict[WeightFormat, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.625}


class ModelSpec(BaseModel, frozen=True):
    """The shape of one model, read from its Hugging Face config (see `coordinator.models.checkpoint.families`).

    A KV group is the set of query heads that share one key and value head. The defaults describe an encoder (BERT).
    """

    name: str = Field(max_length=256)
    family: str = Field(max_length=64)
    num_layers: int = Field(ge=1, le=1024)
    num_heads: int = Field(ge=1, le=1024)
    num_kv_heads: int = Field(ge=1, le=1024)
    head_dim: int = Field(ge=1, le=4096)
    hidden_size: int = Field(ge=1, le=1 << 20)
    ffn_size: int = Field(ge=1, le=1 << 22)
    vocab_size: int = Field(ge=1, le=1 << 24)
    max_positions: int = Field(ge=1, le=1 << 24)
    type_vocab_size: int = Field(ge=0, le=1024)  # 0: no token types
    norm_eps: float = Field(gt=0)
    activation: Activation
    dtype: Literal["float32", "float16", "bfloat16"]  # of the weights in the checkpoint

    causal: bool = False  # a decoder: causal attention, and a head that predicts the next token
    norm: Literal["layer", "rms"] = "layer"
    norm_place: Literal["post", "pre"] = "post"  # after the residual addition (BERT), or before each sublayer
    gated: bool = False  # the MLP is activation(gate) * up
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False  # RMS norm on each query and key head (Qwen3)
    position_offset: int = Field(default=0, ge=0, le=64)  # added to the index into the learned positions (OPT: 2)
    rotary: RotarySpec | None = None  # None: learned positions
    sliding_window: int | None = Field(default=None, ge=1)  # tokens that a token attends to, itself included
    full_attention_layers: int = Field(default=0, ge=0)  # first layers without a window (Qwen2's max_window_layers)
    tied_head: bool = True  # the head uses the word embedding's weights

    weights: WeightFormat = "float32"  # of matrices in a device's memory; the user's choice, independent of `dtype`
    kv_cache: KvFormat = "float32"  # the user's choice, too

    @property
    def bytes_per_weight(self) -> int:
        """Bytes per weight in the checkpoint."""
        return DTYPE_BYTES[self.dtype]

    @property
    def matrix_bytes(self) -> float:
        """Bytes per in-memory matrix weight."""
        return _MATRIX_BYTES[self.weights]

    @property
    def word_bytes(self) -> int:
        """Bytes per in-memory weight of the word embedding, which is only looked up and never quantised."""
        return 4 if self.weights == "float32" else 2

    @property
    def head_bytes(self) -> float:
        """Bytes per in-memory weight of the output head."""
        return self.word_bytes if self.tied_head else self.matrix_bytes

    @property
    def group_size(self) -> int:
        """Number of query heads in one KV group."""
        return self.num_heads // self.num_kv_heads

    def q_width(self, heads: int) -> int:
        """Width of a query row for this number of heads (whole KV groups)."""
        return heads * self.head_dim

    def kv_width(self, heads: int) -> int:
        """Width of a key row, or of a value row, for this number of query heads."""
        return heads // self.group_size * self.head_dim

    def qkv_width(self, heads: int) -> int:
        """Width of a row of Q, K and V together for this number of query heads."""
        return self.q_width(heads) + 2 * self.kv_width(heads)

    def window(self, layer: int) -> int | None:
        """The attention window of a layer in tokens, the token itself included; None: no window."""
        return None if layer < self.full_attention_layers else self.sliding_window

    @property
    def kv_row_bytes(self) -> int:
        """Bytes in the KV cache of the key, or of the value, of one token and head."""
        return {"float32": 4 * self.head_dim, "bfloat16": 2 * self.head_dim, "int8": self.head_dim + 4}[self.kv_cache]

    @property
    def has_separate_head(self) -> bool:
        """Whether the model is a decoder whose output head has its own weights, not the word embedding's."""
        return self.causal and not self.tied_head

    @model_validator(mode="after")
    def _whole_groups(self) -> ModelSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot be shared among {self.num_kv_heads} key and value heads")
        return self
