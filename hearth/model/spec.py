"""What a Transformer is, as far as sharding and planning must know it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class ModelSpec(BaseModel):
    """The shape of one model, read from its Hugging Face config (see `hearth.model.families`)."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(max_length=256)
    family: Literal["bert", "distilbert"]
    num_layers: int = Field(ge=1, le=1024)
    num_heads: int = Field(ge=1, le=1024)
    num_kv_heads: int = Field(ge=1, le=1024)
    head_dim: int = Field(ge=1, le=4096)
    hidden_size: int = Field(ge=1, le=1 << 20)
    ffn_size: int = Field(ge=1, le=1 << 22)
    vocab_size: int = Field(ge=1, le=1 << 24)
    max_positions: int = Field(ge=1, le=1 << 24)
    type_vocab_size: int = Field(ge=0, le=1024)  # 0: the family has no token types (DistilBERT)
    norm_eps: float = Field(gt=0)
    activation: Literal["gelu", "gelu_new", "relu"]
    dtype: Literal["float32", "float16", "bfloat16"]  # of the stored weights

    @property
    def bytes_per_weight(self) -> int:
        return DTYPE_BYTES[self.dtype]
