"""Graphs on a CUDA device. Skipped unless onnxruntime has a provider for it."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
if "CUDAExecutionProvider" not in ort.get_available_providers():
    pytest.skip("this build of onnxruntime has no CUDA provider", allow_module_level=True)

from onnx import helper, numpy_helper  # noqa: E402
from support.graph_engines import (  # noqa: E402 (needs onnxruntime)
    GraphCluster,
    random_array,
    random_cut,
    random_model,
    reference,
)
from support.onnx_models import graph, node, saved, value, weight  # noqa: E402

from agent.worker.graph.profiler import GRAPH_FILE, profile_graph  # noqa: E402
from agent.worker.graph.sessions import make_session, providers_for  # noqa: E402


@pytest.mark.parametrize("seed", range(3))
def test_segments_equal_one_session_on_the_cpu(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    model = random_model(rng, 16)
    plan = random_cut(model, rng, 4, 2)
    feeds = {"x": random_array(seed), "z": random_array(seed + 1000)}
    expected = reference(model, feeds)
    with GraphCluster(plan, model, tmp_path, compute_device="cuda") as cluster:
        cluster.start(1, feeds)
        found = cluster.outputs(1)
    assert found.keys() == expected.keys()
    assert all(np.allclose(found[name], expected[name], atol=1e-4) for name in expected)


def test_session_keeps_its_options_where_tensorrt_cannot_be_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime's own fallback would forget them, and print to the output, which is a profiler's answer."""
    (tmp_path / "m.onnx").write_bytes(random_model(random.Random(0), 16).SerializeToString())
    session = make_session(tmp_path / "m.onnx", "the graph", 1, providers_for("cuda", tmp_path))
    assert session.get_provider_options()["CUDAExecutionProvider"]["arena_extend_strategy"] == "kSameAsRequested"
    assert capfd.readouterr().out == ""


def product_and_sums(size: int) -> bytes:
    """A product of two matrices of [size, size], one of them a weight, then five operators that cost next to nothing."""
    names = ["product", *(f"abs{index}" for index in range(5))]
    nodes = [node("MatMul", "x weight", "product")]
    nodes += [node("ReduceMax", "product", "abs0", keepdims=0)]
    nodes += [node("Abs", before, name) for before, name in pairwise(names[1:])]
    made = graph(nodes, [value("x", (size, size))], [value(names[-1], ())], [weight("weight", size, size)])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def test_products_of_float32_are_not_rounded_to_tf32(tmp_path: Path) -> None:
    """TF32 keeps 10 bits: its errors are 100 times those of float32."""
    size = 512
    matrix = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    product = graph(
        [node("MatMul", "x weight", "y")],
        [value("x", (size, size))],
        [value("y", (size, size))],
        [numpy_helper.from_array(matrix, "weight")],
    )
    session = make_session(saved(tmp_path / "m.onnx", product), "the graph", 1, providers_for("cuda", tmp_path))
    x = np.random.default_rng(1).standard_normal((size, size), dtype=np.float32)
    error = np.abs(session.run(None, {"x": x})[0] - x.astype(np.float64) @ matrix.astype(np.float64)).max()
    assert error / np.sqrt(size) < 2e-5


def test_nodes_have_the_times_of_their_work_not_of_starting_it(tmp_path: Path) -> None:
    (tmp_path / GRAPH_FILE).write_bytes(product_and_sums(4096))
    found = profile_graph(tmp_path, "here", 1, "cuda")
    product = next(kernel for kernel in found.kernels if "product" in kernel.operators)
    assert product.seconds > 0.5 * found.run_seconds  # of the seven nodes, which all start within microseconds


def test_memory_of_a_graph_is_that_of_the_gpu(tmp_path: Path) -> None:
    size = 8192
    matrix_bytes = 4 * size * size
    (tmp_path / GRAPH_FILE).write_bytes(product_and_sums(size))
    found = profile_graph(tmp_path, "here", 1, "cuda")
    assert matrix_bytes <= found.load_bytes < 2 * matrix_bytes
    assert 2 * matrix_bytes <= found.run_bytes < 6 * matrix_bytes  # the input, the product, and what kernels work on
    assert found.peak_bytes >= found.process_bytes + found.load_bytes


def test_graph_is_profiled_by_kernel_on_the_gpu(tmp_path: Path) -> None:
    (tmp_path / GRAPH_FILE).write_bytes(random_model(random.Random(0), 16).SerializeToString())
    profile = profile_graph(tmp_path, "here", 1, "cuda")
    assert profile.provider != "CPUExecutionProvider"
    assert profile.wire.beside_compute
    assert any(kernel.provider == "CUDAExecutionProvider" for kernel in profile.kernels)
    assert sum(kernel.seconds for kernel in profile.kernels) == pytest.approx(profile.run_seconds)
