"""Division of checkpoints into chunks: completeness, stable names, the manifest, and the chunks of each rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save_file
from support.checkpoints import CONFIGS, as_stored, canonical_tensors, reassembled, stored_tensors, write_model
from support.chunks import refs_of
from support.plans import BERT_LARGE, make_plan

from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import all_chunks, chunks_for_rank, num_chunk_bytes, num_chunk_weights
from coordinator.models.checkpoint.families import read_spec
from coordinator.models.checkpoint.sharding import build_manifest, cached_manifest, chunk_bytes
from hearth.errors import BadCheckpoint
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, spans
from hearth.plan.model_spec import ModelSpec, RotarySpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import SEQUENCE, SHARDED, STRATEGIES, LayerMode
from hearth.wire.messages import ChunkRef

# Uneven sizes: the last MLP grain and the last vocabulary grain are short, and the heads are wider than the hidden size.
DECODER = ModelSpec(
    name="decoder", family="qwen3", num_layers=3, num_heads=12, num_kv_heads=4, head_dim=10, hidden_size=24,
    ffn_size=1000, vocab_size=5000, max_positions=64, type_vocab_size=0, norm_eps=1e-6, activation="silu",
    dtype="float32", causal=True, norm="rms", norm_place="pre", gated=True, qkv_bias=False, out_bias=False,
    mlp_bias=False, qk_norm=True, rotary=RotarySpec(), tied_head=False,
)  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("num_files", [1, 3])
def test_all_chunks_together_equal_the_model_bit_for_bit(family: str, num_files: int, tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, family, num_files=num_files))
    checkpoint = Checkpoint(tmp_path)
    found = reassembled(checkpoint, spec)
    expected = canonical_tensors(family)
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def test_chunk_names_depend_on_content_only(tmp_path: Path) -> None:
    refs = []
    for index, (prefix, num_files) in enumerate([("", 1), ("bert.", 3)]):
        directory = write_model(tmp_path / str(index), prefix=prefix, num_files=num_files)
        checkpoint = Checkpoint(directory)
        refs.append(build_manifest(checkpoint, read_spec(directory)))
    assert refs[0] == refs[1]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("bert", "c317d39de0c504dc6ab650d83de7c65fb4a000e61c3ddba50f17934f8274aa52"),
        ("distilbert", "c43f67b7b24c4de12e4ac0a5ee33ec5fd7ad4c0c5345adf9139f2b5028f51f40"),
        ("gpt2", "2824df30d75145c336e47c3ea8675e9a8e0255a203a39bc27d3fda194717df6c"),
        ("opt", "8142c336b163580a7bb43e77340acedd3fc846fcefadaa77a41e51d914d3f662"),
        ("llama", "b7a68441a1502200e863a8602e062b4330dba90464a167b512ae00edf27b9396"),
        ("mistral", "644af68b69cc9ddcca7abd0822a11e7bc7e3af8b67cac046c5f368cbcfa7bd45"),
        ("qwen2", "81de61cb995ff67bb634590961d19e7db03fe210f0d2a7c3289633349d0858ef"),
        ("qwen3", "f6ff3e7816b823f3c40d19422296e08cbcf6f7f3e643f6dc711caa00517aac95"),
    ],
)
def test_chunk_names_are_stable(family: str, expected: str, tmp_path: Path) -> None:
    """Devices store chunks of earlier versions: a change that renames chunks must raise _FORMAT_VERSION."""
    directory = write_model(tmp_path, family)
    ours = {
        name: np.arange(array.size, dtype=np.float32).reshape(array.shape) + index
        for index, (name, array) in enumerate(canonical_tensors(family).items())
    }
    save_file(as_stored(family, ours), directory / "model.safetensors")
    checkpoint = Checkpoint(directory)
    refs = build_manifest(checkpoint, read_spec(directory))
    assert hashlib.sha256("".join(ref.hash for ref in refs).encode()).hexdigest() == expected


def test_half_precision_is_sliced_as_raw_bytes(tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, dtype=np.float16))
    checkpoint = Checkpoint(tmp_path)
    array = load(chunk_bytes(checkpoint, spec, "mlp", 1, 0))["down.weight"]
    assert array.dtype == np.float16
    assert np.array_equal(
        array, stored_tensors("bert", dtype=np.float16)["encoder.layer.1.output.dense.weight"][:, :64]
    )


def test_bfloat16_is_sliced_without_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    from safetensors.torch import load as load_torch
    from safetensors.torch import save_file

    write_model(tmp_path, "gpt2")
    tensors = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in stored_tensors("gpt2").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    words = load_torch(chunk_bytes(checkpoint, spec, "vocabulary", 0, 2))
    attention = load_torch(chunk_bytes(checkpoint, spec, "qkv", 1, 2))
    assert torch.equal(words["word.weight"], tensors["wte.weight"][2048:])
    assert torch.equal(attention["v.weight"], tensors["h.1.attn.c_attn.weight"][:, 64:].T)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_mixed_dtypes_are_named(family: str, tmp_path: Path) -> None:
    tensors = stored_tensors(family, dtype=np.float16)
    name = next(name for name in tensors if "norm" in name.lower())
    save_file({**tensors, name: tensors[name].astype(np.float32)}, write_model(tmp_path, family) / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match=f"{name} holds float32, others float16"):
        build_manifest(checkpoint, read_spec(tmp_path))


def test_manifest_is_cached_until_a_file_changes(tmp_path: Path) -> None:
    directory, cache = write_model(tmp_path / "model", "llama"), tmp_path / "cache"
    checkpoint = Checkpoint(directory)
    spec = read_spec(directory)
    first = cached_manifest(checkpoint, spec, cache)
    (file,) = cache.iterdir()
    assert cached_manifest(checkpoint, spec, cache) == first
    file.write_text("damaged")
    assert cached_manifest(checkpoint, spec, cache) == first


def owner(shares: Sequence[int], item: int) -> int:
    return next(rank for rank, span in enumerate(spans(shares)) if span.start <= item < span.stop)


def needed_by(plan: TransformerPlan, ref: ChunkRef) -> set[int]:
    """The ranks that need a chunk: an independent formulation."""
    spec, body, mode = plan.model, plan.body, plan.body.mode(ref.layer)
    ranks = range(plan.num_ranks)
    with_rows = {rank for rank in ranks if body.strategy == "megatron-tp" or body.row_weights[rank] > 0}
    if ref.kind in ("vocabulary", "head"):
        return {owner(body.vocabulary, ref.grain * VOCABULARY_GRAIN)}
    if ref.kind in ("qkv", "out", "mlp"):
        if getattr(mode, ref.kind) == "replicated":
            return with_rows
        shares, grain = (body.columns, COLUMN_GRAIN) if ref.kind == "mlp" else (body.heads, spec.group_size)
        return {owner(shares, ref.grain * grain)}
    if not spec.causal:
        return with_rows
    return with_rows | {rank for rank in ranks if body.heads[rank] or body.columns[rank] or body.vocabulary[rank]}


ranks = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6).filter(
    lambda each: all(sum(weights) > 0 for weights in zip(*each, strict=True))
)
placements = st.sampled_from(["sharded", "replicated"])
modes = st.sampled_from([SHARDED, SEQUENCE]) | st.builds(LayerMode, qkv=placements, out=placements, mlp=placements)


@given(
    st.sampled_from([BERT_LARGE, DECODER]),
    ranks,
    st.sampled_from([strategy for strategy in STRATEGIES if strategy not in ("local", "pipeline")]),
    st.none() | st.tuples(modes, modes, modes),
)
def test_ranks_hold_exactly_the_chunks_they_need(
    spec: ModelSpec, ranks: list[tuple[int, int]], strategy: str, some: tuple[LayerMode, ...] | None
) -> None:
    weights, row_weights = zip(*ranks, strict=True)
    by_layer = [some[layer % 3] for layer in range(spec.num_layers)] if some and strategy == "hmp" else []
    if spec.causal and (by_layer or strategy == "sp"):
        row_weights = tuple(max(pair) for pair in ranks)  # ranks that decode with a replicated part must hold it
    plan = make_plan(spec, strategy, weights, row_weights, modes=by_layer)  # type: ignore[arg-type]
    refs = refs_of(spec)
    held = [set(chunks_for_rank(refs, plan, rank)) for rank in range(len(ranks))]
    for ref in refs:
        assert {rank for rank, chunks in enumerate(held) if ref in chunks} == needed_by(plan, ref), ref


def test_decoder_head_is_separate_or_tied() -> None:
    kinds = Counter(kind for kind, _, _ in all_chunks(DECODER))
    assert kinds["head"] == kinds["vocabulary"] == 5
    tied = DECODER.model_copy(update={"tied_head": True})
    assert "head" not in {kind for kind, _, _ in all_chunks(tied)}


@pytest.mark.parametrize("family", CONFIGS)
def test_planners_know_the_size_of_each_chunk(family: str, tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, family))
    checkpoint = Checkpoint(tmp_path)
    for ref in build_manifest(checkpoint, spec):
        content = chunk_bytes(checkpoint, spec, ref.kind, ref.layer, ref.grain)
        assert num_chunk_bytes(spec, ref.kind, ref.grain) == ref.num_bytes == len(content)
        assert num_chunk_weights(spec, ref.kind, ref.grain) == sum(array.size for array in load(content).values())
