"""Profiling of a graph's operators, as onnxruntime fuses them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from onnx import TensorProto
from support.graph_engines import make_model
from support.onnx_models import graph, node, value, weight

from agent.worker.graph import profiler as graph_profiler
from agent.worker.graph import sessions
from agent.worker.graph.profiler import GRAPH_FILE, kernel_times, profile_graph
from hearth.errors import BadPlan, StoreFull
from hearth.wire.messages import GraphProfile, OperatorsOf, Profile, Profiled, StartProfile, decode, encode


def events(*runs: list[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """Profiling events of onnxruntime: nodes as (name, start, microseconds), then the event of their run."""
    offset = 0
    for run in runs:
        for name, start, length in run:
            args = {"op_name": name.upper(), "provider": "P"}
            name = f"{name}_kernel_time"
            yield {"cat": "Node", "name": name, "ts": offset + start, "dur": length, "args": args}
        end = max(start + length for _, start, length in run)
        yield {"cat": "Session", "name": "model_run", "ts": offset, "dur": end + 1}
        offset += end + 10


def test_kernel_times_exclude_first_and_disturbed_runs() -> None:
    quiet = [("a", 0, 100), ("b", 100, 300)]
    slow = [("a", 0, 200), ("b", 200, 300)]
    found = kernel_times(
        events([("a", 0, 9000), ("b", 9000, 1)], quiet, quiet, slow, [("a", 0, 100), ("b", 100, 3000)]),
        {"b": ("b", "c")},
    )
    assert [(each.name, each.kind, each.provider, each.seconds, each.operators) for each in found] == [
        ("a", "A", "P", pytest.approx(400e-6 / 3), ()),
        ("b", "B", "P", pytest.approx(3e-4), ("b", "c")),
    ]


def test_nodes_inside_a_loop_count_as_the_loop() -> None:
    run = [("loop", 0, 100), ("inner", 10, 20), ("inner", 40, 20), ("after", 100, 5)]
    found = {each.name: each.seconds for each in kernel_times(events(run, run), {})}
    assert found == {"loop": pytest.approx(1e-4), "after": pytest.approx(5e-6)}


def residual_block() -> bytes:
    """Two convolutions with a sum, whose weights are placeholders, and a product whose weight is included."""
    nodes = [
        node("Conv", "x w1", "conv1", pads=[1, 1, 1, 1]), node("Relu", "conv1", "relu1"),
        node("Conv", "relu1 w2", "conv2", pads=[1, 1, 1, 1]), node("Add", "conv2 relu1", "sum"),
        node("Relu", "sum", "relu2"), node("GlobalAveragePool", "relu2", "pool"), node("Flatten", "pool", "flat"),
        node("MatMul", "flat w3", "product"), node("Gather", "product ids", "pick", axis=1),
    ]  # fmt: skip
    weights = [weight("w3", 32, 8)]
    for name, shape in (("w1", (32, 16, 3, 3)), ("w2", (32, 32, 3, 3))):
        weights.append(
            TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        )
        weights[-1].external_data.add(key="location", value="elsewhere")
    inputs = [value("x", [1, 16, 24, 24]), value("ids", [3], TensorProto.INT64)]
    data: bytes = make_model(graph(nodes, inputs, [value("pick", [1, 3])], weights)).SerializeToString()
    return data


def profiled(folder: Path, data: bytes) -> GraphProfile:
    (folder / GRAPH_FILE).write_bytes(data)
    return profile_graph(folder, "here", 1, "cpu")


def test_graph_without_weights_is_profiled_by_kernel(tmp_path: Path) -> None:
    """In a child process, as in the daemon."""
    (tmp_path / GRAPH_FILE).write_bytes(residual_block())
    start = StartProfile(
        profile=Profile(subject=OperatorsOf(), timeout_seconds=60), device="here", folder=str(tmp_path), num_threads=1,
        compute_device="cpu",
    )  # fmt: skip
    command = [sys.executable, "-m", "agent.worker.graph.profiler"]
    done = subprocess.run(command, input=encode(start), capture_output=True, timeout=120, check=True)
    answer = decode(done.stdout)
    assert isinstance(answer, Profiled)
    found = answer.result
    assert isinstance(found, GraphProfile)
    assert sum(kernel.seconds for kernel in found.kernels) == pytest.approx(found.run_seconds)
    assert all(kernel.seconds >= 0 and kernel.provider == "CPUExecutionProvider" for kernel in found.kernels)
    operators = [name for kernel in found.kernels for name in kernel.operators]
    names = {"conv1", "relu1", "conv2", "sum", "relu2", "pool", "flat", "product", "pick"}
    assert sorted(operators) == sorted(names)
    by_operator = {name: kernel for kernel in found.kernels for name in kernel.operators}
    assert by_operator["relu1"] is by_operator["conv1"]
    assert by_operator["sum"] is by_operator["relu2"] is by_operator["conv2"]
    convolutions = {by_operator["conv1"].name, by_operator["conv2"].name}
    share = sum(kernel.seconds for kernel in found.kernels if kernel.name in convolutions) / found.run_seconds
    assert share > 0.5
    assert 20 << 20 < found.process_bytes < found.peak_bytes < 400 << 20
    assert found.wire.encrypted_seconds_per_byte > 0


def test_nodes_are_timed_without_tensorrt_which_compiles_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime refuses to write a graph with compiled nodes to a file. Here, a session refuses that in its place."""
    asked = []

    def make_session(path: Path, name: str, num_threads: int, providers: Any, configure: Any = None) -> Any:
        names = [provider for provider, _ in providers]
        asked.append(names)

        def checked(options: Any) -> None:
            if configure is not None:
                configure(options)
            if options.optimized_model_filepath and "TensorrtExecutionProvider" in names:
                raise BadPlan(reason="Unable to serialize model as it contains compiled nodes")

        return real(path, name, num_threads, [("CPUExecutionProvider", {})], checked)

    real = sessions.make_session
    monkeypatch.setattr(sessions, "make_session", make_session)
    found = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(sessions, "providers_for", lambda device, store: [(name, {}) for name in found])
    assert profiled(tmp_path, residual_block()).kernels
    assert asked == [found, found[1:]]


def test_profiler_failures_are_typed_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadPlan, match="not an ONNX model"):
        profiled(tmp_path, b"\x07\x07")
    for kind, shape, reason in (("Nonesuch", [3], "Nonesuch"), ("Relu", ["batch"], "input x")):
        model = make_model(graph([node(kind, "x", "y")], [value("x", shape)], [value("y", shape)]))
        with pytest.raises(BadPlan, match=reason):
            profiled(tmp_path, model.SerializeToString())
    monkeypatch.setattr(graph_profiler, "_RESERVE_BYTES", 1 << 60)
    with pytest.raises(StoreFull):
        profiled(tmp_path, residual_block())


@pytest.mark.parametrize("integrated", [False, True])
def test_memory_on_a_gpu_is_that_of_its_budget(integrated: bool) -> None:
    """A GPU of its own memory has a budget without CUDA's context; an integrated one shares it with the process."""
    memory = graph_profiler._Memory
    gpu: Any = SimpleNamespace(is_integrated=integrated, context_bytes=7)
    before, loaded, after_run = (memory(20, 10, free) for free in (1000, 900, 850))
    found = graph_profiler._memory_of_graph(before, loaded, after_run, 200, gpu)
    process_bytes, peak_bytes = (37, 200) if integrated else (0, 100)
    assert found == {"process_bytes": process_bytes, "load_bytes": 100, "peak_bytes": peak_bytes, "run_bytes": 50}
