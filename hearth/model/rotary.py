"""Rotary position embeddings (RoFormer, arXiv 2104.09864) and the scaling variants that published configs name. Pure."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


class RotarySpec(BaseModel):
    """`rope_parameters` (or `rope_theta` and `rope_scaling`) of a Hugging Face config, under our names."""

    model_config = ConfigDict(frozen=True)

    kind: Kind = "default"
    theta: float = Field(default=10_000.0, gt=0)
    rotated: float = Field(default=1.0, gt=0, le=1)  # share of a head's dimensions that turn (partial_rotary_factor)
    factor: float = Field(default=1.0, gt=0)
    original_positions: int = Field(default=0, ge=0)  # that the model was first trained for; 0: max_positions
    low_frequency_factor: float = Field(default=1.0, gt=0)  # llama3
    high_frequency_factor: float = Field(default=4.0, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)  # yarn
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)  # yarn, longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = Field(default=(), max_length=4096)  # longrope
    long_factors: tuple[float, ...] = Field(default=(), max_length=4096)


class Frequencies(NamedTuple):
    """`inverse` in radians per position, one for each pair of dimensions; cosines and sines are scaled by `scale`."""

    inverse: tuple[float, ...]
    scale: float


def rotary_dim(spec: RotarySpec, head_dim: int) -> int:
    return int(head_dim * spec.rotated)


def frequencies(spec: RotarySpec, head_dim: int, max_positions: int, length: int) -> Frequencies:
    """Of a sequence of `length` tokens; only `dynamic` and `longrope` depend on it.

    Formulas: linear arXiv 2306.15595; dynamic NTK and YaRN arXiv 2309.00071; longrope arXiv 2402.13753; llama3 the
    Llama 3.1 release.
    """
    dim = rotary_dim(spec, head_dim)
    plain = _plain(spec.theta, dim)
    original = spec.original_positions or max_positions
    if spec.kind == "linear":
        return Frequencies(tuple(f / spec.factor for f in plain), 1.0)
    if spec.kind == "dynamic":
        length = max(length, max_positions)
        theta = spec.theta * (spec.factor * length / max_positions - (spec.factor - 1)) ** (dim / (dim - 2))
        return Frequencies(_plain(theta, dim), 1.0)
    if spec.kind == "llama3":
        return Frequencies(tuple(_llama3(spec, f, original) for f in plain), 1.0)
    if spec.kind == "yarn":
        return _yarn(spec, plain, dim, original, max_positions)
    if spec.kind == "longrope":
        factors = spec.long_factors if length > original else spec.short_factors
        stretch = max_positions / original if spec.original_positions else spec.factor
        scale = spec.attention_factor
        if scale is None:
            scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
        return Frequencies(tuple(f / factor for f, factor in zip(plain, factors, strict=True)), scale)
    return Frequencies(plain, 1.0)


def _plain(theta: float, dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-i / dim) for i in range(0, dim, 2))


def _llama3(spec: RotarySpec, frequency: float, original: int) -> float:
    """High frequencies stay, low ones are divided, those between are mixed."""
    wavelength = 2 * math.pi / frequency
    if wavelength > original / spec.low_frequency_factor:
        return frequency / spec.factor
    if wavelength < original / spec.high_frequency_factor:
        return frequency
    span = spec.high_frequency_factor - spec.low_frequency_factor
    smooth = (original / wavelength - spec.low_frequency_factor) / span
    return (1 - smooth) * frequency / spec.factor + smooth * frequency


def _yarn(spec: RotarySpec, plain: tuple[float, ...], dim: int, original: int, max_positions: int) -> Frequencies:
    factor = max_positions / original if spec.original_positions and spec.factor == 1.0 else spec.factor

    def turning_dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = turning_dimension(spec.beta_fast), turning_dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    mixed = []
    for i, frequency in enumerate(plain):
        kept = 1 - min(max((i - low) / (high - low), 0.0), 1.0)  # 1: extrapolated as it is, 0: interpolated
        mixed.append(frequency / factor * (1 - kept) + frequency * kept)
    return Frequencies(tuple(mixed), _yarn_scale(spec, factor))


def _yarn_scale(spec: RotarySpec, factor: float) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)
