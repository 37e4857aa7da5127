"""Pieces are chosen for the least moved bytes: optimal on chains, and never worse than a graph that is cut at random."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.models.onnx.tiling.space import Along, IndexSpace, Operand, Pieces
from coordinator.plan.graph.tiles.choice import WEIGHTS_ARE_DEAR, choose_pieces, held_bytes, moved_bytes
from coordinator.plan.graph.tiles.moved_bytes import Spread, TiledOperator, Traffic
from coordinator.plan.graph.tiles.options import (
    TileCounts,
    automatic_counts,
    check_can_cut,
    fixed_counts,
    piece_options,
)
from hearth.errors import CannotTile
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor

Spaces = list[IndexSpace | str]


def product_space(left: str, right: str, out: str, rows: int, columns: int, inner: int) -> IndexSpace:
    """A matrix product over (i, j, k), summed over k."""
    return IndexSpace(
        (rows, columns, inner),
        (Operand(left, (rows, inner), (Along(0), Along(2))), Operand(right, (inner, columns), (Along(2), Along(1)))),
        (Operand(out, (rows, columns), (Along(0), Along(1))),),
        summed=(2,),
    )


def activation_space(before: str, out: str, rows: int, columns: int) -> IndexSpace:
    axes = (Along(0), Along(1))
    return IndexSpace(
        (rows, columns), (Operand(before, (rows, columns), axes),), (Operand(out, (rows, columns), axes),)
    )


def feed_forward(rows: int, widths: list[int]) -> tuple[GraphSpec, Spaces]:
    """Products of a matrix with weights, each followed by an activation: x, then a0, b0, a1, b1, ..."""
    spaces: Spaces = []
    operators, tensors, weights, source = (
        [],
        [Tensor("x", 4 * rows * widths[0], None, (0,), shape=(rows, widths[0]))],
        [],
        "x",
    )
    for number, (inner, columns) in enumerate(zip(widths, widths[1:], strict=False)):
        spaces.append(product_space(source, f"w{number}", f"a{number}", rows, columns, inner))
        spaces.append(activation_space(f"a{number}", f"b{number}", rows, columns))
        operators.append(Operator(f"a{number}", "MatMul", 2.0 * rows * columns * inner, (number,)))
        operators.append(Operator(f"b{number}", "Relu", float(rows * columns)))
        weights.append(Parameter(f"w{number}", 4 * inner * columns))
        last = number == len(widths) - 2
        for index, name in ((2 * number, "a"), (2 * number + 1, "b")):
            done = last and name == "b"
            consumers = () if done else (index + 1,)
            tensors.append(
                Tensor(f"{name}{number}", 4 * rows * columns, index, consumers, shape=(rows, columns), is_output=done)
            )
        source = f"b{number}"
    return GraphSpec("feed-forward", tuple(operators), tuple(tensors), tuple(weights)), spaces


def pieces_for(
    spec: GraphSpec, spaces: Spaces, num_devices: int, counts: TileCounts, seconds: float = 1.0
) -> dict[int, Pieces]:
    options = piece_options(spec, spaces, [seconds] * spec.num_operators, num_devices, counts)
    return choose_pieces(spec, spaces, options, num_devices)


def test_one_row_cuts_columns_then_the_summed_axis() -> None:
    """The activation follows, nothing is gathered, and only the partial sums of the last product travel."""
    spec, spaces = feed_forward(1, [256, 100_000, 8])
    assert pieces_for(spec, spaces, 4, fixed_counts(4)) == {0: (1, 4, 1), 1: (1, 4), 2: (1, 1, 4)}


def test_many_rows_are_cut_by_rows() -> None:
    """No bytes travel before the output, which one device joins: it also computes the last activation."""
    spec, spaces = feed_forward(65_536, [64, 64, 64])
    assert pieces_for(spec, spaces, 4, fixed_counts(4)) == {0: (4, 1, 1), 1: (4, 1), 2: (4, 1, 1)}


def test_weights_are_cut_where_copies_do_not_fit() -> None:
    """Rows move less and copy every weight to both devices; columns, then the summed axis, hold each weight once."""
    spec, spaces = feed_forward(64, [64, 256, 64])
    options = piece_options(spec, spaces, [1.0] * spec.num_operators, 2, fixed_counts(2))
    copied = choose_pieces(spec, spaces, options, 2)
    cut = choose_pieces(spec, spaces, options, 2, WEIGHTS_ARE_DEAR)
    assert (copied[0], copied[2]) == ((2, 1, 1), (2, 1, 1))
    assert (cut[0], cut[2]) == ((1, 2, 1), (1, 1, 2))
    weights = spec.parameter_bytes(range(spec.num_operators))
    assert [held_bytes(spec, spaces, pieces, 2) for pieces in (copied, cut, {})] == [2 * weights, weights, weights]


@given(
    rows=st.sampled_from([1, 64, 4096]),
    widths=st.lists(st.sampled_from([8, 512, 16_384]), min_size=2, max_size=3),
    num_devices=st.integers(2, 3),
)
def test_choice_is_optimal_on_chains(rows: int, widths: list[int], num_devices: int) -> None:
    spec, spaces = feed_forward(rows, widths)
    counts = TileCounts((num_devices,), (num_devices,), 0.0)
    options = piece_options(spec, spaces, [1.0] * spec.num_operators, num_devices, counts)
    chosen = choose_pieces(spec, spaces, options, num_devices)
    every = (dict(enumerate(pieces)) for pieces in product(*options))
    least = min(moved_bytes(spec, spaces, pieces, num_devices) for pieces in every)
    assert moved_bytes(spec, spaces, chosen, num_devices) == pytest.approx(least)


@pytest.mark.parametrize(
    ("seconds", "tiles"),
    [(1.0, {4, 8}), (8e-3, {4}), (5e-3, {2}), (3e-3, {1})],
)
def test_a_tile_takes_two_milliseconds_or_more(seconds: float, tiles: set[int]) -> None:
    """An operator that is long enough occupies all four devices; a shorter one is cut less, or stays whole."""
    spec, spaces = feed_forward(64, [512, 512])
    options = piece_options(spec, spaces, [seconds, 1e-5], 4, automatic_counts(4))
    assert {prod(pieces) for pieces in options[0] if not (tiles == {1} and max(pieces) > 1)} == tiles
    if tiles == {1}:
        assert choose_pieces(spec, spaces, options, 4) == {}


def test_counts_are_powers_of_two_and_the_number_of_devices() -> None:
    assert automatic_counts(4).of_heavy == (2, 4, 8)
    assert automatic_counts(3).of_heavy == (2, 3, 4)
    assert automatic_counts(6).of_heavy == (2, 4, 6, 8)


def test_summed_axis_of_a_light_operator_stays_whole() -> None:
    spec, spaces = feed_forward(64, [64, 64])
    options = piece_options(spec, spaces, [0.0, 0.0], 2, automatic_counts(2))
    assert options[0][0] == (1, 1, 1)
    assert {pieces[2] for pieces in options[0]} == {1}


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ("operators of type If have no rule", "no rule"),
        (product_space("x", "w0", "a0", 3, 3, 3), "of 3, 3, 3, can be cut"),
    ],
)
def test_a_graph_that_cannot_be_cut_says_which_operator_and_why(space: IndexSpace | str, reason: str) -> None:
    spec, spaces = feed_forward(64, [64, 64])
    spaces[0] = space
    options = piece_options(spec, spaces, [1.0, 1.0], 4, fixed_counts(4))
    with pytest.raises(CannotTile, match=reason) as raised:
        check_can_cut(spec, spaces, options)
    assert (raised.value.operator, raised.value.kind) == ("a0", "MatMul")


def test_traffic_counts_what_lies_elsewhere_once() -> None:
    """Four blocks of rows on four devices: each of two devices that read all rows fetches the three others."""
    space = activation_space("x", "y", 8, 2)
    written = TiledOperator(space, (4, 1), 4).writes(0)
    everything = ((0, 8), (0, 2))
    traffic = Traffic()
    numbers = [traffic.number(each) for each in (written, Spread(((everything, 0), (everything, 1))), written)]
    assert numbers[0] == numbers[2]
    assert traffic.elements(numbers[0], numbers[1]) == 2 * 12
    assert traffic.elements(numbers[0], numbers[2]) == 0


def test_partial_sums_travel_to_the_device_that_adds_them() -> None:
    tiled = TiledOperator(product_space("x", "w", "y", 4, 4, 8), (1, 2, 2), 4)
    assert (tiled.num_tiles, tiled.num_operators) == (4, 6)
    assert tiled.summed_elements == 2 * 8  # each of two blocks of 8 has one join on another device
