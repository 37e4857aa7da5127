"""The worker on a double of a CUDA device, which refuses what CUDA refuses; see `support.cuda_double` for its rules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hearth.errors import UnsupportedWeights
from hearth.plan.model_spec import WeightFormat

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support import cuda_double  # noqa: E402 (needs torch)
from support.cuda_double import CUDA, CudaDouble, CudaRule, forget_devices  # noqa: E402

from agent.worker.transformer.comm.staging import CudaStaging  # noqa: E402
from agent.worker.transformer.kernels import int4_cuda  # noqa: E402
from agent.worker.transformer.kernels.int4 import dequantise_int4, quantise_int4  # noqa: E402
from agent.worker.transformer.kernels.int4_cuda import Int4CudaMatrix  # noqa: E402
from agent.worker.transformer.kernels.int8 import Int8Matrix  # noqa: E402
from agent.worker.transformer.matrices import Matrix, empty_matrix  # noqa: E402

ALL = slice(None)


@pytest.fixture(autouse=True)
def _forgotten_devices() -> Iterator[None]:
    """What is known about the device's kernels holds for one double."""
    yield
    forget_devices()


# ---- staging --------------------------------------------------------------------------------------------------------


def test_copy_to_the_device_waits_for_no_queued_compute() -> None:
    with CudaDouble() as gpu:
        staging = CudaStaging()
        into = torch.zeros(4, 8, device=CUDA)
        staging.to_wire(into + 1)
        staging.from_wire(np.ones((4, 8), np.float32), into)
        staging.add_from_wire(np.ones((4, 8), np.float32), into)
        from_device, *to_device = gpu.copies
        assert from_device.waits_for(gpu.current)  # for the values that it copies
        assert not any(copy.waits_for(gpu.current) for copy in to_device)
        assert len({copy.stream for copy in to_device} | {from_device.stream}) == 2
        assert torch.equal(into.cpu(), torch.full((4, 8), 2.0))


def test_double_detects_a_copy_over_a_tensor_that_is_still_read() -> None:
    with CudaDouble():
        into, copies = torch.zeros(4, device=CUDA), torch.cuda.Stream()
        into + 1
        host = torch.zeros(4, pin_memory=True)
        with torch.cuda.stream(copies), pytest.raises(CudaRule, match="in no certain order"):
            into.copy_(host, non_blocking=True)


def test_double_detects_a_copy_that_nobody_waited_for() -> None:
    with CudaDouble():
        tensor, host = torch.ones(4, device=CUDA), torch.zeros(4, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        assert host.isnan().all()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(host, torch.ones(4))


def test_double_detects_memory_that_is_freed_under_another_stream() -> None:
    def free_too_early() -> None:
        with CudaDouble():
            other = torch.cuda.Stream()
            tensor = torch.ones(4, device=CUDA)
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                tensor.add_(1)
            del tensor

    with pytest.raises(CudaRule, match="record_stream"):
        free_too_early()


@pytest.mark.parametrize(
    "refused",
    [
        lambda gpu, host: gpu + host,
        lambda gpu, host: gpu.numpy(),
        lambda gpu, host: host.record_stream(torch.cuda.current_stream()),
        lambda gpu, host: torch.empty(4).copy_(gpu, non_blocking=True),
    ],
)
def test_double_refuses_what_cuda_refuses(refused: object) -> None:
    with CudaDouble():
        gpu, host = torch.ones(4, device=CUDA), torch.ones(4)
        with pytest.raises(CudaRule):
            refused(gpu, host)  # type: ignore[operator]


# ---- weights --------------------------------------------------------------------------------------------------------


def filled(weight: torch.Tensor, weights: WeightFormat) -> Matrix:
    matrix = empty_matrix(*weight.shape, weights, CUDA)
    for rows in (slice(0, 40), slice(40, None)):
        matrix.load(rows, ALL, weight[rows])
    return matrix


def test_int4_kernels_multiply_the_same_quantised_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_cuda, "_TILE_WEIGHTS", 16 * 96)  # of 40 outputs, in three tiles
    monkeypatch.setattr(int4_cuda, "_TILE_BLOCKS", 2)
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.01
    stored = dequantise_int4(*quantise_int4(weight))
    with CudaDouble(), torch.inference_mode():
        matrix = empty_matrix(40, 96, "int4", CUDA)
        assert isinstance(matrix, Int4CudaMatrix)
        matrix.load(ALL, ALL, weight)
        for rows in (1, 70):
            x = torch.randn(rows, 96).bfloat16().float()
            products = {kernel: matrix.product(kernel, x.to(CUDA)).cpu() for kernel in matrix.kernels}
            for y in products.values():
                assert (y - x @ stored.t()).norm() <= 5e-3 * (x @ stored.t()).norm()
        assert [matrix.kernel(rows) for rows in (1, 128, 129)] == ["torch", "torch", "expand-bfloat16"]
        num_bytes = sum(dict(matrix.memory).values())
    assert num_bytes == 40 * 96 * 0.625


def test_another_order_of_inputs_in_a_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_double, "_WORD_INPUTS", (1, 16, 8, 24, 0, 17, 9, 25))
    weight, x = torch.randn(16, 64), torch.randn(70, 64).bfloat16().float()
    with CudaDouble(), torch.inference_mode():
        matrix = filled(weight, "int4")
        few, many = (matrix.product(kernel, x.to(CUDA)).cpu() for kernel in ("torch", "expand-bfloat16"))
    assert (few - many).norm() <= 5e-3 * few.norm()


def test_without_a_known_layout_all_rows_are_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = cuda_double.pack_int4
    shuffled = dict(cuda_double._EMULATED)
    shuffled["aten::_convert_weight_to_int4pack"] = lambda steps, tiles: pack(steps, tiles).flip(2)
    monkeypatch.setattr(cuda_double, "_EMULATED", shuffled)
    with CudaDouble(), torch.inference_mode():
        matrix = filled(torch.randn(48, 64), "int4")
        assert matrix.kernel(500) == "torch"


def test_int4_needs_a_shape_and_a_gpu_that_torch_has_a_kernel_for() -> None:
    with CudaDouble():
        assert isinstance(empty_matrix(60, 64, "int4", CUDA), Int8Matrix)
        assert isinstance(empty_matrix(64, 48, "int4", CUDA), Int8Matrix)
    forget_devices()
    with CudaDouble(capability=(7, 2)), pytest.raises(UnsupportedWeights, match="--weights int8"):
        empty_matrix(64, 64, "int4", CUDA)


def test_int8_and_int4_expand_a_bounded_part_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights of a large matrix in 16 bits would take more than the matrix itself."""
    from agent.worker.transformer.kernels import int8

    monkeypatch.setattr(int8, "_GPU_TILE_BYTES", 16 * 64 * 2)
    monkeypatch.setattr(int8, "_GPU_TILE_OUTPUTS", 16)
    monkeypatch.setattr(int4_cuda, "_TILE_WEIGHTS", 16 * 64)
    monkeypatch.setattr(int4_cuda, "_TILE_BLOCKS", 2)
    for weights in ("int8", "int4"):
        with CudaDouble() as gpu, torch.inference_mode():
            matrix = filled(torch.randn(256, 64), weights)  # type: ignore[arg-type]
            x = torch.randn(4, 64).to(CUDA)
            held = gpu.held_bytes
            gpu.peak_bytes = held
            y = matrix.product("expand-bfloat16", x)
            assert gpu.peak_bytes - held - y.nbytes < 256 * 64
