from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load
from support.checkpoints import tensors_of, write_model
from support.plans import BERT_LARGE, make_plan

from hearth.model.checkpoint import Checkpoint
from hearth.model.families import FAMILIES, TensorNames, read_spec
from hearth.model.sharding import (
    all_chunks,
    cached_manifest,
    chunk_bytes,
    chunk_weights,
    chunks_for_rank,
    manifest,
)
from hearth.plan import STRATEGIES


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize("num_files", [1, 3])
def test_all_chunks_together_are_the_model_bit_for_bit(family: str, num_files: int, tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, family, num_files=num_files))
    expected = tensors_of(family)
    parts: dict[str, list[np.ndarray]] = {}
    with Checkpoint(tmp_path) as checkpoint:
        names = TensorNames(FAMILIES[family], checkpoint)
        for kind, layer, grain in all_chunks(spec):
            for ours, array in load(chunk_bytes(checkpoint, spec, kind, layer, grain)).items():
                in_layer = kind in ("qkv", "out", "mlp", "connective")
                theirs = names.layer(layer, ours) if in_layer else names.embedding(ours)
                parts.setdefault(theirs, []).append(array)
    assert set(parts) == set(expected)
    for name, array in expected.items():
        by_column = name.endswith((".attention.output.dense.weight", "out_lin.weight", "lin2.weight")) or (
            name.endswith("output.dense.weight")
        )
        assert np.array_equal(np.concatenate(parts[name], axis=1 if by_column else 0), array), name


def test_chunks_are_named_by_their_content_alone(tmp_path: Path) -> None:
    refs = []
    for index, (prefix, num_files) in enumerate([("", 1), ("bert.", 3)]):
        directory = write_model(tmp_path / str(index), prefix=prefix, num_files=num_files)
        with Checkpoint(directory) as checkpoint:
            refs.append(manifest(checkpoint, read_spec(directory)))
    assert refs[0] == refs[1]


def test_half_precision_is_sliced_as_raw_bytes(tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, dtype=np.float16))
    with Checkpoint(tmp_path) as checkpoint:
        array = load(chunk_bytes(checkpoint, spec, "mlp", 1, 0))["down.weight"]
    assert array.dtype == np.float16
    assert np.array_equal(array, tensors_of("bert", dtype=np.float16)["encoder.layer.1.output.dense.weight"][:, :64])


def test_bfloat16_is_sliced_without_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    from safetensors.torch import load as load_torch
    from safetensors.torch import save_file

    write_model(tmp_path)
    tensors = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in tensors_of("bert").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        chunk = load_torch(chunk_bytes(checkpoint, spec, "vocabulary", 0, 2))
    assert torch.equal(chunk["word.weight"], tensors["embeddings.word_embeddings.weight"][2048:])


def test_the_manifest_is_cached_until_a_file_changes(tmp_path: Path) -> None:
    directory, cache = write_model(tmp_path / "model"), tmp_path / "cache"
    with Checkpoint(directory) as checkpoint:
        spec = read_spec(directory)
        first = cached_manifest(checkpoint, spec, cache)
        (file,) = cache.iterdir()
        assert cached_manifest(checkpoint, spec, cache) == first
        file.write_text("damaged")
        assert cached_manifest(checkpoint, spec, cache) == first


splits = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(lambda w: sum(w) > 0)


@given(splits, st.sampled_from([s for s in STRATEGIES if s not in ("local", "sp")]))
def test_the_ranks_of_any_plan_hold_every_shard_exactly_once(weights: list[int], strategy: str) -> None:
    from hearth.messages import ChunkRef

    refs = tuple(
        ChunkRef(hash=f"{index:064x}", num_bytes=1, kind=kind, layer=layer, grain=grain)
        for index, (kind, layer, grain) in enumerate(all_chunks(BERT_LARGE))
    )
    plan = make_plan(BERT_LARGE, strategy, weights)  # type: ignore[arg-type]
    held = Counter(ref.hash for rank in range(len(weights)) for ref in chunks_for_rank(refs, plan, rank))
    replicas = len(weights) if strategy == "megatron-tp" else sum(weight > 0 for weight in weights)
    for ref in refs:
        assert held[ref.hash] == (replicas if ref.kind in ("connective", "embedding") else 1), ref


def test_under_sp_every_rank_holds_all_layers_and_its_own_vocabulary() -> None:
    from hearth.messages import ChunkRef

    refs = tuple(
        ChunkRef(hash=f"{index:064x}", num_bytes=1, kind=kind, layer=layer, grain=grain)
        for index, (kind, layer, grain) in enumerate(all_chunks(BERT_LARGE))
    )
    plan = make_plan(BERT_LARGE, "sp", (1, 1))
    first, second = (chunks_for_rank(refs, plan, rank) for rank in range(2))
    layers = {ref for ref in refs if ref.kind in ("qkv", "out", "mlp", "connective")}
    assert layers <= set(first)
    assert layers <= set(second)
    assert not {ref for ref in first if ref.kind == "vocabulary"} & {ref for ref in second if ref.kind == "vocabulary"}


def test_weights_counted_from_the_spec_are_those_in_the_chunks(tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path))
    with Checkpoint(tmp_path) as checkpoint:
        for kind, layer, grain in all_chunks(spec):
            arrays = load(chunk_bytes(checkpoint, spec, kind, layer, grain)).values()
            assert chunk_weights(spec, kind, grain) == sum(array.size for array in arrays)
