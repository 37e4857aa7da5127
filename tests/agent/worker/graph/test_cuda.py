"""Graphs on a CUDA device. Skipped unless onnxruntime has a provider for it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
if "CUDAExecutionProvider" not in ort.get_available_providers():
    pytest.skip("this build of onnxruntime has no CUDA provider", allow_module_level=True)

from support.graph_engines import (  # noqa: E402 (needs onnxruntime)
    GraphCluster,
    random_array,
    random_cut,
    random_model,
    reference,
)

from agent.worker.graph.profiler import GRAPH_FILE, profile_graph  # noqa: E402


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
    assert all(np.allclose(found[name], expected[name], atol=1e-3) for name in expected)


def test_graph_is_profiled_by_kernel_on_the_gpu(tmp_path: Path) -> None:
    (tmp_path / GRAPH_FILE).write_bytes(random_model(random.Random(0), 16).SerializeToString())
    profile = profile_graph(tmp_path, "here", 1, "cuda")
    assert profile.provider != "CPUExecutionProvider"
    assert profile.wire.beside_compute
    assert any(kernel.provider == "CUDAExecutionProvider" for kernel in profile.kernels)
