"""Segments of any cut, each in its own onnxruntime session, compute the same as one session of the whole file."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from packaging.version import Version
from support import onnx_models
from support.onnx_models import HANDMADE_MODELS, random_inputs, run_segments, run_whole

from coordinator.models.onnx.cutting import cut
from coordinator.models.onnx.reader import OnnxModel, read_onnx
from coordinator.models.onnx.segments import segment_model

onnxruntime = pytest.importorskip("onnxruntime")
TOLERANCE = 1e-4


def cuts(count: int, seeds: int) -> list[tuple[list[int], bool]]:
    """Assignments of operators to up to four devices: all on one, runs of neighbours, and random ones."""
    found = [([0] * count, False)]
    for seed in range(seeds):
        choose = random.Random(seed)
        ends = sorted(choose.choices(range(count + 1), k=3))
        found.append(([sum(index >= end for end in ends) for index in range(count)], seed % 2 == 0))
        found.append(([choose.randrange(4) for _ in range(count)], False))
    return found


def compare(path: Path, model: OnnxModel, seeds: int, tolerance: float = TOLERANCE) -> None:
    inputs = random_inputs(model.spec)
    expected = run_whole(path, inputs)
    for assignment, eager in cuts(model.spec.num_operators, seeds):
        found = run_segments(model, cut(model.spec, assignment, eager=eager), inputs)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].shape == array.shape
            assert found[name].dtype == array.dtype
            assert np.abs(found[name].astype(np.float64) - array).max() <= tolerance, (name, assignment)


@pytest.mark.parametrize("make", HANDMADE_MODELS, ids=lambda make: make.__name__)
def test_cuts_of_small_graphs_equal_one_session(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    if make is onnx_models.nibbles and Version(onnxruntime.__version__) < Version("1.20"):
        pytest.skip("this version of onnxruntime has no weights of 4 bits")
    path = make(tmp_path / "model.onnx")
    model = read_onnx(path, {"n": 3} if make is onnx_models.shapes_from_shapes else None)
    compare(path, model, seeds=4)


@pytest.mark.parametrize("threshold", [0, 1024])
def test_external_weights_file(tmp_path: Path, threshold: int) -> None:
    inside = onnx_models.branches(tmp_path / "inside.onnx")
    path = tmp_path / "outside.onnx"
    onnx.save(
        onnx.load(inside), path, save_as_external_data=True, location="weights.bin", size_threshold=threshold,
        convert_attribute=True,
    )  # fmt: skip
    assert (tmp_path / "weights.bin").stat().st_size >= 3 * 32768
    model = read_onnx(path)
    assert model.spec.operators == read_onnx(inside).spec.operators
    compare(path, model, seeds=2)


@cache
def exported(name: str, folder: Path) -> Path:
    from tools.graph_models import build, export

    return export(build(name, tiny=True), folder / f"{name}.onnx")


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "efficientnet_b0", "bert", "vit", "two_branch"])
def test_cuts_of_exported_networks_equal_one_session(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("transformers")
    path = exported(name, tmp_path_factory.getbasetemp())
    compare(path, read_onnx(path), seeds=1)


def test_batch_dimension_can_be_set_at_load(tmp_path: Path) -> None:
    """With every dimension fixed at load, no operators that compute shapes remain."""
    pytest.importorskip("transformers")
    from tools.graph_models import build, export

    axes = {0: "batch", 1: "length"}
    path = export(build("bert", tiny=True), tmp_path / "bert.onnx", {"input_ids": axes, "attention_mask": axes})
    model = read_onnx(path, {"batch": 3, "length": 11})
    assert model.spec.inputs[0].shape == (3, 11)
    assert "Shape" in {node.op_type for node in onnx.load(path).graph.node}
    assert "Shape" not in {operator.kind for operator in model.spec.operators}
    compare(path, model, seeds=1)


def test_segment_lists_large_weights_and_embeds_small_ones(tmp_path: Path) -> None:
    model = read_onnx(onnx_models.shared_weights(tmp_path / "model.onnx"))
    first, second = cut(model.spec, [0, 0, 1, 1, 1, 1, 1, 1])
    segments = [segment_model(model, segment) for segment in (first, second)]
    assert [len(each.proto) < 32768 for each in segments] == [True, True]
    # `w` is in both segments with the same bytes; `v` and `u` are below the size limit and therefore embedded.
    assert [[weight.name for weight in each.weights] for each in segments] == [["w"], ["w"]]
    (one,), (other,) = (each.weights for each in segments)
    assert (one.data_type, tuple(one.dims)) == (onnx.TensorProto.FLOAT, (64, 128))
    data = model.file.read(one)
    assert data.nbytes == 32768
    assert data == model.file.read(other)
    np.testing.assert_array_equal(
        np.frombuffer(data, np.float32).reshape(64, 128), onnx.numpy_helper.to_array(onnx_models.weight("w", 64, 128))
    )
    inside = {each.name for each in onnx.load_from_string(segments[1].proto).graph.initializer}
    assert inside == {"w", "v", "u", "sizes"}
