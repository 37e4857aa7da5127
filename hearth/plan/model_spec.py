"""The shape of a transformer, as needed for sharding, planning and computing, with its rotary position embeddings. Pure.

Rotary position embeddings (RoFormer, arXiv 2104.09864) have the scaling variants that published configs name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from hearth.errors import UnsupportedArchitecture
from hearth.validation import first_error

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


class RotarySpec(BaseModel, frozen=True, allow_inf_nan=False, populate_by_name=True):
    """RoPE settings of a Hugging Face config (`rope_parameters`, or `rope_theta` and `rope_scaling`).

    Validated under Hugging Face's field names or these.
    """

    kind: RopeKind = "default"
    theta: float = Field(default=10_000.0, gt=0, validation_alias="rope_theta")
    # The fraction of a head's dimensions that is rotated.
    rotated: float = Field(default=1.0, gt=0, le=1, validation_alias="partial_rotary_factor")
    factor: float = Field(default=1.0, gt=0)  # by which the context was extended
    # Context length of the original training; 0: max_positions.
    original_positions: int = Field(default=0, ge=0, validation_alias="original_max_position_embeddings")
    low_frequency_factor: float = Field(default=1.0, gt=0, validation_alias="low_freq_factor")  # llama3
    high_frequency_factor: float = Field(default=4.0, gt=0, validation_alias="high_freq_factor")
    beta_fast: float = Field(default=32.0, gt=0)  # yarn
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)  # yarn, longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = Field(default=(), max_length=4096, validation_alias="short_factor")  # longrope
    long_factors: tuple[float, ...] = Field(default=(), max_length=4096, validation_alias="long_factor")


class Frequencies(NamedTuple):
    """Rotary frequencies. `inverse` is in radians per position, one for each pair of dimensions.

    Cosines and sines are multiplied by `scale`.
    """

    inverse: tuple[float, ...]
    scale: float


# ---- reading ---------------------------------------------------------------------------------------------------------

# Config fields that each kind requires.
_REQUIRED_FIELDS: Mapping[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


def read_rotary(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RotarySpec:
    """Read the RoPE settings of a config, in the format of transformers 4 or 5.

    Raises ValueError for invalid settings, UnsupportedArchitecture for an unknown `rope_type`.
    """
    settings = _rope_settings(config)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in get_args(RopeKind):
        raise UnsupportedArchitecture(
            architecture=f"{config.get('model_type')} with rope_type={kind}", supported=", ".join(get_args(RopeKind))
        )
    missing = [field for field in _REQUIRED_FIELDS[kind] if field not in settings]
    if missing:
        raise ValueError(f"rope_type {kind}: the field {missing[0]} is missing")
    try:
        spec = RotarySpec.model_validate({**settings, "kind": kind})
    except ValidationError as error:
        raise ValueError(first_error(error)) from None
    if "factor" not in settings and spec.original_positions:
        spec = spec.model_copy(update={"factor": max_positions / spec.original_positions})
    if rotary_dim(spec, head_dim) % 2:
        raise ValueError(f"{rotary_dim(spec, head_dim)} dimensions of a head are rotated, which must be an even number")
    if kind == "longrope" and not len(spec.short_factors) == len(spec.long_factors) == rotary_dim(spec, head_dim) // 2:
        raise ValueError(f"short_factor and long_factor need {rotary_dim(spec, head_dim) // 2} entries each")
    try:
        for length in (1, max_positions + 1):
            rope_frequencies(spec, head_dim, max_positions, length)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"rope_type {kind}: its frequencies cannot be computed ({error})") from None
    return spec


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, or `rope_scaling` merged with the top-level fields of older configs; null counts as absent."""
    rope_parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope_parameters, dict):
        raise ValueError(f"rope_parameters: {rope_parameters} is not a JSON object")
    nested = [name for name, value in rope_parameters.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedArchitecture(
            architecture=f"{config.get('model_type')} with separate rope_parameters for {', '.join(nested)}",
            supported="the same rotary positions in every layer",
        )
    top_level = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    inherited = {name: config.get(name) for name in ("original_max_position_embeddings",)}
    return {
        name: value
        for settings in (top_level, rope_parameters, inherited)
        for name, value in settings.items()
        if value is not None
    }


# ---- computing -------------------------------------------------------------------------------------------------------


def rotary_dim(spec: RotarySpec, head_dim: int) -> int:
    """Number of dimensions of a head that are rotated."""
    return int(head_dim * spec.rotated)


def rope_frequencies(spec: RotarySpec, head_dim: int, max_positions: int, length: int) -> Frequencies:
    """Rotary frequencies for a sequence of `length` tokens; only `dynamic` and `longrope` depend on the length.

    Sources of the formulas: linear arXiv 2306.15595; dynamic NTK and YaRN arXiv 2309.00071; longrope arXiv 2402.13753;
    llama3 the Llama 3.1 release.
    """
    dim = rotary_dim(spec, head_dim)
    base = _base_frequencies(spec.theta, dim)
    original = spec.original_positions or max_positions
    if spec.kind == "linear":
        return Frequencies(tuple(f / spec.factor for f in base), 1.0)
    if spec.kind == "dynamic":
        length = max(length, max_positions)
        theta = spec.theta * (spec.factor * length / max_positions - (spec.factor - 1)) ** (dim / (dim - 2))
        return Frequencies(_base_frequencies(theta, dim), 1.0)
    if spec.kind == "llama3":
        return Frequencies(tuple(_llama3(spec, f, original) for f in base), 1.0)
    if spec.kind == "yarn":
        return _yarn(spec, base, dim, original)
    if spec.kind == "longrope":
        factors = spec.long_factors if length > original else spec.short_factors
        scale = spec.attention_factor
        if scale is None:
            scale = 1.0 if spec.factor <= 1 else math.sqrt(1 + math.log(spec.factor) / math.log(original))
        return Frequencies(tuple(f / factor for f, factor in zip(base, factors, strict=True)), scale)
    return Frequencies(base, 1.0)


def _base_frequencies(theta: float, dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-i / dim) for i in range(0, dim, 2))


def _llama3(spec: RotarySpec, frequency: float, original: int) -> float:
    """Llama 3's scaling: high frequencies are kept, low ones divided by `factor`, those between interpolated."""
    wavelength = 2 * math.pi / frequency
    if wavelength > original / spec.low_frequency_factor:
        return frequency / spec.factor
    if wavelength < original / spec.high_frequency_factor:
        return frequency
    span = spec.high_frequency_factor - spec.low_frequency_factor
    smooth = (original / wavelength - spec.low_frequency_factor) / span
    return (1 - smooth) * frequency / spec.factor + smooth * frequency


def _yarn(spec: RotarySpec, base: tuple[float, ...], dim: int, original: int) -> Frequencies:
    """YaRN's scaling: high-frequency dimensions are kept, low-frequency ones interpolated, with a linear ramp between."""

    def correction_dim(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = correction_dim(spec.beta_fast), correction_dim(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    mixed = []
    for i, frequency in enumerate(base):
        # 1: the original frequency, 0: fully interpolated.
        keep_fraction = 1 - min(max((i - low) / (high - low), 0.0), 1.0)
        mixed.append(frequency / spec.factor * (1 - keep_fraction) + frequency * keep_fraction)
    return Frequencies(tuple(mixed), _yarn_scale(spec))


def _yarn_scale(spec: RotarySpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


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
