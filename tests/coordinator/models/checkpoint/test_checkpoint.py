"""Reading of checkpoints: tensors, configs, dtypes, and errors of damaged files."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.checkpoints import CONFIGS, HEADS, stored_tensors, write_model

from coordinator.models.checkpoint import checkpoint as checkpoint_module
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.families import read_pooling, read_spec
from coordinator.models.checkpoint.sharding import build_manifest
from hearth.errors import BadCheckpoint, UnsupportedArchitecture


@pytest.mark.parametrize("num_files", [1, 3])
def test_tensors_are_read_from_one_or_several_files(num_files: int, tmp_path: Path) -> None:
    expected = stored_tensors("bert")
    checkpoint = Checkpoint(write_model(tmp_path, num_files=num_files))
    assert checkpoint.names() == sorted(expected)
    for name, array in expected.items():
        assert np.array_equal(checkpoint.read(name, (slice(None),) * array.ndim), array)


@pytest.mark.parametrize("most", [64 << 20, 0], ids=["tensor that is kept", "tensor too large to be kept"])
def test_memory_for_cutting_a_checkpoint_is_bounded(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_MAX_KEPT_BYTES", most)
    values = np.arange(3000 * 2000, dtype=np.float32).reshape(3000, 2000)  # 23 MiB
    save_file({"first": np.ones(3, np.float32), "w": values}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for part in (np.s_[:, 64:128], np.s_[1000:1900, :], np.s_[7:7, :], np.s_[1:2999, 1999:]):
        tracemalloc.start()
        copy = checkpoint.read("w", part)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert copy.flags.c_contiguous
        assert np.array_equal(copy, values[part])
        assert peak < copy.nbytes + (5 << 20) + (values.nbytes if most else 0)


def test_file_truncated_during_reading_is_reported(tmp_path: Path) -> None:
    save_file({"w": np.ones((5000, 100), np.float32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 1 << 20)
    for part in (np.s_[4000:, :], np.s_[:, 3:5]):
        with pytest.raises(BadCheckpoint, match="cut short while it was read"):
            checkpoint.read("w", part)


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("bert", ""), ("bert", "bert."), ("distilbert", ""), ("distilbert", "distilbert."), ("gpt2", ""),
        ("gpt2", "transformer."), ("opt", ""), ("opt", "model."), ("llama", ""), ("llama", "model."),
        ("mistral", "model."), ("qwen2", "model."), ("qwen3", "model."),
    ],
)  # fmt: skip
def test_specs_are_read_with_any_task_head_prefix(family: str, prefix: str, tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path / "my-model", family, prefix))
    assert (spec.name, spec.family, spec.num_layers) == ("my-model", family, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == HEADS[family]
    assert (spec.ffn_size, spec.vocab_size, spec.dtype) == (130, 2500, "float32")
    assert spec.type_vocab_size == (2 if family == "bert" else 0)


def test_dtype_comes_from_the_file_not_the_config(tmp_path: Path) -> None:
    assert read_spec(write_model(tmp_path, dtype=np.float16)).dtype == "float16"


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = {**CONFIGS["bert"], **changes}
        (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return change


@pytest.mark.parametrize(
    ("harm", "error", "match"),
    [
        (lambda d: (d / "config.json").unlink(), BadCheckpoint, "config.json.*No such file"),
        (lambda d: (d / "config.json").write_text("{"), BadCheckpoint, "is not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), BadCheckpoint, "JSON object"),
        (change_config(hidden_size=...), BadCheckpoint, "hidden_size is missing"),
        (change_config(num_attention_heads=5), BadCheckpoint, "cannot be split among 5 heads"),
        (change_config(num_attention_heads="x"), BadCheckpoint, "num_attention_heads: x is not a whole number"),
        (change_config(vocab_size=-1), BadCheckpoint, "vocab_size"),
        (change_config(model_type="resnet"), UnsupportedArchitecture, "'resnet'.*Supported: bert, distilbert"),
        (change_config(hidden_act="tanh"), UnsupportedArchitecture, "tanh"),
        (change_config(position_embedding_type="relative_key"), UnsupportedArchitecture, "relative_key"),
        (change_config(is_decoder=True), UnsupportedArchitecture, "is_decoder"),
        (lambda d: (d / "model.safetensors").unlink(), BadCheckpoint, "no model.safetensors"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), BadCheckpoint, r"pytorch_model.bin"),
    ],
)  # fmt: skip
def test_invalid_model_directories_are_described(
    harm: Callable[[Path], None], error: type[Exception], match: str, tmp_path: Path
) -> None:
    write_model(tmp_path)
    harm(tmp_path)
    with pytest.raises(error, match=match):
        read_spec(tmp_path)


def rewrite_header(path: Path, change: Callable[[dict], None]) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


FIRST = "embeddings.LayerNorm.bias"


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-5]), "cut short"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "appended"),
        (lambda p: p.write_bytes(b"abc"), "too short"),
        (lambda p: p.write_bytes(b""), "too short"),
        (lambda p: p.write_bytes((1 << 60).to_bytes(8, "little") + bytes(50)), "cut short, or is not a safetensors"),
        (lambda p: p.write_bytes((4).to_bytes(8, "little") + b"nope"), "header cannot be read"),
        (lambda p: rewrite_header(p, lambda h: h[FIRST].update(shape=[7])), f"{FIRST} has"),
        (lambda p: rewrite_header(p, lambda h: h[FIRST].update(shape=[-1])), FIRST),
        (lambda p: rewrite_header(p, lambda h: h[FIRST].update(dtype="F99")), FIRST),
        (lambda p: rewrite_header(p, lambda h: h[FIRST].update(data_offsets=[8, 104])), "overlap or leave gaps"),
    ],
)
def test_malformed_files_are_named(harm: Callable[[Path], None], match: str, tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    harm(path)
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(str(path))} .*{match}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("num_files", [1, 2])
def test_truncated_decoder_file_is_named(num_files: int, tmp_path: Path) -> None:
    write_model(tmp_path, "llama", "model.", num_files=num_files)
    path = max(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(path.name)}.*cut short"):
        read_spec(tmp_path)


def test_tensor_of_integers_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path)
    integers = {**stored_tensors("bert"), "encoder.layer.1.output.dense.weight": np.zeros((24, 130), np.int32)}
    save_file(integers, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match="not floats"):
        build_manifest(checkpoint, read_spec(tmp_path))


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("bert", "encoder.layer.1.output.dense.weight", [24, 130]),
        ("gpt2", "h.1.attn.c_attn.weight", [24, 72]),
        ("gpt2", "h.0.attn.c_attn.bias", [72]),
        ("gpt2", "h.1.mlp.c_proj.weight", [130, 24]),
        ("opt", "decoder.embed_positions.weight", [18, 24]),
        ("llama", "lm_head.weight", [2500, 24]),
        ("llama", "layers.1.self_attn.k_proj.weight", [12, 24]),
        ("qwen2", "layers.0.self_attn.v_proj.bias", [12]),
        ("qwen3", "layers.1.self_attn.o_proj.weight", [24, 40]),
        ("qwen3", "layers.1.self_attn.q_norm.weight", [10]),
        ("mistral", "norm.weight", [24]),
    ],
)
def test_missing_or_misshapen_tensor_has_its_stored_name(
    family: str, name: str, shape: list[int], tmp_path: Path
) -> None:
    tensors = stored_tensors(family)
    assert list(tensors[name].shape) == shape
    spec = read_spec(write_model(tmp_path, family))
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match=f"{re.escape(name)} is missing"):
        build_manifest(checkpoint, spec)
    save_file({**tensors, name: np.zeros((3, 4), np.float32)}, tmp_path / "model.safetensors")
    expected = re.escape(f"{name} has the shape [3, 4]; config.json implies {shape}")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match=expected):
        build_manifest(checkpoint, spec)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "index cannot be read"),
        ('{"weight_map": {"a": "../../secret.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "no such file"),
        ('{"weight_map": {"absent": "model-00001-of-00002.safetensors"}}', "lacks the tensor absent"),
    ],
)
def test_invalid_indexes_are_named(index: str, match: str, tmp_path: Path) -> None:
    write_model(tmp_path, num_files=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadCheckpoint, match=match):
        Checkpoint(tmp_path)


def test_only_mean_pooling_is_supported(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(UnsupportedArchitecture, match="cls_token"):
        read_pooling(tmp_path)
