"""Rotary position embeddings (RoFormer, arXiv 2104.09864) and the scaling variants that published configs name. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, Field, ValidationError

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
