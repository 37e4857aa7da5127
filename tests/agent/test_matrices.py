"""Weight formats: how far products are off, views, and that a matrix filled in parts is the one filled at once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.matrices import Int4, Int8, Matrix, empty_matrix  # noqa: E402 (needs torch)
from hearth.errors import StepFailed  # noqa: E402
from hearth.model.spec import WeightFormat  # noqa: E402

CPU = torch.device("cpu")
ALL = slice(None)
# Relative, in the Euclidean norm: of bfloat16's 8 bits, and of 7 bits below the largest of normal weights.
ERRORS: dict[WeightFormat, float] = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3, "int8": 1.5e-2, "int4": 0.1}


def filled(weight: torch.Tensor, weights: WeightFormat) -> Matrix:
    matrix = empty_matrix(*weight.shape, weights, CPU)
    for rows in (slice(0, 40), slice(40, None)):
        for columns in (slice(0, 64), slice(64, None)):
            matrix.fill(rows, columns, weight[rows, columns])
    return matrix


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 9, 70])
@pytest.mark.parametrize("weights", ERRORS)
def test_products_are_as_close_as_the_format_allows(weights: WeightFormat, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    weight, x, bias = torch.randn(96, 160) * 0.1, torch.randn(num_rows, 160), torch.randn(96)
    expected = x @ weight.t() + bias
    matrix = filled(weight, weights)
    out = torch.empty(num_rows, 96)
    y = matrix.times(x, bias, out)
    assert y.data_ptr() == out.data_ptr()
    assert y.dtype == torch.float32
    assert torch.equal(matrix.times(x, bias), y)
    assert (y - expected).norm() <= ERRORS[weights] * expected.norm() + 1e-9


@pytest.mark.parametrize("weights", [weights for weights in ERRORS if weights != "int4"])
def test_views_multiply_as_their_part(weights: WeightFormat) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 160) * 0.1, torch.randn(5, 160)
    matrix = filled(weight, weights)
    whole = matrix.times(x)
    assert torch.allclose(matrix.rows(slice(10, 50)).times(x), whole[:, 10:50], atol=0.02)
    left, right = slice(0, 96), slice(96, 160)
    parts = matrix.columns(left).times(x[:, left]) + matrix.columns(right).times(x[:, right])
    assert (parts - whole).norm() < max(2 * ERRORS[weights], 1e-6) * whole.norm()
    assert matrix.rows(slice(0, 0)).times(x).shape == (5, 0)
    assert not matrix.columns(slice(0, 0)).times(x[:, :0]).any()


def test_memory_is_what_the_format_says() -> None:
    sizes = {weights: sum(t.nbytes for t in empty_matrix(64, 1024, weights, CPU).tensors) for weights in ERRORS}
    assert sizes == {
        "float32": 4 << 16, "float16": 2 << 16, "bfloat16": 2 << 16, "int8": (1 << 16) + 128, "int4": 5 << 13,
    }  # fmt: skip


def test_what_does_not_suit_int4_is_int8() -> None:
    assert isinstance(empty_matrix(64, 1024, "int4", CPU), Int4)
    for shape in ((63, 1024), (64, 1000), (0, 32), (16, 0)):
        assert isinstance(empty_matrix(*shape, "int4", CPU), Int8)


def test_int4_is_used_whole() -> None:
    matrix = empty_matrix(64, 64, "int4", CPU)
    assert matrix.rows(slice(0, 64)) is matrix
    with pytest.raises(StepFailed, match="in part"):
        matrix.columns(slice(0, 32))
