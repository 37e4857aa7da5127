"""Weight formats: errors of products, views, and matrices that are filled in parts."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import FORMAT_ERRORS

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.transformer.kernels import onednn  # noqa: E402 (needs torch)
from agent.worker.transformer.kernels.base import Partition, memory_range  # noqa: E402
from agent.worker.transformer.kernels.int4 import Int4Matrix  # noqa: E402
from agent.worker.transformer.kernels.int8 import Int8Matrix  # noqa: E402
from agent.worker.transformer.kernels.onednn import PackedMatrix  # noqa: E402
from agent.worker.transformer.kernels.plain import FloatMatrix  # noqa: E402
from agent.worker.transformer.matrices import Matrix, empty_matrix, layouts_to_measure  # noqa: E402
from hearth.errors import StepFailed, UnsupportedWeights  # noqa: E402
from hearth.plan.model_spec import WeightFormat  # noqa: E402

# With more, onnxruntime shares them with all sessions of this process, also those of other tests:
torch.set_num_threads(1)

CPU = torch.device("cpu")
ALL = slice(None)


def filled(weight: torch.Tensor, weights: WeightFormat) -> Matrix:
    matrix = empty_matrix(*weight.shape, weights, CPU)
    for rows in (slice(0, 40), slice(40, None)):
        for columns in (slice(0, 64), slice(64, None)):
            matrix.load(rows, columns, weight[rows, columns])
    return matrix


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 9, 70])
@pytest.mark.parametrize("weights", FORMAT_ERRORS)
def test_product_error_is_within_the_format_tolerance(weights: WeightFormat, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    weight, x, bias = torch.randn(96, 160) * 0.1, torch.randn(num_rows, 160), torch.randn(96)
    expected = x @ weight.t() + bias
    matrix = filled(weight, weights)
    out = torch.empty(num_rows, 96)
    y = matrix.matmul(x, bias, out)
    assert y.data_ptr() == out.data_ptr()
    assert y.dtype == torch.float32
    assert torch.equal(matrix.matmul(x, bias), y)
    assert (y - expected).norm() <= FORMAT_ERRORS[weights] * expected.norm() + 1e-9


@pytest.mark.parametrize("weights", [weights for weights in FORMAT_ERRORS if weights != "int4"])
def test_views_multiply_as_submatrices(weights: WeightFormat) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 160) * 0.1, torch.randn(5, 160)
    matrix = filled(weight, weights)
    whole = matrix.matmul(x)
    assert torch.allclose(matrix.rows(slice(10, 50)).matmul(x), whole[:, 10:50], atol=0.02)
    left, right = slice(0, 96), slice(96, 160)
    parts = matrix.columns(left).matmul(x[:, left]) + matrix.columns(right).matmul(x[:, right])
    assert (parts - whole).norm() < max(2 * FORMAT_ERRORS[weights], 1e-6) * whole.norm()
    assert matrix.rows(slice(0, 0)).matmul(x).shape == (5, 0)
    assert not matrix.columns(slice(0, 0)).matmul(x[:, :0]).any()


@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("num_inputs", [44, 100, 300])
def test_int8_supports_any_number_of_inputs(num_inputs: int, num_rows: int) -> None:
    """torch's kernel crashes or returns NaN unless inputs are a multiple of 32; uneven MLP shares are not."""
    torch.manual_seed(num_inputs)
    weight, x = torch.randn(96, num_inputs) * 0.1, torch.randn(num_rows, num_inputs)
    expected = x @ weight.t()
    matrix = empty_matrix(*weight.shape, "int8", CPU)
    matrix.load(ALL, ALL, weight)
    assert (matrix.matmul(x) - expected).norm() <= FORMAT_ERRORS["int8"] * expected.norm()


def test_memory_per_weight_format() -> None:
    sizes = {weights: sum(t.nbytes for t in empty_matrix(64, 1024, weights, CPU).tensors) for weights in FORMAT_ERRORS}
    assert sizes == {
        "float32": 4 << 16, "float16": 2 << 16, "bfloat16": 2 << 16, "int8": (1 << 16) + 128, "int4": 5 << 13,
    }  # fmt: skip


def test_shapes_unsuitable_for_int4_use_int8() -> None:
    assert isinstance(empty_matrix(64, 1024, "int4", CPU), Int4Matrix)
    for shape in ((63, 1024), (64, 1000), (0, 32), (16, 0)):
        assert isinstance(empty_matrix(*shape, "int4", CPU), Int8Matrix)


def test_int4_without_a_kernel_is_rejected() -> None:
    """Memory is planned at 0.625 bytes per weight: an int8 fallback would exceed the budget."""
    with pytest.raises(UnsupportedWeights, match="--weights int8"):
        empty_matrix(64, 1024, "int4", torch.device("cuda"))


# ---- float32 in oneDNN's layout --------------------------------------------------------------------------------------


def packed(weight: torch.Tensor, partition: Partition) -> Matrix:
    if not PackedMatrix.supports(*weight.shape, CPU):
        pytest.skip("torch packs float32 for x86 processors only")
    matrix = empty_matrix(*weight.shape, "float32", CPU, partition)
    assert isinstance(matrix, PackedMatrix)
    for rows in (slice(0, 40), slice(40, None)):
        for columns in (slice(0, 64), slice(64, None)):
            matrix.load(rows, columns, weight[rows, columns])
    return matrix


PARTITIONS = [
    Partition(0, (0, 96)),
    Partition(0, (0, 30, 31, 96)),
    Partition(1, (0, 200)),
    Partition(1, (0, 7, 150, 200)),
]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 71, 96, 97, 284])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_packed_matrix_and_its_blocks_multiply_as_float32(partition: Partition, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    weight, x, bias = torch.randn(96, 200) * 0.1, torch.randn(num_rows, 200), torch.randn(96)
    matrix = packed(weight, partition)
    expected = x @ weight.t() + bias
    out = torch.full((num_rows, 96), torch.nan)
    assert matrix.matmul(x, bias, out).data_ptr() == out.data_ptr()
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.equal(matrix.matmul(x, bias), out)
    assert torch.allclose(matrix.matmul(x), x @ weight.t(), atol=1e-5)
    assert matrix.rows(slice(0, 96)) is matrix.columns(slice(0, 200)) is matrix
    for first, start in enumerate(partition.borders):
        for stop in partition.borders[first:]:
            part = slice(start, stop)
            if partition.axis == 0:
                assert torch.allclose(matrix.rows(part).matmul(x), (x @ weight.t())[:, part], atol=1e-5)
            else:
                y = matrix.columns(part).matmul(x[:, part], bias)
                assert torch.allclose(y, x[:, part] @ weight[:, part].t() + bias, atol=1e-5)


def test_packed_matrix_can_only_be_sliced_at_its_borders() -> None:
    matrix = packed(torch.randn(96, 200), Partition(1, (0, 7, 200)))
    with pytest.raises(StepFailed, match="only in the blocks"):
        matrix.columns(slice(0, 8))
    with pytest.raises(StepFailed, match="only in the blocks"):
        matrix.rows(slice(0, 7))


def test_row_counts_are_rounded_to_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiled kernel is kept and takes up to 0.5 MiB."""
    heights: set[int] = set()
    block = onednn._matmul_packed_block

    def recording_block(x_sk: torch.Tensor, height: int, *rest: Any) -> torch.Tensor:
        heights.add(height)
        return block(x_sk, height, *rest)

    monkeypatch.setattr(onednn, "_matmul_packed_block", recording_block)
    matrix = packed(torch.randn(96, 200), Partition(0, (0, 96)))
    for num_rows in range(1, 600):
        matrix.matmul(torch.empty(num_rows, 200))
    assert heights == {1, 2, 4, *range(8, 97, 8), 144, 192, 256}


def test_packing_overhead_is_small() -> None:
    matrix = packed(torch.randn(1000, 520), Partition(0, (0, 1000)))
    assert 4 * 1000 * 520 <= sum(memory_range(tensor)[1] for tensor in matrix.tensors) < 1.1 * 4 * 1000 * 520
    assert isinstance(empty_matrix(64, 64, "float32", CPU, Partition(0, (0, 64))), FloatMatrix)
    assert isinstance(empty_matrix(640, 640, "float32", CPU), FloatMatrix)


@pytest.mark.parametrize("weights", FORMAT_ERRORS)
def test_filled_matrix_multiplies_as_a_constant_one(weights: WeightFormat) -> None:
    """In every layout: so are weights made for measurements."""
    torch.manual_seed(0)
    shape, x = (64, 128), torch.rand(3, 128)
    expected = 0.02 * x.sum(dim=1, keepdim=True).expand(3, shape[0])
    for matrix in layouts_to_measure(*shape, weights, CPU, Partition(0, (0, shape[0]))):
        matrix.fill()
        assert torch.allclose(matrix.matmul(x), expected, rtol=0.02), matrix.layout
