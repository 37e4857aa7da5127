"""From measured kernels to a device's memory limit and the kernels of its shard."""

from __future__ import annotations

from pathlib import Path

from support.devices import ready_device, with_telemetry
from support.fleets import TransformerFleet
from support.plans import LLAMA_1B, cluster, device_profile, with_blocks

from coordinator.devices.block_profiling import block_workload, budget_for_layouts, chosen_kernels, known_kernels
from coordinator.devices.profile_cache import ProfileCache
from coordinator.devices.profiling import Profiler
from hearth.plan.kernels import KernelTime
from hearth.wire.messages import BlocksOf

SPEC = LLAMA_1B.model_copy(update={"weights": "int4"})


def kernel_times(packed_seconds: float) -> tuple[KernelTime, ...]:
    layouts = (("torch", "torch", 1.0, 0.625), ("onnxruntime", "onnxruntime", packed_seconds, 0.9375))
    return tuple(
        KernelTime(
            num_outputs=64, num_inputs=64, rows=1, layout=layout, kernel=kernel, seconds=seconds, bytes_per_weight=size
        )
        for layout, kernel, seconds, size in layouts
    )


def test_each_device_computes_with_the_kernels_of_its_profile() -> None:
    workload = block_workload(SPEC, 64)
    measured = [
        with_blocks(device_profile(index, 1.0, SPEC), kernels=times)
        for index, times in enumerate((kernel_times(0.5), kernel_times(2.0), ()))
    ]
    chosen = chosen_kernels(cluster(measured, 1000), workload)
    assert [[choice.layout for choice in chosen[f"id{index}"]] for index in range(3)] == [
        ["onnxruntime"], ["torch"], [],
    ]  # fmt: skip


def test_kernels_are_known_from_the_profile_of_an_equal_device(tmp_path: Path) -> None:
    """A plan that is not made now, such as a saved one, runs with measured kernels too."""
    workload = block_workload(SPEC, 64)
    a, b, other = (
        with_telemetry(ready_device(name), cpu_model=processor)
        for name, processor in (("a", "N100"), ("b", "N100"), ("c", "A76"))
    )
    measured = device_profile(0, 1.0, SPEC).blocks.model_copy(update={"kernels": kernel_times(0.5)})
    ProfileCache(tmp_path).keep_result(a, workload, measured)
    known = known_kernels(Profiler(TransformerFleet("abc"), tmp_path), [a, b, other], workload)  # type: ignore[arg-type]
    assert {name: [choice.layout for choice in choices] for name, choices in known.items()} == {
        "a": ["onnxruntime"], "b": ["onnxruntime"],
    }  # fmt: skip


def test_packed_layouts_and_their_library_lower_the_memory_limit() -> None:
    subject = BlocksOf(model=SPEC, seq_len=64)
    blocks = device_profile(0, 1.0, SPEC).blocks
    unchanged = [blocks, blocks.model_copy(update={"kernels": kernel_times(2.0)})]
    assert [budget_for_layouts(1 << 30, subject, each) for each in unchanged] == [1 << 30] * 2
    packed = blocks.model_copy(update={"kernels": kernel_times(0.5)})
    assert budget_for_layouts(1 << 30, subject, packed) == int(((1 << 30) - (40 << 20)) / 1.5)
    assert budget_for_layouts(1 << 20, subject, packed) == 0
