"""What a Transformer is, as far as sharding, planning and computing must know it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from hearth.plan.rotary import RotarySpec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Activation = Literal["gelu", "gelu_new", "relu", "silu"]
WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "int4"]
INT4_DEVICES = ("cpu",)  # the compute devices whose workers have a kernel for int4
# With int4's scales and zero points: 2 bytes each for every 32 weights.
_MATRIX_BYTES: dict[WeightFormat, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.625}


class ModelSpec(BaseModel, frozen=True):
    """The shape of one model, read from its Hugging Face config (see `coordinator.models.checkpoint.families`).

    A KV group is the query heads that share one key and value head. Defaults are an encoder's (BERT).
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
    type_vocab_size: int = Field(ge=0, le=1024)  # 0: the family has no token types
    norm_eps: float = Field(gt=0)
    activation: Activation
    dtype: Literal["float32", "float16", "bfloat16"]  # of the stored weights

    causal: bool = False  # a decoder: tokens see what came before them, and a head predicts the next one
    norm: Literal["layer", "rms"] = "layer"
    norm_place: Literal["post", "pre"] = "post"  # after the residual (BERT), or before each sublayer
    gated: bool = False  # the MLP is activation(gate) * up
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False  # RMS norm of every query and key head (Qwen3)
    position_offset: int = Field(default=0, ge=0, le=64)  # of the learned positions (OPT: 2)
    rotary: RotarySpec | None = None  # none: positions are learned
    sliding_window: int | None = Field(default=None, ge=1)  # a token sees this many, itself included
    full_attention_layers: int = Field(default=0, ge=0)  # the first of them see everything (Qwen2's max_window_layers)
    tied_head: bool = True  # the head's weights are the word embedding's

    weights: WeightFormat = "float32"  # of matrices in a device's memory; what the user chose, whatever `dtype` is

    @property
    def bytes_per_weight(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def matrix_bytes(self) -> float:
        """Of one weight of a matrix in a device's memory."""
        return _MATRIX_BYTES[self.weights]

    @property
    def word_bytes(self) -> int:
        """Of one weight of the word embedding there: it is looked up, and never quantised."""
        return 4 if self.weights == "float32" else 2

    @property
    def head_bytes(self) -> float:
        """Of one weight of the output head there."""
        return self.word_bytes if self.tied_head else self.matrix_bytes

    @property
    def group_size(self) -> int:
        """Query heads of one KV group."""
        return self.num_heads // self.num_kv_heads

    def q_width(self, heads: int) -> int:
        """Values of one row's queries for so many heads (whole KV groups)."""
        return heads * self.head_dim

    def kv_width(self, heads: int) -> int:
        """Values of one row's keys, or of its values, that belong to so many query heads."""
        return heads // self.group_size * self.head_dim

    def qkv_width(self, heads: int) -> int:
        return self.q_width(heads) + 2 * self.kv_width(heads)

    def window(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None: all before it."""
        return None if layer < self.full_attention_layers else self.sliding_window

    @property
    def has_separate_head(self) -> bool:
        return self.causal and not self.tied_head

    @model_validator(mode="after")
    def _whole_groups(self) -> ModelSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot be shared among {self.num_kv_heads} key and value heads")
        return self
