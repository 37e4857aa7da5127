"""From measured kernels to a device's memory limit and the kernels of its shard."""

from __future__ import annotations

from support.plans import LLAMA_1B, cluster, device_profile

from coordinator.devices.block_profiling import block_workload, budget_for_layouts, chosen_kernels
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
    devices = [device_profile(index, 1.0, SPEC) for index in range(3)]
    measured = [
        device.model_copy(update={"blocks": device.blocks.model_copy(update={"kernels": times})})
        for device, times in zip(devices, (kernel_times(0.5), kernel_times(2.0), ()), strict=True)
    ]
    chosen = chosen_kernels(cluster(measured, 1000), workload)
    assert [[choice.layout for choice in chosen[f"id{index}"]] for index in range(3)] == [
        ["onnxruntime"], ["torch"], [],
    ]  # fmt: skip


def test_packed_layouts_and_their_library_lower_the_memory_limit() -> None:
    subject = BlocksOf(model=SPEC, seq_len=64)
    blocks = device_profile(0, 1.0, SPEC).blocks
    unchanged = [blocks, blocks.model_copy(update={"kernels": kernel_times(2.0)})]
    assert [budget_for_layouts(1 << 30, subject, each) for each in unchanged] == [1 << 30] * 2
    packed = blocks.model_copy(update={"kernels": kernel_times(0.5)})
    assert budget_for_layouts(1 << 30, subject, packed) == int(((1 << 30) - (40 << 20)) / 1.5)
    assert budget_for_layouts(1 << 20, subject, packed) == 0
