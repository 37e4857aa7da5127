"""RoPE frequencies against transformers, and parsing of a config's parameters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import UnsupportedArchitecture
from hearth.plan.model_spec import Frequencies, RotarySpec, read_rotary, rope_frequencies

SCALED = ["linear", "dynamic", "llama3", "yarn", "longrope"]


def require_transformers() -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    pytest.importorskip("transformers", minversion="5", reason="earlier versions have no `rope_parameters`")


def transformers_frequencies(settings: dict[str, Any], head_dim: int, max_positions: int, length: int) -> Frequencies:
    """RoPE frequencies of transformers for these `rope_parameters`."""
    require_transformers()
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=dict(settings),
    )
    if settings["rope_type"] == "default":
        inverse, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, seq_len=length)
    return Frequencies(tuple(inverse.tolist()), float(scale))


def assert_same(found: Frequencies, expected: Frequencies) -> None:
    # transformers computes in float32, and the ramps of yarn and llama3 amplify its rounding.
    assert found.inverse == pytest.approx(expected.inverse, rel=3e-4)
    assert found.scale == pytest.approx(expected.scale, rel=1e-6)


@st.composite
def rope_parameters(draw: st.DrawFn, kind: str) -> tuple[dict[str, Any], int, int]:
    """Draw `rope_parameters` of this kind, head_dim and max_positions."""
    head_dim = 4 * draw(st.integers(2, 32))
    original = draw(st.integers(64, 8192))
    max_positions = draw(st.integers(original, 4 * original))
    share = draw(st.sampled_from([1.0, 0.5])) if kind != "default" else 1.0
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.floats(1e3, 1e6))}
    if share != 1.0:
        settings["partial_rotary_factor"] = share
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        settings["factor"] = draw(st.floats(1, 32))
    if kind in ("llama3", "yarn", "longrope"):
        settings["original_max_position_embeddings"] = original
    if kind == "llama3":
        settings["low_freq_factor"] = draw(st.floats(0.5, 2))
        settings["high_freq_factor"] = draw(st.floats(3, 8))
    if kind in ("yarn", "longrope") and draw(st.booleans()):
        settings["attention_factor"] = draw(st.floats(0.5, 2))
    if kind == "yarn":
        settings["factor"] = draw(st.none() | st.floats(1, 32))
        optional = {
            "beta_fast": st.floats(24, 64), "beta_slow": st.floats(0.5, 3), "truncate": st.booleans(),
            "mscale": st.floats(0.5, 2), "mscale_all_dim": st.floats(0.5, 2),
        }  # fmt: skip
        settings.update(draw(st.fixed_dictionaries({}, optional=optional)))
    if kind == "longrope":
        pairs = int(head_dim * share) // 2
        factors = st.lists(st.floats(1, 64), min_size=pairs, max_size=pairs)
        settings["short_factor"], settings["long_factor"] = draw(factors), draw(factors)
        if draw(st.booleans()):
            settings["factor"] = draw(st.floats(1, 32))
    return settings, head_dim, max_positions


@pytest.mark.parametrize("kind", ["default", *SCALED])
@given(st.data(), st.integers(1, 40_000))
def test_frequencies_equal_transformers(kind: str, data: st.DataObject, length: int) -> None:
    settings, head_dim, max_positions = data.draw(rope_parameters(kind))
    spec = read_rotary({"rope_parameters": settings}, head_dim, max_positions)
    found = rope_frequencies(spec, head_dim, max_positions, length)
    assert_same(found, transformers_frequencies(settings, head_dim, max_positions, length))


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }}, 128),  # Llama 3.1
        ({"rope_theta": 1e6, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        }}, 128),  # Qwen 2.5, with the long-context settings of its model card
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, 64),
        ({"rope_theta": 1e6, "rope_scaling": None}, 64),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 64),
        ({}, 64),
    ],
)  # fmt: skip
def test_legacy_config_formats_equal_transformers(config: dict[str, Any], head_dim: int) -> None:
    spec = read_rotary(config, head_dim, 131072)
    require_transformers()
    from transformers import LlamaConfig

    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": 131072}
    known = LlamaConfig(**sizes, **{name: value for name, value in config.items() if value is not None})
    newer = {"rope_parameters": known.rope_parameters}
    assert (
        read_rotary(newer, head_dim, 131072).model_copy(update={"original_positions": spec.original_positions}) == spec
    )
    for length in (1, 131073):
        assert_same(
            rope_frequencies(spec, head_dim, 131072, length),
            transformers_frequencies(known.rope_parameters, head_dim, 131072, length),
        )


def test_settings_next_to_rope_scaling_are_read() -> None:
    spec = read_rotary(
        {"rope_theta": 7e4, "original_max_position_embeddings": 32, "rope_scaling": {
            "type": "longrope", "short_factor": [1, 1], "long_factor": [2, 4],
        }}, 4, 128,
    )  # fmt: skip
    assert spec == RotarySpec(
        kind="longrope", theta=7e4, factor=4.0, original_positions=32, short_factors=(1, 1), long_factors=(2, 4)
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor is missing"),
        ({"rope_type": "linear", "factor": -1}, "factor: Input should be greater than 0"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor: Input should be a finite number"),
        ({"rope_type": "default", "rope_theta": "many"}, "rope_theta: Input should be a valid number"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}, "need 4 entries each"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [0.0] * 4}, "cannot be computed"),
        ({"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}, "cannot be computed"),
        ({"rope_type": "default", "partial_rotary_factor": 0.4}, "3 dimensions of a head"),
        ("default", "not a JSON object"),
    ],
)  # fmt: skip
def test_invalid_parameters_are_named(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_rotary({"rope_parameters": settings}, 8, 64)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rope_type": "proportional"}, "llama with rope_type=proportional"),
        ({"type": "su"}, "rope_type=su.*Supported: default, linear, dynamic, llama3, yarn, longrope"),
        ({"full_attention": {"rope_type": "default"}}, "rope_parameters for full_attention"),
    ],
)
def test_unknown_types_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=match):
        read_rotary({"model_type": "llama", "rope_parameters": settings}, 8, 64)
