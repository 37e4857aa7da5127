"""Kernels of one weight format: all multiply the same quantised values, and a choice selects among them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.transformer.kernels.base import Partition, multiplies_bfloat16  # noqa: E402
from agent.worker.transformer.kernels.int4 import in_order_of_outputs, packed_order  # noqa: E402
from agent.worker.transformer.matrices import Matrix, empty_matrix, layouts_to_measure  # noqa: E402
from hearth.errors import StepFailed  # noqa: E402
from hearth.plan.kernels import KernelChoice  # noqa: E402
from hearth.plan.model_spec import WeightFormat  # noqa: E402

torch.set_num_threads(
    1
)  # with more, onnxruntime shares them with all sessions of this process, also those of other tests

CPU = torch.device("cpu")
ALL = slice(None)
# Largest relative error in the Euclidean norm against the product in float32: activations, or expanded weights, are rounded
# to bfloat16; onnxruntime and oneDNN round activations to int8.
ERRORS = {"torch": 5e-3, "expand-bfloat16": 5e-3, "expand-float32": 2e-6, "onnxruntime": 1.5e-2, "onednn": 1.5e-2}


def loaded(shape: tuple[int, int], weights: WeightFormat) -> dict[str, Matrix]:
    """The same matrix in each layout."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.01  # zero points count
    matrices = layouts_to_measure(*shape, weights, CPU, Partition(0, (0, shape[0])))
    for matrix in matrices:
        matrix.load(ALL, ALL, weight)
    return {matrix.layout: matrix for matrix in matrices}


@pytest.mark.parametrize("shape", [(64, 128), (80, 96), (592, 256)])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_all_kernels_multiply_the_same_quantised_values(weights: WeightFormat, shape: tuple[int, int]) -> None:
    layouts = loaded(shape, weights)
    assert len({matrix.quantisation_error for matrix in layouts.values()}) == 1
    if "expand-float32" not in layouts["torch"].kernels:
        pytest.skip("this build of torch packs int4 in another layout")
    stored_kn = layouts["torch"].product("expand-float32", torch.eye(shape[1]))
    for rows in (0, 1, 5, 70):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)) + 0.5
        bias, out = torch.randn(shape[0]), torch.empty(rows, shape[0])
        expected = x @ stored_kn + bias
        for matrix in layouts.values():
            for kernel in matrix.kernels:
                y = matrix.product(kernel, x, bias, out)
                assert y.data_ptr() == out.data_ptr()
                assert (y - expected).norm() <= ERRORS[kernel] * (expected - bias).norm()


@pytest.mark.parametrize("num_outputs", [16, 32, 80, 144, 592])
def test_outputs_are_packed_in_an_order_that_is_undone(num_outputs: int) -> None:
    order = packed_order(num_outputs)
    assert torch.equal(order.sort().values, torch.arange(num_outputs))
    y = torch.randn(3, num_outputs)
    assert torch.equal(in_order_of_outputs(y[:, order], torch.float32), y)


def test_many_rows_are_multiplied_in_the_floats_that_the_processor_has() -> None:
    expected = "expand-bfloat16" if multiplies_bfloat16() else "expand-float32"
    formats: tuple[WeightFormat, ...] = ("int4", "int8")
    for weights in formats:
        matrix = empty_matrix(64, 128, weights, CPU)
        assert matrix.default_kernel(1) == "torch"
        assert matrix.default_kernel(256) == (expected if expected in matrix.kernels else "torch")


def packed_int8(shape: tuple[int, int]) -> tuple[Matrix, Matrix]:
    """The same int8 matrix in oneDNN's layout, and with plain rows."""
    layouts = loaded(shape, "int8")
    if "onednn" not in layouts:
        pytest.skip("oneDNN has no exact int8 products on this processor")
    return layouts["onednn"], layouts["torch"]


def test_rows_with_outliers_are_not_rounded_coarsely() -> None:
    packed, plain = packed_int8((592, 256))
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(3))
    x[5, 7] = x[40, 0] = 1000.0  # in steps of 1000 / 127, all others of the row would be 0
    for some in (x, x[5:6], x[40:41, :]):
        expected = plain.product("expand-float32", some)
        errors = (packed.matmul(some) - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.max() <= ERRORS["onednn"]
    assert errors.max() < 1e-3


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_rows_of_int8_products_do_not_depend_on_each_other(rows: int) -> None:
    packed, _ = packed_int8((1040, 256))
    x = torch.randn(301, 256, generator=torch.Generator().manual_seed(4))
    x[::7, 3] = 500.0
    together = packed.matmul(x)
    for start in (0, 1):
        assert torch.equal(together[start : start + rows], packed.matmul(x[start : start + rows]))


def test_packed_int8_takes_a_byte_for_each_weight() -> None:
    packed, _ = packed_int8((512, 512))
    assert 512 * 512 <= sum(dict(packed.memory).values()) <= 512 * 512 + 16 * 512


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
def test_an_empty_part_that_comes_last_changes_nothing(weights: WeightFormat) -> None:
    weight = torch.randn(64, 512)
    for matrix in layouts_to_measure(64, 512, weights, CPU, Partition(0, (0, 64))):
        matrix.load(ALL, ALL, weight)
        before = matrix.matmul(torch.eye(512))
        matrix.load(slice(64, None), ALL, weight[64:])
        assert torch.equal(matrix.matmul(torch.eye(512)), before)


@pytest.mark.parametrize("instructions", [pytest.param("default", marks=pytest.mark.slow), "avx2"])
def test_bfloat16_is_not_used_where_torch_may_not_use_its_instructions(instructions: str) -> None:
    program = "from agent.worker.transformer.kernels.base import multiplies_bfloat16 as b; print(b())"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": instructions}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert said.stdout == "False\n", said.stderr


def test_choice_selects_layout_and_kernel_by_rows() -> None:
    names = ("expand-float32", "torch")
    choice = KernelChoice(num_outputs=64, num_inputs=128, layout="torch", rows=(4, 16), kernels=names)
    matrix = empty_matrix(96, 128, "int8", CPU, choices=[choice])
    matrix.load(ALL, ALL, torch.randn(96, 128))
    for rows, kernel in ((1, "expand-float32"), (4, "expand-float32"), (5, "torch"), (99, "torch")):
        x = torch.randn(rows, 128)
        assert torch.equal(matrix.matmul(x), matrix.product(kernel, x))


def test_unknown_layouts_and_kernels_give_way_to_the_default() -> None:
    default = empty_matrix(96, 128, "int8", CPU)
    weight, x = torch.randn(96, 128), torch.randn(3, 128)
    default.load(ALL, ALL, weight)
    for layout in ("torch", "of another version"):
        choice = KernelChoice(num_outputs=96, num_inputs=128, layout=layout, rows=(1,), kernels=("unknown",))
        matrix = empty_matrix(96, 128, "int8", CPU, choices=[choice])
        matrix.load(ALL, ALL, weight)
        assert torch.equal(matrix.matmul(x), default.matmul(x))


@pytest.mark.parametrize("partition", [None, Partition(0, (0, 32, 64))])
def test_int8_that_is_used_in_parts_is_not_given_to_onnxruntime(partition: Partition | None) -> None:
    choice = KernelChoice(num_outputs=64, num_inputs=128, layout="onnxruntime", rows=(1,), kernels=("onnxruntime",))
    assert empty_matrix(64, 128, "int8", CPU, partition, [choice]).layout == "torch"


def test_plain_float32_is_used_where_it_was_chosen() -> None:
    whole = Partition(0, (0, 640))
    plain = KernelChoice(num_outputs=640, num_inputs=640, layout="plain", rows=(1,), kernels=("plain",))
    assert empty_matrix(640, 640, "float32", CPU, whole, [plain]).layout == "plain"


@pytest.mark.parametrize(("weights", "bytes_per_weight"), [("int4", 0.9375), ("int8", 1.09375)])
def test_memory_of_onnxruntime_is_counted(weights: WeightFormat, bytes_per_weight: float) -> None:
    """The size of the packed weights is that of the growth of a process (onnxruntime 1.31)."""
    layouts = loaded((64, 256), weights)
    if "onnxruntime" not in layouts:
        pytest.skip("onnxruntime has no such kernel here")
    assert sum(dict(layouts["onnxruntime"].memory).values()) == bytes_per_weight * 64 * 256


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_single_rows_keep_their_results(weights: WeightFormat) -> None:
    """onnxruntime writes single rows to the same memory; a result that is still in use must not change."""
    matrix = loaded((64, 256), weights).get("onnxruntime")
    if matrix is None:
        pytest.skip("onnxruntime has no such kernel here")
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(2))
    first, both = matrix.matmul(x[:1]), matrix.matmul(x)
    second = matrix.matmul(x[1:])
    assert (torch.cat([first, second]) - both).norm() <= 1e-6 * both.norm()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(matrix.matmul, [x[:1], x[1:]] * 50))
    assert all(torch.equal(y, (first, second)[index % 2]) for index, y in enumerate(found))


@pytest.mark.parametrize(
    ("weights", "layout"), [("int8", "onnxruntime"), ("int8", "onednn"), ("int4", "onnxruntime"), ("int4", "torch")]
)
def test_some_layouts_give_the_whole_matrix_or_none_of_it(weights: WeightFormat, layout: str) -> None:
    matrix = loaded((64, 256), weights).get(layout)
    if matrix is None:
        pytest.skip(f"{layout} has no such kernel here")
    x = torch.randn(3, 256)
    assert matrix.rows(ALL) is matrix.columns(slice(0, 256)) is matrix
    assert matrix.rows(slice(0, 0)).matmul(x).shape == (3, 0)
    assert not matrix.columns(slice(0, 0)).matmul(x[:, :0]).any()
    for divide in (matrix.rows, matrix.columns):
        with pytest.raises(StepFailed, match="cannot be divided"):
            divide(slice(0, 32))


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_matrix_without_inputs_gives_zeros(weights: WeightFormat) -> None:
    garbage = [torch.full((64,), float("nan"), dtype=torch.bfloat16) for _ in range(64)]
    del garbage  # memory that a new matrix is likely to get
    matrix = empty_matrix(64, 0, weights, CPU)
    assert torch.equal(matrix.matmul(torch.ones(20, 0)), torch.zeros(20, 64))
